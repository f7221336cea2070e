"""Frameworks' own files read into the settings of today: as their framework takes them, and by name what can't be."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.export import READERS
from autotune.export.table import file_value


def unread(kind: str, given: dict[str, Any]) -> dict[str, str]:
    return READERS[kind](given).unread


def baseline(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    return READERS[kind](given).baseline


def test_transformers_defaults() -> None:
    found = READERS["hf"]({"dataloader_num_workers": 4})
    assert found.assumed == {"micro_batch_size": 8, "lr": 5e-5, "pin_memory": True}
    assert found.origins == {"num_workers": "dataloader_num_workers"}


def test_transformers_on_a_cpu() -> None:
    assert baseline("hf", {"use_cpu": True})["pin_memory"] is False
    assert "device: cpu" in unread("hf", {"use_cpu": True})["use_cpu"]


@pytest.mark.parametrize(
    ("kind", "given", "amp_dtype"),
    [
        ("hf", {"bf16": True}, "bfloat16"),
        ("hf", {"fp16": True, "bf16": False}, "float16"),
        ("hf", {"tf32": True}, "tf32"),
        ("hf", {"bf16": False, "fp16": False, "tf32": None}, "float32"),
        ("accelerate", {"mixed_precision": "no"}, "float32"),
        ("accelerate", {"mixed_precision": False}, "float32"),
        ("accelerate", {"mixed_precision": "bf16"}, "bfloat16"),
        ("deepspeed", {"bf16": {"enabled": True}}, "bfloat16"),
        ("deepspeed", {"fp16": {"enabled": True}}, "float16"),
        ("deepspeed", {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, "bfloat16"),
        ("axolotl", {"bf16": "yes", "tf32": "no"}, "bfloat16"),
    ],
)
def test_precision(kind: str, given: dict[str, Any], amp_dtype: str) -> None:
    assert baseline(kind, given)["amp_dtype"] == amp_dtype


@pytest.mark.parametrize(
    ("kind", "given", "name"),
    [
        ("accelerate", {"mixed_precision": "fp8"}, "mixed_precision"),
        ("axolotl", {"bf16": "auto"}, "bf16"),
        ("axolotl", {}, "bf16"),
        ("deepspeed", {"fp16": {"enabled": "auto"}}, "fp16.enabled"),
    ],
)
def test_unknown_precision(kind: str, given: dict[str, Any], name: str) -> None:
    assert "amp_dtype" in unread(kind, given)[name]
    assert "amp_dtype" not in baseline(kind, given)


def test_second_precision_is_unread() -> None:
    assert "bfloat16" in unread("hf", {"bf16": True, "tf32": True})["tf32"]


@pytest.mark.parametrize(
    ("kind", "given", "names"),
    [
        (
            "deepspeed",
            {"train_micro_batch_size_per_gpu": "auto"},
            {"train_micro_batch_size_per_gpu"},
        ),
        ("deepspeed", {"train_batch_size": "auto"}, {"train_batch_size"}),
        (
            "deepspeed",
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
            {"optimizer.type", "optimizer.params.lr"},
        ),
        (
            "axolotl",
            {"torch_compile": "auto", "bf16": True, "dataloader_num_workers": 1},
            {"torch_compile"},
        ),
    ],
)
def test_auto(kind: str, given: dict[str, Any], names: set[str]) -> None:
    assert unread(kind, given).keys() == names


def test_other_communication_is_no_hook() -> None:
    assert READERS["deepspeed"]({"communication_data_type": "fp32"}).origins == {}


def test_schedules_are_unread() -> None:
    given = {
        "lr_scheduler_type": "cosine",
        "optim": "adamw_torch",
        "warmup_steps": 100,
        "max_grad_norm": 1.0,
    }
    assert unread("hf", given).keys() == given.keys()


def test_same_as_trials() -> None:
    given = {
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "random",
        "warmup_steps": 0,
    }
    assert not READERS["hf"](given).unread
    assert not unread("deepspeed", {"zero_optimization": {"stage": 0}, "gradient_clipping": 0.0})


def test_other_names() -> None:
    given = {
        "hub_token": "x",
        "adam_beta1": 0.9,
        "push_to_hub": False,
        "label_names": None,
        "logging_dir": "",
    }
    assert READERS["hf"](given).others == ("hub_token", "adam_beta1")


def batches(*sizes: int | None) -> dict[str, Any]:
    """Return DeepSpeed's file with these sizes: in total, in a micro batch, and steps."""
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    return {name: size for name, size in zip(names, sizes, strict=True) if size is not None}


