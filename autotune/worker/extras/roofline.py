"""Measure a batch's roofline: its floating-point operations and bytes, and the device's two peaks.

In: a trainer and a batch on its device. Out: a Roofline. It takes one optimizer step and one batch
under dispatch modes, which slow them down, and some 0.5 s for the peaks: never inside a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from autotune.apply.precision import tf32_products
from autotune.config.training_config import TrainingConfig
from autotune.records.result import Roofline
from autotune.worker.device import Device
from autotune.worker.step import StepTrainer

_PEAK_S = 0.2
"""Seconds to measure a peak: as long as a window's block."""
_MATRIX = {"cpu": 1024}
"""Rows and columns of a square matrix, by device; large enough for the best throughput. Source: our
convention."""
_COPY_BYTES = 256 * 2**20
"""Bytes of a copy; more than every cache holds."""
_DRAWN_BYTES = 2**20
"""Random bytes, which are repeated: to draw all would take a second on a CPU."""
_OVERWRITING = (
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "_foreach_copy_",
    "_foreach_fill_",
    "_foreach_zero_",
)
"""Operators that write their target without reading it, as all do with a target named `out`."""
_PICKING = ("embedding", "gather", "index", "index_select")
"""Operators that read as many values of their first argument as they return."""


class BytesMode(TorchDispatchMode):
    """Count the operators that run inside it, and the bytes that they read and write.

    Views move nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch
        self.operators = self.moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema  # noqa: SLF001 - no public way to an operator's aliases
        name = schema.name.partition("::")[2]
        if _only_views(schema) or name.startswith(("empty", "new_empty")):
            return out
        self.operators += 1
        # Pair the arguments with the schema's; those changed in place are both read and written.
        by_name = [
            (argument, kwargs[argument.name])
            for argument in schema.arguments
            if argument.name in kwargs
        ]
        named = [*zip(schema.arguments, args, strict=False), *by_name]
        changed = [value for argument, value in named if argument.alias_info is not None]
        returned = [] if changed else tree_leaves(out)  # an in-place operator returns its target
        read = [value for argument, value in named if not _is_overwritten(name, argument)]
        if name in _PICKING:
            read[0] = out
        self.moved_bytes += _size(tree_leaves(read)) + _size(tree_leaves(changed)) + _size(returned)
        return out


def trace_roofline(trainer: StepTrainer, batch: Any) -> Roofline:
    """Count the work of a batch with its share of the optimizer's step, and measure both peaks.

    The peaks are those of the trainer's precision; of TF32 if torch runs float32's convolutions in
    TF32 and most of the floating-point operations belong to these.

    Args:
        trainer: The trainer.
        batch: A batch on the device.
    """
    device = trainer.device

    # Count the work.
    with FlopCounterMode(display=False) as flops:
        trainer.train(batch)
    per_step = trainer.config.grad_accum_steps
    with BytesMode() as moved:
        for _ in range(per_step):
            trainer.train(batch)
    device.synchronize()

    # Measure the peaks.
    in_tf32 = _runs_in_tf32(trainer.config, device.kind, flops.get_flop_counts().get("Global", {}))
    with tf32_products() if in_tf32 else nullcontext():
        peak_flops_per_s = _peak_flops_per_s(trainer)
    return Roofline(
        flops=float(flops.get_total_flops()),
        moved_bytes=moved.moved_bytes / per_step,
        operators=round(moved.operators / per_step),
        peak_flops_per_s=peak_flops_per_s,
        peak_bytes_per_s=_peak_bytes_per_s(device),
    )


def _runs_in_tf32(config: TrainingConfig, device_kind: str, flops: Mapping[Any, int]) -> bool:
    """Return whether most of the work is in convolutions that torch runs in TF32 by default."""
    cudnn: Any = torch.backends.cudnn  # not typed by torch
    if config.amp_dtype != "float32" or device_kind != "cuda":
        return False
    if cudnn.conv.fp32_precision != "tf32":
        return False
    convolutions = sum(count for operator, count in flops.items() if "conv" in str(operator))
    return 2 * convolutions > sum(flops.values())


def _peak_flops_per_s(trainer: StepTrainer) -> float:
    """Measure the FLOP/s of a matrix product of normal values, which draws as much power as training.

    Ones and zeros switch fewer transistors: under its power limit a GPU then keeps a higher clock,
    and the peak is up to 15 % too high. Source: Horace He, "Strangely, Matrix Multiplications on
    GPUs Run Faster When Given 'Predictable' Data!", thonking.ai, 2024.
    """
    device = trainer.device
    amp = trainer.config.amp_dtype
    dtype = getattr(torch, amp) if amp in {"bfloat16", "float16"} else torch.float32
    rows = _MATRIX.get(device.kind, 4096)
    left = torch.randn((rows, rows), dtype=dtype, device=device.torch_device)
    right = torch.randn_like(left)
    out = torch.empty_like(left)
    return 2.0 * rows**3 * _repeats_per_s(lambda: torch.matmul(left, right, out=out), device)


def _peak_bytes_per_s(device: Device) -> float:
    """Measure the bytes/s of a copy, reads and writes together; at most 1/16 of the memory."""
    size = min(_COPY_BYTES, device.total_memory_bytes // 16)
    shape = (min(size, _DRAWN_BYTES),)
    drawn = torch.randint(256, shape, dtype=torch.uint8, device=device.torch_device)
    source = drawn.repeat(size // len(drawn))
    size = len(source)
    target = torch.empty_like(source)
    return 2.0 * size * _repeats_per_s(lambda: target.copy_(source), device)


def _repeats_per_s(work: Callable[[], object], device: Device) -> float:
    """Measure how often work runs per second: after two warm-up runs, in growing rounds."""
    for _ in range(2):
        work()
    count = 1
    while True:
        device.synchronize()
        begun = perf_counter()
        for _ in range(count):
            work()
        device.synchronize()
        spent_s = max(perf_counter() - begun, 1e-9)
        if spent_s >= _PEAK_S:
            return count / spent_s
        count = max(2 * count, int(count * _PEAK_S / spent_s))


def _only_views(schema: Any) -> bool:
    aliases = [returned.alias_info for returned in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _is_overwritten(name: str, argument: Any) -> bool:
    is_target = argument.alias_info is not None and argument.alias_info.is_write
    return bool(argument.is_out or (is_target and name in _OVERWRITING))


def _size(values: Iterable[Any]) -> int:
    """Return the bytes of the tensors among some values; of an expanded tensor, of its storage."""
    return sum(
        min(value.nbytes, value.untyped_storage().nbytes())
        for value in values
        if isinstance(value, Tensor)
    )
