"""Exports of every target: nothing is lost in silence, texts say what the settings say, and files read back."""

from __future__ import annotations

import ast
import json
from argparse import ArgumentParser
from collections.abc import Callable
from itertools import product
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.cli import EXPORT_TARGETS, FILE_KINDS
from autotune.config.training_config import CompileMode, DdpConfig, TrainingConfig
from autotune.errors import ConfigError
from autotune.export import READERS, TARGETS
from autotune.export.table import Export
from tests.export.configs import BUDGET, EVERYTHING, flat
from tests.factories.configs import any_configs

DEVICES = st.sampled_from([None, "cpu", "cuda:0"])
FILES: dict[str, Callable[[str], Any]] = {
    "hf": json.loads,
    "deepspeed": json.loads,
    "accelerate": yaml.safe_load,
    "axolotl": yaml.safe_load,
}


def dropped(export: Export) -> dict[str, str]:
    return dict(export.dropped)


def defaults(export: Export) -> dict[str, str]:
    return dict(export.defaults)


def test_command_line_names_targets() -> None:
    assert tuple(TARGETS) == EXPORT_TARGETS
    assert tuple(READERS) == FILE_KINDS
    assert FILES.keys() == READERS.keys()


@given(
    any_configs(),
    DEVICES,
    st.sampled_from([None, "SGD", "AdamW"]),
    st.sampled_from(sorted(TARGETS)),
)
def test_dropped_settings_matter_and_have_reasons(
    config: TrainingConfig, device: str | None, optimizer: str | None, target: str
) -> None:
    export = config.to(target, device=device, optimizer=optimizer)
    allowed = flat(config).changed | {"micro_batch_size", "lr", "world_size", "strategy"}
    assert all(
        reason.strip() and "{" not in reason.replace('{"', "")
        for reason in dropped(export).values()
    )
    assert set(dropped(export)) <= allowed
    assert len(dropped(export)) == len(export.dropped)
    assert all(name and reason for name, reason in export.defaults)


@given(any_configs(), DEVICES, st.sampled_from(sorted(FILES)))
def test_file_holds_settings(config: TrainingConfig, device: str | None, target: str) -> None:
    export = config.to(target, device=device)
    assert FILES[target](export.text) == export.settings


@given(any_configs(), DEVICES, st.sampled_from(sorted(FILES)))
def test_file_reads_back(config: TrainingConfig, device: str | None, target: str) -> None:
    export = config.to(target, device=device, optimizer="SGD")
    found = READERS[target](FILES[target](export.text))
    own = flat(config).values
    lost = set(dropped(export)) | (
        {"pin_memory"} if device == "cpu" else set()
    )  # HF pins nothing on a CPU
    assert {name: value for name, value in found.baseline.items() if name not in lost} == {
        name: pytest.approx(own[name]) for name in found.baseline if name not in lost
    }
    assert not found.unread.keys() - {"optimizer.type", "use_cpu", "tf32"}
    assert not found.others


@given(any_configs(), st.sampled_from(sorted(FILES)))
def test_each_setting_is_read_or_dropped(config: TrainingConfig, target: str) -> None:
    export = config.to(target, optimizer="SGD")
    found = READERS[target](FILES[target](export.text))
    silent = {
        "strategy",
        "world_size",
    }  # of processes that a launcher counts; dropped where they are several
    changed = (
        flat(config).changed
        - silent
        - {name for name in flat(config).values if config.strategy != "ddp" and "ddp." in name}
    )
    assert changed <= set(found.baseline) | set(dropped(export))


def test_unknown_setting_is_dropped() -> None:
    class Later(TrainingConfig):
        patience: int | None = None
        places: dict[str, int] | None = None

    for target in TARGETS:
        assert not {"patience", "places"} & dropped(Later().to(target)).keys()
        reasons = dropped(Later(patience=9, places={"a": 1}).to(target))
        assert reasons["patience"].endswith("patience=9")
        assert reasons["places"].endswith("places={'a': 1}")


