"""Settings that contradict each other make no TrainingConfig."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from autotune.config.training_config import DdpConfig, TrainingConfig


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prefetch_factor": 4}, "num_workers=0 and prefetch_factor=4"),
        ({"persistent_workers": True}, "num_workers=0"),
        ({"in_order": False}, "num_workers=0 and in_order=False"),
        ({"world_size": 4}, "world_size=4"),
        ({"ddp": DdpConfig()}, "'single'"),
        (
            {"strategy": "ddp", "ddp": DdpConfig(static_graph=True), "grad_accum_steps": 4},
            "grad_accum_steps=4",
        ),
        ({"strategy": "dp", "world_size": 2, "compile": True}, "compile=True"),
    ],
)
def test_a_contradiction_names_the_values_seen(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainingConfig(**changes)
    assert named in str(caught.value)
