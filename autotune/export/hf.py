"""Export to and read from transformers' TrainingArguments, as JSON (`HfArgumentParser.parse_json_file`).

Source: transformers/training_args.py, trainer.py and trainer_optimizer.py, 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autotune.export.table import (
    ADAM_AS_ITS_OWN,
    CLIPS,
    Differing,
    Export,
    Reading,
    Table,
    Wanted,
    as_json,
    carried,
    dropped,
    reading,
    with_fused,
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
        "optim": "trials train with SGD unless you give workload.optimizer",
        "lr_scheduler_type": "trials keep the learning rate as it is",
        "warmup_steps": "trials keep the learning rate as it is",
        "warmup_ratio": "trials keep the learning rate as it is",
        "max_grad_norm": "gradients are clipped only where your own workload.step does",
        "gradient_checkpointing": "make the model so in workload.model",
        "activation_checkpointing": "make the model so in workload.model",
        "auto_find_batch_size": "autotune looks for the batch size itself",
        "deepspeed": "DeepSpeed does not run in trials; --from deepspeed reads its file",
        "fsdp": "FSDP does not run in trials",
        "train_sampling_strategy": "give workload.sampler",
        "group_by_length": "give workload.sampler",
        "dataloader_drop_last": "workload.drop_last says it",
        "torch_compile_backend": "trials compile with torch's default backend",
        "use_cpu": "device: cpu says it",
    },
    is_silent_on=frozenset({"output_dir"}),
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
    has_fused = found["fused"] and found.optimizer == "AdamW"
    if has_fused:
        settings["optim"] = "adamw_torch_fused"
    if found["compile"] and found["amp_dtype"] in {"float32", "bfloat16"}:
        settings["tf32"] = False  # with torch_compile it would allow TF32 by itself
    if found["pin_memory"]:
        settings["accelerator_config"] = dict(_ASYNC)  # a copy from pinned memory blocks otherwise
    if found.device == "cpu":
        settings["use_cpu"] = True  # without a GPU it refuses bf16 otherwise
    return Export(
        target="hf",
        text=as_json(settings),
        settings=settings,
        dropped=dropped(found, HF, but=["fused"] if has_fused else []),
        defaults=(*_defaults(found),),
    )


def from_hf(given: Mapping[str, Any]) -> Reading:
    """Read TrainingArguments from JSON."""
    plain = {name: value for name, value in given.items() if value != _AS_TRIALS_DO.get(name, ...)}
    if plain.get("use_cpu") is True:
        plain.setdefault("dataloader_pin_memory", False)  # so it does itself
    if plain.get("torch_compile_mode") is not None:
        plain["torch_compile"] = True  # so it does itself
    return with_fused(reading(plain, HF), "optim", plain.get("optim"))


def _defaults(found: Wanted) -> Iterator[Differing]:
    if found["fused"] and found.optimizer == "AdamW":
        yield Differing("adam_beta1", ADAM_AS_ITS_OWN)
    else:
        yield Differing(
            "optim", "adamw_torch_fused; trials trained with your own optimizer, or SGD"
        )
    yield Differing(
        "lr_scheduler_type", "linear, down to 0; trials kept the learning rate as it is"
    )
    yield Differing("max_grad_norm", f"1.0: {CLIPS}")
    yield Differing(
        "dataloader_drop_last",
        "false: an epoch ends with a smaller batch; trials left that out, unless your own loader "
        "or Trainer keeps it",
    )
    if found["strategy"] == "single" and found.device != "cpu":
        yield Differing(
            "n_gpu",
            "one process takes DataParallel over all GPUs that it sees; set CUDA_VISIBLE_DEVICES "
            "to one",
        )
