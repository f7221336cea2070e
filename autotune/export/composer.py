"""Export to Composer: lines of Python around `Trainer`, whose arguments are the export's settings.

Source: composer/trainer/trainer.py, core/precision.py and devices/device_gpu.py, 0.32. Composer
has no gradient accumulation: the loader returns the batch of a whole optimizer step, which Composer
splits into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.export.table import (
    Code,
    Defaults,
    Export,
    Table,
    Wanted,
    as_call,
    carried,
    export,
    optimizer_note,
    script_head,
    tf32_default,
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
    has_loader_call=True,
    process_settings=("intra_op_threads", "cudnn_benchmark"),
    ddp_reason="it makes DistributedDataParallel itself",
)


def to_composer(found: Wanted) -> Export:
    """Return the lines that make the Trainer, and what it needs around it."""
    settings = carried(found, COMPOSER)
    if found.compiler is not None:
        settings["compile_config"] = found.compiler
    if found.device == "cpu":
        settings["device"] = "cpu"
    return export(
        found,
        COMPOSER,
        text="\n".join(_lines(found, settings)) + "\n",
        settings=settings,
        defaults=_defaults(found),
    )


def _lines(found: Wanted, settings: dict[str, Any]) -> Iterator[str]:
    imports = ["from composer import Trainer"]
    if found.config.channels_last:
        imports.append("from composer.algorithms import ChannelsLast")
    yield from script_head(found, COMPOSER, imports, batches=found.config.grad_accum_steps)
    arguments = {
        "model": Code("model"),
        "train_dataloader": Code("loader"),
        "optimizers": Code("optimizer"),
        **settings,
    }
    if found.config.channels_last:
        arguments["algorithms"] = [Code("ChannelsLast()")]
    yield f"trainer = {as_call('Trainer', arguments)}  # your optimizer takes {optimizer_note(found)}"


def _defaults(found: Wanted) -> Defaults:
    if found.config.grad_accum_steps > 1 and not found.has_budget:
        yield (
            "train_dataloader",
            "loads the batch of a whole optimizer step at once; trials loaded it in parts",
        )
    yield from tf32_default(found, "DeviceGPU.allow_tf32")
