"""Export to and read from axolotl's YAML: lines for the user's own file.

Source: axolotl/utils/schemas/{config,training}.py and core/builders/base.py, 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autotune.export.table import (
    ADAM_AS_ITS_OWN,
    CLIPS,
    Differing,
    Export,
    Reading,
    Table,
    Unread,
    Wanted,
    as_yaml,
    carried,
    dropped,
    file_value,
    reading,
    with_fused,
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
        "optimizer": "trials train with SGD unless you give workload.optimizer",
        "lr_scheduler": "trials keep the learning rate as it is",
        "warmup_steps": "trials keep the learning rate as it is",
        "warmup_ratio": "trials keep the learning rate as it is",
        "max_grad_norm": "gradients are clipped only where your own workload.step does",
        "batch_size": "depends on the number of processes; set baseline.grad_accum_steps",
        "gradient_checkpointing": "make the model so in workload.model",
        "sample_packing": "pack in workload.dataset or workload.collate_fn",
        "group_by_length": "give workload.sampler",
        "load_in_8bit": "make the model so in workload.model",
        "load_in_4bit": "make the model so in workload.model",
        "deepspeed": "DeepSpeed does not run in trials; --from deepspeed reads its file",
        "fsdp": "FSDP does not run in trials",
        "fsdp_config": "FSDP does not run in trials",
        "bfloat16": "makes the model itself so; trials compute under autocast",
        "float16": "makes the model itself so; trials compute under autocast",
        "fp8": "there is no FP8 here",
        "torch_compile_backend": "trials compile with torch's default backend",
    },
    is_silent_on=frozenset({"output_dir", "dataset_prepared_path"}),
)
_LOADER = ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor")


def to_axolotl(found: Wanted) -> Export:
    """Return lines for axolotl's file, always with workers and pinning; without both it prefetches 256 batches."""
    settings = carried(found, AXOLOTL)
    has_fused = found["fused"] and found.optimizer == "AdamW"
    if has_fused:
        settings["optimizer"] = "adamw_torch_fused"
    lost = dropped(found, AXOLOTL, but=["fused"] if has_fused else [])
    return Export(
        target="axolotl",
        text=as_yaml(settings),
        settings=settings,
        dropped=lost,
        defaults=(*_defaults(found),),
    )


def from_axolotl(given: Mapping[str, Any]) -> Reading:
    """Read an axolotl file."""
    plain = dict(given)
    mode = None
    if file_value(plain.get("torch_compile"), "flag") is not True:
        mode = plain.pop("torch_compile_mode", None)
    found = with_fused(reading(plain, AXOLOTL), "optimizer", plain.get("optimizer"))
    unread = list(found.unread)
    if mode is not None:
        unread.append(
            Unread(
                "torch_compile_mode",
                "has an effect where torch_compile is on alone; set baseline.compile",
            )
        )
    if all(given.get(name) is None for name in _LOADER):
        own = "a worker a GPU, pinned memory and prefetch_factor 256"
        reason = f"is left out, and so are pinning and prefetching: axolotl takes {own}; set them below baseline"
        unread.append(Unread("dataloader_num_workers", reason))
    if "amp_dtype" not in found.baseline and given.get("bf16") is None:
        reason = "is left out: axolotl decides it when training starts; set baseline.amp_dtype"
        unread.append(Unread("bf16", reason))
    return replace(found, unread=tuple(unread))


def _defaults(found: Wanted) -> Iterator[Differing]:
    if found["fused"] and found.optimizer == "AdamW":
        yield Differing("adam_beta1", ADAM_AS_ITS_OWN)
    else:
        yield Differing(
            "optimizer", "adamw_torch_fused; trials trained with your own optimizer, or SGD"
        )
    yield Differing(
        "lr_scheduler", "cosine, after a warm-up; trials kept the learning rate as it is"
    )
    yield Differing("max_grad_norm", f"1.0 (its Trainer's): {CLIPS}")
    if found["num_workers"] and found["prefetch_factor"] is None:
        yield Differing(
            "dataloader_prefetch_factor",
            "256 if you take dataloader_num_workers and dataloader_pin_memory out",
        )
