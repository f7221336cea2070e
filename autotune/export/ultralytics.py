"""Export to Ultralytics YOLO: arguments of `yolo train` or `model.train(**settings)`.

Source: ultralytics/cfg/default.yaml, engine/trainer.py and data/build.py, 8.4.190. `batch` counts
the samples of all GPUs. It accumulates round(nbs / batch) passes, so `nbs` carries
grad_accum_steps. `optimizer: auto` sets its own learning rate.
"""

from __future__ import annotations

from typing import Any

from autotune.export.table import Defaults, Export, Table, Wanted, carried, export

ULTRALYTICS = Table(
    target="ultralytics",
    title="Ultralytics",
    precisions={"float32": {"amp": False}, "bfloat16": {"amp": "bf16"}, "float16": {"amp": True}},
    ddp_reason="it makes DistributedDataParallel itself",
)
_FUSED = {"Adam", "AdamW"}
"""Optimizers that it fuses on CUDA. Source: engine/trainer.py, build_optimizer."""
_OPTIMIZERS = {"SGD", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop"}


def to_ultralytics(found: Wanted) -> Export:
    """Return the arguments of `yolo train`."""
    ranks = 1 if found.device == "cpu" else found.processes
    settings: dict[str, Any] = {}
    if not found.has_budget:
        settings["batch"] = found.config.micro_batch_size * ranks
        settings["nbs"] = settings["batch"] * found.config.grad_accum_steps
    settings |= carried(found, ULTRALYTICS)
    if found.compiler:
        settings["compile"] = found.config.compile_mode
    if found.optimizer in _OPTIMIZERS:
        settings["optimizer"] = found.optimizer
    if found.device == "cpu":
        settings["device"] = "cpu"
    elif ranks > 1:
        settings["device"] = list(range(ranks))
    text = " ".join(f"{name}={_word(value)}" for name, value in settings.items()) + "\n"
    return export(
        found,
        ULTRALYTICS,
        text=text,
        settings=settings,
        defaults=_defaults(found),
        but={"fused"} if _fuses(found) else (),
    )


def _fuses(found: Wanted) -> bool:
    """Return True if it fuses the optimizer by itself."""
    return found.optimizer in _FUSED and found.device != "cpu"


def _word(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _defaults(found: Wanted) -> Defaults:
    if found.optimizer not in _OPTIMIZERS:
        yield (
            "optimizer",
            f"auto, which passes lr0={found.config.lr!r} over; name the optimizer that you train with",
        )
    if _fuses(found) and not found.config.fused:
        yield (
            "fused",
            f"true for {found.optimizer} on a GPU; trials had it as torch has it by itself",
        )
    yield (
        "warmup_epochs",
        "3: learning rate, momentum and accumulation rise meanwhile; trials kept them as they are",
    )
    yield "lrf", "0.01: the learning rate falls to a hundredth; trials kept it as it is"
    if found.config.has_workers and found.config.prefetch_factor is None:
        yield "prefetch_factor", "4; trials had torch's own, 2"
    for name in ("pin_memory", "persistent_workers"):
        if found.config.has_workers and not found.values[name]:
            yield name, "true; trials ran without"
    if found.config.intra_op_threads is None:
        yield "OMP_NUM_THREADS", "1 where it is not set; trials had torch's own"
    if found.processes > 1 and found.config.ddp_settings.broadcast_buffers:
        yield "broadcast_buffers", "false; in trials ranks had the buffers of rank 0"
    if (
        found.processes > 1
        and found.config.ddp_settings.find_unused_parameters == found.config.compile
    ):
        yield (
            "find_unused_parameters",
            f"{not found.config.compile}, by its own compile; trials did otherwise",
        )
