"""A short search of what the objects say, and of little more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import autotune

__all__ = ["assert_runs", "search"]


def search(model: Any, data: Any, folder: Path, *, n_trials: int = 1, **options: Any) -> autotune.SearchResult:
    """Trials with what the objects say, and with another number of workers."""
    space = {"num_workers": [1, 2], "amp_dtype": "float32", "intra_op_threads": None, "grad_accum_steps": 1}
    rest = {"prefetch_factor": [None], "persistent_workers": True, "pin_memory": False}
    return autotune.search(
        model,
        data,
        space={**space, **rest, **options.pop("space", {})},
        n_trials=n_trials,
        timeout_s=25,
        run_dir=folder,
        progress=False,
        **options,
    )


def assert_runs(result: autotune.SearchResult) -> None:
    """The baseline was measured, and nothing failed."""
    first, *rest = (trial.outcome for trial in result.trials)
    assert first == "ok"
    assert {*rest} <= {"ok", "pruned"}