def test_unknown_target() -> None:
    with pytest.raises(ConfigError, match=r"hf, .*'lightening'"):
        TrainingConfig().to("lightening")


@pytest.mark.parametrize("target", ["lightning", "composer"])
@given(config=any_configs())
def test_snippet_calls_the_trainer(target: str, config: TrainingConfig) -> None:
    export = config.to(target)
    arguments = keywords(export.text, "Trainer")
    written = {
        name: ast.literal_eval(arguments[name]) for name in export.settings if name != "strategy"
    }
    assert written == {name: value for name, value in export.settings.items() if name != "strategy"}
    loader = keywords(export.text, "dict")
    steps = config.grad_accum_steps if target == "composer" else 1
    size = config.micro_batch_size * steps if config.max_tokens is None else None
    assert ast.literal_eval(loader.get("batch_size", ast.Constant(None))) == size
    for name, value in config.loader_settings.items():
        plain = getattr(TrainingConfig(), name)
        assert value == (ast.literal_eval(loader[name]) if name in loader else plain)


@pytest.mark.parametrize("target", ["lightning", "composer"])
def test_start_method_of_workers(target: str) -> None:
    export = TrainingConfig(num_workers=2, multiprocessing_context="spawn").to(target)
    loader = keywords(export.text, "dict")
    assert ast.literal_eval(loader["multiprocessing_context"]) == "spawn"
    assert "multiprocessing_context" not in dropped(export)


@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"deepspeed"}))
def test_token_budget_is_no_batch_size(target: str) -> None:
    export = BUDGET.to(target, optimizer="SGD")
    assert "1313" not in export.text
    assert not {1313, 2626} & set(export.settings.values())
    assert "max_tokens=4096" in dropped(export)["micro_batch_size"]
    assert "max_tokens=4096" in export.text or "max_tokens" in dropped(export)


def test_accelerate_even_batches() -> None:
    ranks = {"world_size": 2, "strategy": "ddp"}
    assert "even_batches=False" in BUDGET.model_copy(update=ranks).to("accelerate").text
    assert "even_batches" not in BUDGET.to("accelerate").text
    assert "even_batches" not in TrainingConfig(world_size=2, strategy="ddp").to("accelerate").text


@pytest.mark.parametrize("target", ["hf", "axolotl"])
def test_fractional_bucket_is_dropped(target: str) -> None:
    config = TrainingConfig(strategy="ddp", world_size=2, ddp=DdpConfig(bucket_cap_mb=12.5))
    assert "ddp_bucket_cap_mb" not in config.to(target).settings
    assert "ddp.bucket_cap_mb" in dropped(config.to(target))


def test_deepspeed_counts_buckets_in_elements() -> None:
    plain = TrainingConfig(strategy="ddp", world_size=2, ddp=DdpConfig(bucket_cap_mb=4.0))
    half = plain.model_copy(update={"amp_dtype": "bfloat16"})
    sizes = [
        each.to("deepspeed").settings["zero_optimization"]["reduce_bucket_size"]
        for each in (plain, half)
    ]
    assert sizes == [2**20, 2**21]


def test_options_parse() -> None:
    export = EVERYTHING.to("timm", device="cpu")
    parser = ArgumentParser()
    for name, value in export.settings.items():
        kind: dict[str, Any] = {"action": "store_true"} if value is True else {"type": type(value)}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    assert vars(parser.parse_args(export.text.split())) == export.settings


def test_compile_mode_is_carried_or_dropped() -> None:
    for target, mode in product(TARGETS, get_args(CompileMode)):
        export = TrainingConfig(compile=True, compile_mode=mode).to(target)
        is_default = mode == "default"
        is_dropped = "compile_mode" in dropped(export)
        assert is_dropped is (not is_default and mode not in export.text), (target, mode)
        assert is_default is (not is_dropped and mode not in export.text), (target, mode)


