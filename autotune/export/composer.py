"""Export to Composer: lines of Python around `Trainer`, whose arguments are the export's settings.

Source: composer/trainer/trainer.py, core/precision.py and devices/device_gpu.py, 0.32. Composer
has no gradient accumulation: the loader returns the batch of a whole optimizer step, which Composer
splits into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.export.table import (
    IN_LOADER_CALL,
    Code,
    Defaults,
    Export,
    Table,
    Wanted,
    as_call,
    carried,
    export,
    loader_call,
    loader_note,
    optimizer_note,
)

COMPOSER = Table(
    target="composer",
    title="Composer's Trainer",
    precisions={
        "float32": {"precision": "fp32"},
        "tf32": {"precision": "fp32"},  # on a GPU it allows TF32 by itself
        "bfloat16": {"precision": "amp_bf16"},
        "float16": {"precision": "amp_fp16"},
    },
    cpu_precisions=frozenset({"float32", "tf32"}),
    ddp_reason="it makes DistributedDataParallel itself",
)
_IN_THE_TEXT = IN_LOADER_CALL | {
    "grad_accum_steps",
    "channels_last",
    "compile",
    "compile_mode",
    "cudnn_benchmark",
    "intra_op_threads",
}
"""Settings that the lines around the Trainer carry."""


def to_composer(found: Wanted) -> Export:
    """Return the lines that make the Trainer, and what it needs around it."""
    settings = carried(found, COMPOSER)
    if found["compile"]:
        is_mode_given = "compile_mode" in found.changed
        settings["compile_config"] = {"mode": found["compile_mode"]} if is_mode_given else {}
    if found.device == "cpu":
        settings["device"] = "cpu"
    return export(
        found,
        COMPOSER,
        text="\n".join(_lines(found, settings)) + "\n",
        settings=settings,
        defaults=_defaults(found),
        # Composer splits a batch by samples, not by tokens.
        but=_IN_THE_TEXT - {"grad_accum_steps"} if found.has_budget else _IN_THE_TEXT,
    )


def _lines(found: Wanted, settings: dict[str, Any]) -> Iterator[str]:
    if found["worker_threads"] is not None:
        yield "import autotune"
    yield "import torch"
    yield "from composer import Trainer"
    if found["channels_last"]:
        yield "from composer.algorithms import ChannelsLast"
    yield ""
    if found["intra_op_threads"] is not None:
        yield f"torch.set_num_threads({found['intra_op_threads']})"
    if found["cudnn_benchmark"]:
        yield "torch.backends.cudnn.benchmark = True"
    steps = found["grad_accum_steps"]
    whole = ""
    if not found.has_budget and steps > 1:
        whole = "  # batch_size: that of a whole optimizer step"
    yield f"# {loader_note(found)}:"
    yield f"loader_arguments = {loader_call(found, batches=steps)}{whole}"
    arguments = {
        "model": Code("model"),
        "train_dataloader": Code("loader"),
        "optimizers": Code("optimizer"),
        **settings,
    }
    if found["channels_last"]:
        arguments["algorithms"] = [Code("ChannelsLast()")]
    yield f"trainer = {as_call('Trainer', arguments)}  # your optimizer takes {optimizer_note(found)}"


def _defaults(found: Wanted) -> Defaults:
    if found["grad_accum_steps"] > 1 and not found.has_budget:
        yield (
            "train_dataloader",
            "loads the batch of a whole optimizer step at once; trials loaded it in parts",
        )
    if found["amp_dtype"] == "float32" and found.device != "cpu":
        yield (
            "DeviceGPU.allow_tf32",
            "true: matrix products take TF32; trials computed in float32",
        )
