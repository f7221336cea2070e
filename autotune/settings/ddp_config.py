"""DdpConfig: the arguments of DistributedDataParallel that are settings here.

Part of a TrainingConfig; a model is wrapped with them in applied/parallel.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.frozen import FrozenModel

__all__ = ["TORCH_BUCKET_CAP_MB", "TORCH_FIRST_BUCKET_MB", "DdpConfig"]

TORCH_BUCKET_CAP_MB = 25.0
"""DistributedDataParallel's own, where no bucket_cap_mb is given."""
TORCH_FIRST_BUCKET_MB = 1.0
"""Its first bucket, where no bucket_cap_mb is given: torch.distributed._DEFAULT_FIRST_BUCKET_BYTES."""

_Flag = Annotated[bool, Field(strict=True)]
_Megabytes = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DdpConfig(FrozenModel):
    """Arguments of torch.nn.parallel.DistributedDataParallel, under its own names."""

    bucket_cap_mb: _Megabytes | None = None
    """Size of a gradient bucket in MiB; None: torch's own (25)."""
    first_bucket_mb: _Megabytes | None = None
    """Size of the bucket that is exchanged first; None: torch's own (1, or bucket_cap_mb where that is given)."""
    gradient_as_bucket_view: _Flag = False
    """Let gradients be views into the buckets; saves about the gradients' size."""
    static_graph: _Flag = False
    """Promise that every iteration uses the same graph."""
    find_unused_parameters: _Flag = False
    """Look for parameters that got no gradient, each iteration."""
    broadcast_buffers: _Flag = True
    """Send rank 0's buffers to the others before each forward pass."""
    comm_hook: Literal["fp16", "bf16", "powersgd"] | None = None
    """Compression of the gradients on their way."""