FUSED = TrainingConfig(fused=True)


def bound(binding: Any) -> TrainingConfig:
    return TrainingConfig(world_size=2, strategy="ddp", numa_binding=binding)


@pytest.mark.parametrize(("target", "name"), [("hf", "optim"), ("axolotl", "optimizer")])
def test_fused_adamw(target: str, name: str) -> None:
    export = FUSED.to(target, optimizer="AdamW")
    assert export.settings[name] == "adamw_torch_fused"
    assert "fused" not in dropped(export)
    assert name not in defaults(export)
    assert "adam_beta1" in defaults(export)
    for other in (FUSED.to(target, optimizer="SGD"), FUSED.to(target)):
        assert name not in other.settings
        assert name in defaults(other)
        assert "adamw_torch_fused" in dropped(other)["fused"]
    assert name not in TrainingConfig().to(target, optimizer="AdamW").settings


@pytest.mark.parametrize(
    ("optimizer", "is_written", "is_dropped"),
    [("SGD", True, False), ("AdamW", False, False), ("RMSprop", False, True), (None, False, True)],
)
def test_deepspeed_fused(optimizer: str | None, is_written: bool, is_dropped: bool) -> None:
    export = FUSED.to("deepspeed", optimizer=optimizer)
    assert export.settings.get("optimizer", {}).get("params", {}).get("fused", False) is is_written
    assert ("fused" in dropped(export)) is is_dropped


@pytest.mark.parametrize(
    ("target", "name"), [("ultralytics", "fused"), ("deepspeed", "optimizer.type")]
)
def test_default_fused_adam_is_reported(target: str, name: str) -> None:
    assert name in defaults(TrainingConfig().to(target, optimizer="Adam", device="cuda"))
    assert name not in defaults(FUSED.to(target, optimizer="Adam", device="cuda"))
    assert "fused" not in dropped(FUSED.to(target, optimizer="Adam", device="cuda"))


def test_ultralytics_on_a_cpu() -> None:
    assert "fused" in dropped(FUSED.to("ultralytics", optimizer="Adam", device="cpu"))
    assert "fused" not in defaults(
        TrainingConfig().to("ultralytics", optimizer="Adam", device="cpu")
    )


def test_ultralytics_worker_threads() -> None:
    one, two = (
        TrainingConfig(num_workers=2, worker_threads=count).to("ultralytics") for count in (1, 2)
    )
    assert "worker_threads" not in dropped(one)
    assert "OMP_NUM_THREADS=2" in dropped(two)["worker_threads"]


@pytest.mark.parametrize(
    ("target", "device", "binding"),
    [
        ("torchrun", "xpu", "node"),
        ("accelerate", "cpu", "node"),
        ("accelerate", "cuda", "exclusive"),
    ],
)
def test_binding_is_dropped(target: str, device: str, binding: str) -> None:
    export = bound(binding).to(target, device=device)
    assert "numa" not in export.text
    assert "affinity" not in export.text
    assert "numa_binding" in dropped(export)
    assert not {"--numa-binding", "enable_cpu_affinity"} & defaults(export).keys()


def test_torchrun_knows_binding() -> None:
    from torch.distributed.run import get_args_parser

    parser: ArgumentParser = get_args_parser()
    for binding in ("node", "exclusive"):
        words = bound(binding).to("torchrun").text.split()[1:]
        assert parser.parse_args([*words, "train.py"]).numa_binding == binding


def test_accelerate_reads_binding() -> None:
    def read(value: object) -> dict[str, Any]:
        return dict(
            READERS["accelerate"]({"distributed_type": "NO", "enable_cpu_affinity": value}).baseline
        )

    assert read(True) == read("yes") == {"numa_binding": "node"}
    assert read(False) == {}


def keywords(source: str, name: str) -> dict[str, ast.expr]:
    """The keywords of the call of a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            return {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    raise AssertionError(f"{name} is not called")
