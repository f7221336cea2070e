"""A framework's own file below a plan: it fills what CONFIG leaves open, at its places, and nothing is lost unsaid."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.config.plan import Plan, ReadOver
from autotune.errors import ConfigError
from autotune.export.accelerate import ACCELERATE
from autotune.export.axolotl import AXOLOTL
from autotune.export.deepspeed import DEEPSPEED
from autotune.export.hf import HF
from autotune.files.plan_file import notes_of, read_current, read_plan

CONFIG = "workload: {model: 'torch.nn:Identity', dataset: 'train:data'}\n"
OWN = {
    "per_device_train_batch_size": 4,
    "learning_rate": 2e-5,
    "dataloader_num_workers": 2,
    "lr_scheduler_type": "cosine",
}

_TABLES = (HF, AXOLOTL, ACCELERATE, DEEPSPEED)
_NAMES = sorted(
    {name.name.partition(".")[0] for table in _TABLES for name in table.names.values()}
    | {name.partition(".")[0] for table in _TABLES for name in table.unread}
    | {"bf16", "fp16", "tf32", "mixed_precision", "num_processes", "distributed_type"}
    | {"dynamo_config", "train_batch_size", "communication_data_type", "torch_autocast"}
)


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan_of(
    kind: str, content: object, config: str = CONFIG, *overrides: str
) -> tuple[Plan, list[dict[str, Any]]]:
    file = Path("own.json" if kind in {"hf", "deepspeed"} else "own.yaml")
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    Path("plan.yaml").write_text(config)
    today = read_current(kind, file)
    plan = read_plan(Path("plan.yaml"), overrides, current=today)
    return plan, [{"code": found.code, **found.figures} for found in notes_of(today, plan)]


def test_file_is_the_baseline() -> None:
    baseline = plan_of("hf", OWN)[0].baseline
    assert (baseline.micro_batch_size, baseline.lr, baseline.num_workers, baseline.pin_memory) == (
        4,
        2e-5,
        2,
        True,
    )


def test_config_and_set_win() -> None:
    own = CONFIG + "baseline: {micro_batch_size: 64}\n"
    baseline = plan_of("hf", OWN, own, "baseline.lr=0.5")[0].baseline
    assert (baseline.micro_batch_size, baseline.lr, baseline.num_workers) == (64, 0.5, 2)


def test_no_prefetching_without_workers() -> None:
    file = {**OWN, "dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True}
    baseline = plan_of("hf", file, CONFIG, "baseline.num_workers=0")[0].baseline
    assert (baseline.num_workers, baseline.prefetch_factor, baseline.persistent_workers) == (
        0,
        None,
        False,
    )


def test_fused_needs_an_optimizer() -> None:
    file = {**OWN, "optim": "adamw_torch_fused"}
    plan, told = plan_of("hf", file)
    assert plan.baseline.fused is False
    assert "optim" in {one.get("name") for one in told}
    config = "workload: {model: 'torch.nn:Identity', dataset: 'train:data', optimizer: 'train:optimizer'}\n"
    plan, _ = plan_of("hf", file, config)
    assert plan.baseline.fused is True
    assert plan.read_over["fused"] == ReadOver("optim", "AdamW")
    said, _ = plan_of("hf", file, config, "baseline.fused=true")
    assert "fused" not in said.read_over, "its user has said it"
    assert plan_of("hf", file, config, "baseline.fused=false")[0].baseline.fused is False


def test_no_compile_mode_without_compile() -> None:
    file = {**OWN, "torch_compile": True, "torch_compile_mode": "reduce-overhead"}
    assert plan_of("hf", file)[0].baseline.compile_mode == "reduce-overhead"
    baseline = plan_of("hf", file, CONFIG, "baseline.compile=false")[0].baseline
    assert (baseline.compile, baseline.compile_mode) == (False, "default")


def test_ddp_arguments_need_ranks() -> None:
    file = {**OWN, "ddp_bucket_cap_mb": 40, "ddp_find_unused_parameters": True}
    plan, told = plan_of("hf", file)
    assert plan.baseline.ddp is None
    names = next(one["names"] for one in told if one["code"] == "ddp_without_ranks")
    assert names == ["ddp_bucket_cap_mb", "ddp_find_unused_parameters"]
    config = CONFIG + "baseline: {strategy: ddp, world_size: 2, ddp: {bucket_cap_mb: 9}}\n"
    plan, told = plan_of("hf", file, config)
    assert plan.baseline.ddp is not None
    assert (plan.baseline.ddp.bucket_cap_mb, plan.baseline.ddp.find_unused_parameters) == (9, True)
    assert "ddp_without_ranks" not in {one["code"] for one in told}


def test_notes() -> None:
    told = plan_of("hf", {**OWN, "hub_model_id": "me/mine"})[1]
    assert {one["code"] for one in told} == {"not_read", "taken_by_default", "keys_not_used"}
    assert [one["title"] for one in told if "title" in one] == ["transformers"]
    assert [one["name"] for one in told if one["code"] == "not_read"] == ["lr_scheduler_type"]
    assert [one["values"] for one in told if one["code"] == "taken_by_default"] == [
        ["pin_memory=True"]
    ]


@pytest.mark.parametrize(
    ("kind", "content", "told"),
    [
        ("hf", {"learning_rate": -1}, r"own\.json:1:2: baseline\.lr: .*-1"),
        (
            "hf",
            {"dataloader_num_workers": 0, "dataloader_prefetch_factor": 2},
            r"baseline: .*prefetch_factor=2",
        ),
        (
            "axolotl",
            "micro_batch_size: 2.5\n",
            r"own\.yaml:1:1: baseline\.micro_batch_size: .*2\.5",
        ),
    ],
)
def test_broken_rule_has_its_place(kind: str, content: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan_of(kind, content)


@pytest.mark.parametrize(
    ("kind", "content", "told"),
    [
        ("hf", "{", "JSON"),
        ("deepspeed", '{"steps_per_print": 1 "bf16": {}}', "line 1 column 23"),
        ("hf", "[1]", "list"),
        ("hf", '{"bf16": true,\t"bf16": false}', "'bf16' is given twice"),
        ("hf", "[" * 100_000, "nested"),
        ("axolotl", "bf16: !!python/object/apply:os.system [ls]\n", ":1:1: bf16"),
        ("accelerate", "- 1\n", ":1:1: "),
        ("axolotl", "bf16: true\nbf16: false\n", ":2:1: bf16"),
    ],
)
def test_bad_file(kind: str, content: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        plan_of(kind, content)
    assert len(error.value.problems) == 1


def test_json_that_is_no_yaml() -> None:
    plan, _ = plan_of(
        "hf", '{"learning_rate": 2e-5, "max_steps": 99999999999999999999, "a": "\x7f"}'
    )
    assert plan.baseline.lr == 2e-5


def test_pickle_is_not_opened() -> None:
    Path("training_args.bin").write_bytes(pickle.dumps({"learning_rate": 1}))
    with pytest.raises(ConfigError, match=r"pickle.*args\.to_json_string"):
        read_current("hf", Path("training_args.bin"))


def test_command_excludes_from() -> None:
    Path("train.py").touch()
    with pytest.raises(ConfigError, match=r"workload\.command: --from "):
        plan_of("hf", OWN, "workload: {command: [python, train.py]}\n")


def test_bad_baseline() -> None:
    with pytest.raises(ConfigError, match=r"baseline: .*3$"):
        plan_of("hf", OWN, CONFIG + "baseline: 3\n")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["hf", "accelerate", "deepspeed", "axolotl"]),
    st.dictionaries(
        st.sampled_from(_NAMES),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False)
            | st.text(max_size=5)
            | st.just("auto"),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(
                    st.sampled_from(["enabled", "type", "params", "dtype", "dynamo_backend"]),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=4,
        ),
    ),
)
def test_any_file(kind: str, content: dict[str, Any]) -> None:
    with suppress(ConfigError):  # anything else fails
        plan_of(kind, content)
