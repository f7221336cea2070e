"""Export to and read from axolotl's YAML: lines for the user's own file.

Source: axolotl/utils/schemas/{config,training}.py and core/builders/base.py, 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.export.table import (
    CLIPS,
    COMMON_UNREAD,
    Defaults,
    Export,
    Reading,
    Table,
    Wanted,
    as_yaml,
    carried,
    export,
    file_value,
    optimizer_default,
    reading,
)

AXOLOTL = Table(
    target="axolotl",
    title="axolotl",
    precisions={  # both are "auto" where they are left out
        "float32": {"bf16": False, "fp16": False, "tf32": False},
        "tf32": {"bf16": False, "fp16": False, "tf32": True},
        "bfloat16": {"bf16": True, "fp16": False, "tf32": False},
        "float16": {"bf16": False, "fp16": True, "tf32": False},
    },
    ddp_reason="its Trainer makes DistributedDataParallel itself",
    unread={
        **COMMON_UNREAD,
        "optimizer": "trials train with SGD unless you give workload.optimizer",
        "lr_scheduler": "trials keep the learning rate as it is",
        "batch_size": "depends on the number of processes; set baseline.grad_accum_steps",
        "sample_packing": "pack in workload.dataset or workload.collate_fn",
        "load_in_8bit": "make the model so in workload.model",
        "load_in_4bit": "make the model so in workload.model",
        "fsdp_config": "FSDP does not run in trials",
        "bfloat16": "makes the model itself so; trials compute under autocast",
        "float16": "makes the model itself so; trials compute under autocast",
        "fp8": "there is no FP8 here",
    },
    is_silent_on=frozenset({"output_dir", "dataset_prepared_path"}),
    optimizer="optimizer",
)
_LOADER = ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor")


def to_axolotl(found: Wanted) -> Export:
    """Return lines for axolotl's file, always with workers and pinning; without both it prefetches 256 batches."""
    settings = carried(found, AXOLOTL)
    return export(
        found, AXOLOTL, text=as_yaml(settings), settings=settings, defaults=_defaults(found)
    )


def from_axolotl(given: Mapping[str, Any]) -> Reading:
    """Read an axolotl file."""
    plain = dict(given)
    mode = None
    if file_value(plain.get("torch_compile"), "flag") is not True:
        mode = plain.pop("torch_compile_mode", None)
    found = reading(plain, AXOLOTL)
    if mode is not None:
        found.unread["torch_compile_mode"] = (
            "has an effect only where torch_compile is on; set baseline.compile"
        )
    if all(given.get(name) is None for name in _LOADER):
        own = "a worker a GPU, pinned memory and prefetch_factor 256"
        found.unread["dataloader_num_workers"] = (
            f"is left out, and so are pinning and prefetching: axolotl takes {own}; set them below baseline"
        )
    if "amp_dtype" not in found.baseline and given.get("bf16") is None:
        found.unread["bf16"] = (
            "is left out: axolotl decides it when training starts; set baseline.amp_dtype"
        )
    return found


def _defaults(found: Wanted) -> Defaults:
    yield optimizer_default(found, AXOLOTL)
    yield "lr_scheduler", "cosine, after a warm-up; trials kept the learning rate as it is"
    yield "max_grad_norm", f"1.0 (its Trainer's): {CLIPS}"
    if found.config.has_workers and found.config.prefetch_factor is None:
        yield (
            "dataloader_prefetch_factor",
            "256 if you take dataloader_num_workers and dataloader_pin_memory out",
        )
