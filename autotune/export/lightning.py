"""Export to Lightning: lines of Python around `Trainer`, whose arguments are the export's settings.

Source: lightning/pytorch/trainer/trainer.py and strategies/ddp.py, 2.6. A LightningCLI takes the
arguments of DistributedDataParallel in `strategy.dict_kwargs`, since DDPStrategy passes its
keyword arguments on unnamed.
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
)

LIGHTNING = Table(
    target="lightning",
    title="Lightning's Trainer",
    precisions={
        "float32": {"precision": "32-true"},
        "tf32": {"precision": "32-true"},  # and torch.set_float32_matmul_precision, in the text
        "bfloat16": {"precision": "bf16-mixed"},
        "float16": {"precision": "16-mixed"},  # on a CPU it would silently become bf16-mixed
    },
    cpu_precisions=frozenset({"float32", "tf32", "bfloat16"}),
    has_loader_call=True,
    process_settings=("intra_op_threads", "amp_dtype"),
    has_ddp=True,
    lacks=frozenset({"ddp.first_bucket_mb"}),
)
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_HOOK_NAMES = {"fp16": "fp16_compress_hook", "bf16": "bf16_compress_hook"}


def to_lightning(found: Wanted) -> Export:
    """Return the lines that make the Trainer, and what it needs around it."""
    settings: dict[str, Any] = {}
    if found.device == "cpu":
        settings["accelerator"] = "cpu"
    settings["devices"] = found.processes
    settings["strategy"] = "ddp" if found.processes > 1 else "auto"
    settings |= carried(found, LIGHTNING)
    return export(
        found,
        LIGHTNING,
        text="\n".join(_lines(found, settings)) + "\n",
        settings=settings,
        defaults=_defaults(found),
    )


def _lines(found: Wanted, settings: dict[str, Any]) -> Iterator[str]:
    strategy = _strategy(found) if found.processes > 1 else {}
    imports = ["from lightning.pytorch import Trainer"]
    if strategy:
        imports.append("from lightning.pytorch.strategies import DDPStrategy")
    if "ddp_comm_hook" in strategy:
        module = "powerSGD_hook" if "ddp_comm_state" in strategy else "default_hooks"
        imports.append(f"from {_HOOKS} import {module}")
    yield from script_head(found, LIGHTNING, imports)
    if found.config.channels_last:
        yield "module = module.to(memory_format=torch.channels_last)"
    if found.compiler is not None:
        # module.compile() would leave out training_step
        yield f"module = {as_call('torch.compile', found.compiler, 'module')}"
    if strategy:
        settings = {**settings, "strategy": Code(as_call("DDPStrategy", strategy))}
    yield f"trainer = {as_call('Trainer', settings)}"
    yield f"# in configure_optimizers: {optimizer_note(found)}"


def _strategy(found: Wanted) -> dict[str, Any]:
    """Return the arguments of DDPStrategy; it passes those of DistributedDataParallel on to torch."""
    arguments = found.ddp
    hook = found.config.ddp_settings.comm_hook
    if hook == "powersgd":
        arguments["ddp_comm_state"] = Code("powerSGD_hook.PowerSGDState(process_group=None)")
        arguments["ddp_comm_hook"] = Code("powerSGD_hook.powerSGD_hook")
    elif hook is not None:
        arguments["ddp_comm_hook"] = Code(f"default_hooks.{_HOOK_NAMES[hook]}")
    return arguments


def _defaults(found: Wanted) -> Defaults:
    if found.config.worker_threads is not None:
        yield (
            "worker_init_fn",
            "seed_everything(workers=True) seeds workers only of loaders that have none",
        )
    yield "logger", "on: figures are written while training; trials wrote none"
    yield "enable_checkpointing", "on: a checkpoint at the end of each epoch; trials saved none"
