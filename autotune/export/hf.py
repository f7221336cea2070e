"""Export to and read from transformers' TrainingArguments, as JSON (`HfArgumentParser.parse_json_file`).

Source: transformers/training_args.py, trainer.py and trainer_optimizer.py, 5.24.
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
    as_json,
    carried,
    export,
    optimizer_default,
    reading,
)

HF = Table(
    target="hf",
    title="transformers' TrainingArguments",
    precisions={
        "float32": {"bf16": False, "fp16": False},
        "tf32": {"bf16": False, "fp16": False, "tf32": True},
        "bfloat16": {"bf16": True, "fp16": False},
        "float16": {"bf16": False, "fp16": True},
    },
    ddp_reason="its Trainer makes DistributedDataParallel; accelerate's DistributedDataParallelKwargs(...) has {name}",
    unread={
        **COMMON_UNREAD,
        "optim": "trials train with SGD unless you give workload.optimizer",
        "lr_scheduler_type": "trials keep the learning rate as it is",
        "activation_checkpointing": "make the model so in workload.model",
        "auto_find_batch_size": "autotune looks for the batch size itself",
        "train_sampling_strategy": "give workload.sampler",
        "dataloader_drop_last": "workload.drop_last says it",
        "use_cpu": "device: cpu says it",
    },
    is_silent_on=frozenset({"output_dir"}),
    optimizer="optim",
)
_ASYNC = {"non_blocking": True}
_AS_TRIALS_DO = {
    "accelerator_config": _ASYNC,
    "train_sampling_strategy": "random",
    "lr_scheduler_type": "constant",
}


def to_hf(found: Wanted) -> Export:
    """Return TrainingArguments."""
    settings = carried(found, HF)
    if found.config.compile and found.config.amp_dtype in {"float32", "bfloat16"}:
        settings["tf32"] = False  # with torch_compile it would allow TF32 by itself
    if found.config.pin_memory:
        settings["accelerator_config"] = dict(_ASYNC)  # a copy from pinned memory blocks otherwise
    if found.device == "cpu":
        settings["use_cpu"] = True  # without a GPU it refuses bf16 otherwise
    return export(found, HF, text=as_json(settings), settings=settings, defaults=_defaults(found))


def from_hf(given: Mapping[str, Any]) -> Reading:
    """Read TrainingArguments from JSON."""
    plain = {name: value for name, value in given.items() if value != _AS_TRIALS_DO.get(name, ...)}
    if plain.get("use_cpu") is True:
        plain.setdefault("dataloader_pin_memory", False)  # so it does itself
    if plain.get("torch_compile_mode") is not None:
        plain["torch_compile"] = True  # so it does itself
    return reading(plain, HF)


def _defaults(found: Wanted) -> Defaults:
    yield optimizer_default(found, HF)
    yield "lr_scheduler_type", "linear, down to 0; trials kept the learning rate as it is"
    yield "max_grad_norm", f"1.0: {CLIPS}"
    yield (
        "dataloader_drop_last",
        "false: an epoch ends with a smaller batch; trials drop it, unless your own loader keeps it",
    )
    if found.config.strategy == "single" and found.device != "cpu":
        yield (
            "n_gpu",
            "one process takes DataParallel over all GPUs it sees; set CUDA_VISIBLE_DEVICES to one",
        )
