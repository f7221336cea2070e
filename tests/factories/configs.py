"""Configurations of every kind, for properties that hold of all."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import assume
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.config.training_config import (
    AMP_DTYPES,
    NEUTRAL_WITHOUT_WORKERS,
    CompileMode,
    DdpConfig,
    TrainingConfig,
)

__all__ = ["any_configs"]

_DDP = st.builds(
    DdpConfig,
    bucket_cap_mb=st.none() | st.integers(1, 200).map(float) | st.sampled_from([0.5, 12.25]),
    first_bucket_mb=st.none() | st.just(2.0),
    gradient_as_bucket_view=st.booleans(),
    static_graph=st.booleans(),
    find_unused_parameters=st.booleans(),
    broadcast_buffers=st.booleans(),
    comm_hook=st.sampled_from([None, "fp16", "bf16", "powersgd"]),
)
_SETTINGS = st.fixed_dictionaries(
    {
        "micro_batch_size": st.integers(1, 1024),
        "max_tokens": st.none() | st.integers(1, 8192),
        "grad_accum_steps": st.integers(1, 8),
        "lr": st.sampled_from([1e-5, 0.1, 3.0]) | st.floats(1e-8, 10),
        "amp_dtype": st.sampled_from(AMP_DTYPES),
        "num_workers": st.integers(0, 8),
        "prefetch_factor": st.none() | st.integers(1, 8),
        "persistent_workers": st.booleans(),
        "pin_memory": st.booleans(),
        "in_order": st.booleans(),
        "worker_threads": st.none() | st.integers(1, 4),
        "channels_last": st.booleans(),
        "compile": st.booleans(),
        "compile_mode": st.sampled_from(get_args(CompileMode)),
        "cudnn_benchmark": st.booleans(),
        "fused": st.booleans(),
        "intra_op_threads": st.none() | st.integers(1, 8),
        "world_size": st.integers(1, 4),
        "strategy": st.sampled_from(["single", "dp", "ddp"]),
        "ddp": st.none() | _DDP,
        "numa_binding": st.sampled_from([None, "node", "exclusive"]),
    }
)


@st.composite
def any_configs(draw: st.DrawFn) -> TrainingConfig:
    """Return a valid configuration, most contradictions removed so that few draws are lost."""
    values: dict[str, Any] = draw(_SETTINGS)
    if values["num_workers"] == 0:
        values |= NEUTRAL_WITHOUT_WORKERS
    if not values["compile"]:
        values["compile_mode"] = "default"
    if values["strategy"] == "single":
        values["world_size"] = 1
    if values["strategy"] != "ddp":
        values["ddp"] = None
    try:
        return TrainingConfig(**values)
    except ValidationError:
        assume(False)
        raise
