"""Make what a probe has seen of a script."""

from __future__ import annotations

from typing import Any

from autotune.config.plan import LoaderSite, ScriptFacts
from autotune.config.training_config import LOADER_ARGUMENTS

__all__ = ["make_script"]


def make_script(**changes: Any) -> ScriptFacts:
    """Return a plain loop with a DataLoader, whose loader, batch size and precision are within reach."""
    values: dict[str, Any] = {
        "observed": {"micro_batch_size": 16, "lr": 0.1},
        "loaders": (LoaderSite(file="/home/a/train.py", line=7),),
        "reached": (*LOADER_ARGUMENTS, "micro_batch_size", "amp_dtype", "intra_op_threads"),
    }
    return ScriptFacts.model_validate(values | changes)