@pytest.mark.parametrize(
    ("sizes", "found", "is_open"),
    [
        ((64, 4, 4), (4, 4, 4), False),
        ((16, 4, 4), (4, 4, None), False),
        ((17, 4, 4), (4, 4, None), True),
        ((16, 0, 4), (0, 4, None), True),
        ((16, 4, None), (4, None, None), True),
        ((None, 4, None), (4, None, None), False),
        ((16, None, None), (16, None, None), True),
    ],
)
def test_deepspeed_batch_sizes(sizes: Any, found: tuple[int | None, ...], is_open: bool) -> None:
    own = baseline("deepspeed", batches(*sizes))
    names = ("micro_batch_size", "grad_accum_steps", "world_size")
    assert tuple(own.get(name) for name in names) == found
    assert ("train_batch_size" in unread("deepspeed", batches(*sizes))) is is_open


def test_accelerate_ranks() -> None:
    own = baseline("accelerate", {"distributed_type": "MULTI_GPU", "num_processes": 4})
    assert (own["world_size"], own["strategy"]) == (4, "ddp")
    assert "world_size" not in baseline(
        "accelerate", {"distributed_type": "NO", "num_processes": 1}
    )


def test_sharding_is_unread() -> None:
    given = {"distributed_type": "FSDP", "num_processes": 4}
    assert "distributed_type" in unread("accelerate", given)
    assert "world_size" not in baseline("accelerate", given)


def test_accelerate_dynamo() -> None:
    given = {
        "dynamo_config": {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": "MAX-AUTOTUNE",
            "dynamo_use_dynamic": True,
        }
    }
    assert baseline("accelerate", given) == {"compile": True, "compile_mode": "max-autotune"}
    assert unread("accelerate", given).keys() == {"dynamo_config.dynamo_use_dynamic"}
    plain = {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"}}
    assert baseline("accelerate", plain) == {"compile": True}


@pytest.mark.parametrize("kind", ["hf", "axolotl"])
def test_compile_mode(kind: str) -> None:
    given = {"torch_compile": True, "torch_compile_mode": "max-autotune"}
    assert {"compile": True, "compile_mode": "max-autotune"}.items() <= baseline(
        kind, given
    ).items()
    assert "torch_compile_mode" not in unread(kind, given)


def test_compile_mode_alone() -> None:
    given = {"torch_compile": False, "torch_compile_mode": "reduce-overhead"}
    own = baseline("hf", given)
    assert (own["compile"], own["compile_mode"]) == (True, "reduce-overhead")
    assert "compile_mode" not in baseline("axolotl", given)
    assert "baseline.compile" in unread("axolotl", given)["torch_compile_mode"]


@pytest.mark.parametrize(("kind", "name"), [("hf", "optim"), ("axolotl", "optimizer")])
def test_fused_optimizer(kind: str, name: str) -> None:
    found = READERS[kind]({name: "adamw_torch_fused"})
    assert (found.baseline["fused"], found.origins["fused"]) == (True, name)
    assert "workload.optimizer" in unread(kind, {name: "adamw_torch_fused"})[name]
    assert "fused" not in baseline(kind, {name: "adamw_torch"})
    assert "fused" not in baseline(kind, {})


def test_axolotl_prefetches() -> None:
    assert "256" in unread("axolotl", {"micro_batch_size": 2})["dataloader_num_workers"]
    assert "dataloader_num_workers" not in unread("axolotl", {"dataloader_num_workers": 0})


@pytest.mark.parametrize(
    ("value", "kind", "taken"),
    [
        ("yes", "flag", True),
        ("off", "flag", False),
        ("1e-5", "number", 1e-5),
        ("fast", "number", "fast"),
        (3, "count", 3),
    ],
)
def test_yaml_1_1_values(value: object, kind: str, taken: object) -> None:
    assert file_value(value, kind) == taken
