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
from autotune.export.registry import READERS, TARGETS
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


def test_the_command_line_names_the_targets_that_there_are() -> None:
    assert tuple(TARGETS) == EXPORT_TARGETS
    assert tuple(READERS) == FILE_KINDS
    assert FILES.keys() == READERS.keys()


@given(
    any_configs(),
    DEVICES,
    st.sampled_from([None, "SGD", "AdamW"]),
    st.sampled_from(sorted(TARGETS)),
)
def test_what_is_dropped_has_a_reason_and_is_not_what_torch_does_by_itself(
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
def test_a_file_holds_the_settings_of_its_export(
    config: TrainingConfig, device: str | None, target: str
) -> None:
    export = config.to(target, device=device)
    assert FILES[target](export.text) == export.settings


@given(any_configs(), DEVICES, st.sampled_from(sorted(FILES)))
def test_a_file_that_was_exported_reads_back_as_what_it_could_carry(
    config: TrainingConfig, device: str | None, target: str
) -> None:
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
def test_each_setting_of_a_file_is_read_or_dropped(config: TrainingConfig, target: str) -> None:
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


def test_a_setting_that_no_table_knows_is_dropped_by_name() -> None:
    class Later(TrainingConfig):
        patience: int | None = None
        places: dict[str, int] | None = None

    for target in TARGETS:
        assert not {"patience", "places"} & dropped(Later().to(target)).keys()
        reasons = dropped(Later(patience=9, places={"a": 1}).to(target))
        assert reasons["patience"].endswith("patience=9")
        assert reasons["places"].endswith("places={'a': 1}")


def test_an_unknown_target_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"hf, .*'lightening'"):
        TrainingConfig().to("lightening")


@pytest.mark.parametrize("target", ["lightning", "composer"])
@given(config=any_configs())
def test_a_snippet_is_python_and_calls_the_trainer_with_the_settings(
    target: str, config: TrainingConfig
) -> None:
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
@pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"])
def test_start_method_of_workers_is_carried(target: str, start: str) -> None:
    export = TrainingConfig(num_workers=2, multiprocessing_context=start).to(target)
    loader = keywords(export.text, "dict")
    assert ast.literal_eval(loader["multiprocessing_context"]) == start
    assert "multiprocessing_context" not in dropped(export)


@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"deepspeed"}))
def test_the_mean_of_a_token_budgets_batches_is_no_batch_size(target: str) -> None:
    export = BUDGET.to(target, optimizer="SGD")
    assert "1313" not in export.text
    assert not {1313, 2626} & set(export.settings.values())
    assert "max_tokens=4096" in dropped(export)["micro_batch_size"]
    assert "max_tokens=4096" in export.text or "max_tokens" in dropped(export)


def test_deepspeed_which_demands_a_batch_size_says_that_it_is_a_mean() -> None:
    export = BUDGET.to("deepspeed")
    assert export.settings["train_micro_batch_size_per_gpu"] == 1313
    assert "train_micro_batch_size_per_gpu" in defaults(export)
    assert "max_tokens=4096" in dropped(export)["max_tokens"]
    assert "train_micro_batch_size_per_gpu" not in defaults(TrainingConfig().to("deepspeed"))


@pytest.mark.parametrize(
    ("target", "is_told"), [("composer", True), ("ultralytics", True), ("lightning", False)]
)
def test_accumulation_in_samples_is_dropped_with_a_token_budget(target: str, is_told: bool) -> None:
    assert ("grad_accum_steps" in dropped(BUDGET.to(target))) is is_told


def test_ranks_of_accelerate_need_not_have_batches_of_one_size() -> None:
    ranks = {"world_size": 2, "strategy": "ddp"}
    assert "even_batches=False" in BUDGET.model_copy(update=ranks).to("accelerate").text
    assert "even_batches" not in BUDGET.to("accelerate").text
    assert "even_batches" not in TrainingConfig(world_size=2, strategy="ddp").to("accelerate").text


@pytest.mark.parametrize(
    ("target", "name"), [("hf", "ddp_bucket_cap_mb"), ("axolotl", "ddp_bucket_cap_mb")]
)
def test_a_fractional_bucket_is_dropped_by_targets_of_whole_numbers(target: str, name: str) -> None:
    config = TrainingConfig(strategy="ddp", world_size=2, ddp=DdpConfig(bucket_cap_mb=12.5))
    assert name not in config.to(target).settings
    assert "ddp.bucket_cap_mb" in dropped(config.to(target))


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        ("hf", "fp16", False),
        ("accelerate", "mixed_precision", "no"),
        ("lightning", "precision", "32-true"),
        ("composer", "precision", "fp32"),
    ],
)
def test_a_precision_that_a_cpu_can_not_have_is_dropped(
    target: str, name: str, value: object
) -> None:
    export = TrainingConfig(amp_dtype="float16").to(target, device="cpu")
    assert export.settings[name] == value
    assert "amp_dtype" in dropped(export)
    assert "amp_dtype" not in dropped(TrainingConfig(amp_dtype="float16").to(target, device="cuda"))


def test_the_batch_sizes_of_deepspeed_agree() -> None:
    found = EVERYTHING.to("deepspeed").settings
    micro, steps = found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]
    assert found["train_batch_size"] == micro * steps * EVERYTHING.world_size


