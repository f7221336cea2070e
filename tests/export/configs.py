"""Configurations for exports."""

from __future__ import annotations

from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.export.table import Wanted, wanted

__all__ = ["BUDGET", "EVERYTHING", "flat"]
EVERYTHING = TrainingConfig(
    micro_batch_size=64,
    grad_accum_steps=2,
    lr=1e-5,
    amp_dtype="bfloat16",
    num_workers=4,
    prefetch_factor=3,
    persistent_workers=True,
    pin_memory=True,
    in_order=False,
    worker_threads=1,
    channels_last=True,
    compile=True,
    compile_mode="reduce-overhead",
    cudnn_benchmark=True,
    fused=True,
    intra_op_threads=3,
    world_size=2,
    strategy="ddp",
    ddp=DdpConfig(
        bucket_cap_mb=50.0,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
        broadcast_buffers=False,
        comm_hook="fp16",
    ),
)
"""Each setting but static_graph, which can't stand here, and first_bucket_mb at another value than torch's own."""
BUDGET = TrainingConfig(micro_batch_size=1313, max_tokens=4096, grad_accum_steps=2)
"""With a token budget, the size of a batch in samples is an average."""


def flat(config: TrainingConfig) -> Wanted:
    """A configuration as tables read it."""
    return wanted(config)