def test_deepspeed_gets_a_learning_rate_where_the_optimizer_is_known() -> None:
    assert "lr" in dropped(EVERYTHING.to("deepspeed"))
    known = EVERYTHING.to("deepspeed", optimizer="AdamW")
    assert known.settings["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-5}}
    assert "lr" not in dropped(known)


@pytest.mark.parametrize("optimizer", ["Prodigy", "MySGD", "Muon", "LBFGS"])
def test_deepspeed_is_given_no_optimizer_that_it_can_not_make(optimizer: str) -> None:
    export = EVERYTHING.to("deepspeed", optimizer=optimizer)
    assert "optimizer" not in export.settings
    assert optimizer in dropped(export)["lr"]
    assert "optimizer.params" not in defaults(export)


def test_a_bucket_of_deepspeed_is_counted_in_elements_of_its_precision() -> None:
    plain = TrainingConfig(strategy="ddp", world_size=2, ddp=DdpConfig(bucket_cap_mb=4.0))
    half = plain.model_copy(update={"amp_dtype": "bfloat16"})
    sizes = [
        each.to("deepspeed").settings["zero_optimization"]["reduce_bucket_size"]
        for each in (plain, half)
    ]
    assert sizes == [2**20, 2**21]


def test_accumulation_of_ultralytics_follows_from_its_nominal_batch() -> None:
    found = EVERYTHING.to("ultralytics").settings
    assert round(found["nbs"] / found["batch"]) == EVERYTHING.grad_accum_steps
    assert found["batch"] == EVERYTHING.micro_batch_size * EVERYTHING.world_size


def test_options_are_those_of_a_parser_of_the_same_names() -> None:
    export = EVERYTHING.to("timm", device="cpu")
    parser = ArgumentParser()
    for name, value in export.settings.items():
        kind: dict[str, Any] = {"action": "store_true"} if value is True else {"type": type(value)}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    assert vars(parser.parse_args(export.text.split())) == export.settings


def test_a_small_learning_rate_is_a_number_to_those_who_read_yaml() -> None:
    assert yaml.safe_load(TrainingConfig(lr=1e-5).to("axolotl").text)["learning_rate"] == 1e-5


def test_a_mode_of_the_compiler_is_carried_or_dropped_by_name() -> None:
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
def test_a_fused_adamw_is_an_optimizer_by_its_own_name(target: str, name: str) -> None:
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
def test_deepspeed_fuses_torchs_optimizers_by_params(
    optimizer: str | None, is_written: bool, is_dropped: bool
) -> None:
    export = FUSED.to("deepspeed", optimizer=optimizer)
    assert export.settings.get("optimizer", {}).get("params", {}).get("fused", False) is is_written
    assert ("fused" in dropped(export)) is is_dropped


@pytest.mark.parametrize(
    ("target", "name"), [("ultralytics", "fused"), ("deepspeed", "optimizer.type")]
)
def test_a_target_that_fuses_adam_by_itself_says_so_where_trials_did_not(
    target: str, name: str
) -> None:
    assert name in defaults(TrainingConfig().to(target, optimizer="Adam", device="cuda"))
    assert name not in defaults(FUSED.to(target, optimizer="Adam", device="cuda"))
    assert "fused" not in dropped(FUSED.to(target, optimizer="Adam", device="cuda"))


def test_ultralytics_fuses_nothing_on_a_cpu() -> None:
    assert "fused" in dropped(FUSED.to("ultralytics", optimizer="Adam", device="cpu"))
    assert "fused" not in defaults(
        TrainingConfig().to("ultralytics", optimizer="Adam", device="cpu")
    )


def test_timm_times_cudnns_algorithms_by_itself() -> None:
    config, name = TrainingConfig(cudnn_benchmark=True), "torch.backends.cudnn.benchmark"
    assert "cudnn_benchmark" not in dropped(config.to("timm", device="cuda"))
    assert name not in defaults(config.to("timm", device="cuda"))
    assert name in defaults(TrainingConfig().to("timm", device="cuda"))
    assert name not in defaults(TrainingConfig().to("timm", device="cpu"))


def test_ultralytics_gives_each_worker_one_thread_by_itself() -> None:
    one, two = (
        TrainingConfig(num_workers=2, worker_threads=count).to("ultralytics") for count in (1, 2)
    )
    assert "worker_threads" not in dropped(one)
    assert "OMP_NUM_THREADS=2" in dropped(two)["worker_threads"]


@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_torchrun_can_not_bind_elsewhere(device: str) -> None:
    export = bound("node").to("torchrun", device=device)
    assert "numa" not in export.text
    assert "numa_binding" in dropped(export)
    assert "--numa-binding" not in defaults(export)


def test_torchrun_knows_the_flag_and_its_values() -> None:
    from torch.distributed.run import get_args_parser

    parser: ArgumentParser = get_args_parser()
    for binding in ("node", "exclusive"):
        words = bound(binding).to("torchrun").text.split()[1:]
        assert parser.parse_args([*words, "train.py"]).numa_binding == binding


def test_accelerate_binds_to_the_node_of_a_gpu_alone() -> None:
    assert bound("node").to("accelerate").settings["enable_cpu_affinity"] is True
    assert "numa_binding" not in dropped(bound("node").to("accelerate", device="cuda"))
    assert "enable_cpu_affinity" in defaults(bound("node").to("accelerate"))
    assert "enable_cpu_affinity" not in defaults(bound("node").to("accelerate", device="cpu"))
    for export in (
        bound("node").to("accelerate", device="cpu"),
        bound("exclusive").to("accelerate"),
    ):
        assert "enable_cpu_affinity" not in export.settings
        assert "numa_binding" in dropped(export)
    assert "enable_cpu_affinity" not in bound(None).to("accelerate").settings


def test_a_binding_that_accelerate_was_told_is_todays() -> None:
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
