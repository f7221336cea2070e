from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from math import exp
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import autotune
from autotune.apply.cores import threads_in_workers
from autotune.config.environment import Environment
from autotune.config.plan import Budget, Objective, OptimizerFacts, WorkloadFacts
from autotune.config.training_config import AMP_DTYPES, CompileMode, DdpConfig, TrainingConfig
from autotune.errors import ConfigError
from autotune.files.recommended import read_recommended, recommended_yaml
from autotune.records.measurement import Block, Interval, Measurement, MemorySample, Window
from autotune.records.result import Recommendation, RunSummary, RunVariation
from autotune.records.trial import TrialRecord, TrialResult
from autotune.space.scaling import LrAdvice
from tests.factories import said

GROUP = TrainingConfig(
    strategy="ddp", world_size=2, num_workers=2, ddp=DdpConfig(bucket_cap_mb=50, comm_hook="fp16")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


def write(folder: Path, text: str) -> Path:
    path = folder / "x.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@st.composite
def training_configs(draw: st.DrawFn) -> TrainingConfig:
    counts, flags = st.integers(1, 10**6), st.booleans()
    megabytes = st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False)
    num_workers = draw(st.integers(0, 64))
    strategy = draw(st.sampled_from(["single", "dp", "ddp"]))
    accum, is_compiled = draw(counts), strategy != "dp" and draw(flags)
    ddp = st.builds(
        DdpConfig,
        bucket_cap_mb=megabytes,
        first_bucket_mb=megabytes,
        gradient_as_bucket_view=flags,
        static_graph=flags if accum == 1 else st.just(False),
        find_unused_parameters=flags,
        broadcast_buffers=flags,
        comm_hook=st.sampled_from([None, "fp16", "bf16", "powersgd"]),
    )
    return TrainingConfig(
        micro_batch_size=draw(counts),
        max_tokens=draw(st.none() | counts),
        grad_accum_steps=accum,
        lr=draw(st.floats(min_value=0, exclude_min=True, allow_infinity=False)),
        amp_dtype=draw(st.sampled_from(AMP_DTYPES)),
        num_workers=num_workers,
        prefetch_factor=draw(st.none() | counts) if num_workers else None,
        persistent_workers=draw(flags) if num_workers else False,
        pin_memory=draw(flags),
        in_order=draw(flags) if num_workers else True,
        channels_last=draw(flags),
        worker_threads=draw(st.none() | counts) if num_workers else None,
        compile=is_compiled,
        compile_mode=draw(st.sampled_from(get_args(CompileMode))) if is_compiled else "default",
        cudnn_benchmark=draw(flags),
        fused=draw(flags),
        numa_binding=draw(st.sampled_from([None, "node", "exclusive"])),
        intra_op_threads=draw(st.none() | counts),
        world_size=1 if strategy == "single" else draw(counts),
        strategy=strategy,
        ddp=draw(st.none() | ddp) if strategy == "ddp" else None,
    )


def measurement(rate: float, high: float | None = None) -> Measurement:
    window = Window(
        blocks=(Block(samples=64, batches=2, seconds=0.5, data_wait_s=0.1),),
        whole_epochs=False,
        epoch_samples=None,
        queue_capacity=0,
        queue_at_start=None,
        queue_at_end=None,
        warm_up_batches=1,
        warm_up_s=0.1,
        is_drained=True,
        is_steady=True,
        stopped_by="precision",
    )
    return Measurement(
        samples_per_s=rate,
        samples_per_s_ci=(rate * 0.99, rate * 1.01 if high is None else high),
        busy_fraction=0.91234567,
        busy_source="NVML",
        data_wait_fraction=0.1,
        peak_memory_bytes=3 * 2**30,
        startup_s=1.0,
        build_s=0.5,
        memory=MemorySample(peak_bytes=3 * 2**30, source="test"),
        window=window,
        loss=1.0,
    )


def summary(config: TrainingConfig, *, runs: int = 3, name: str = "resnet") -> RunSummary:
    environment = Environment(
        device="cuda:0",
        device_kind="cuda",
        device_name="NVIDIA H200",
        device_memory_bytes=2**37,
        device_count=1,
        native_amp_dtypes=AMP_DTYPES,
        driver="580.1",
        cores=16,
        ram_bytes=2**37,
        platform="Linux",
        python="3.11.9",
        torch="2.13.0",
        cuda="13.0",
        versions={},
    )
    slow, fast = measurement(100.0, float("inf")), measurement(234.5678)
    recommendation = Recommendation(
        config=config,
        number=1,
        verdict="faster",
        speedup=Interval(value=2.345678, low=2.3, high=float("inf")),
        gain_probability=0.987654,
        lr_advice=LrAdvice(
            lr=config.lr,
            rule="sqrt",
            batch_ratio=4.0,
            betas=(0.6, 0.996),
            notes=(said("Warm up."),),
        ),
        reasons=(said("Fastest within noise."),),
    )
    outcomes = (("ok", slow), ("ok", fast), ("oom", None))
    trials = tuple(
        TrialRecord(
            number=number,
            config=config,
            results=(TrialResult.model_validate({"outcome": one, "measurement": run}),)
            * (runs if number == 1 else 1),
        )
        for number, (one, run) in enumerate(outcomes)
    )
    facts = WorkloadFacts(
        dataset_length=100,
        is_iterable=False,
        has_4d_input=True,
        parameter_count=10,
        optimizer=OptimizerFacts(name="SGD"),
        step_source="loss",
    )
    return RunSummary(
        name=name,
        environment=environment,
        facts=facts,
        objective=Objective(),
        budget=Budget(),
        baseline=TrainingConfig(),
        limit_bytes=2**36,
        memory_source="max reserved",
        seed=0,
        trials=trials,
        run_variation=RunVariation(sd=0.02, degrees_of_freedom=3.0),
        recommendation=recommendation,
        stopped_because=said("done"),
        wall_s=10.0,
        autotune_version="0.1.0",
    )


@given(config=training_configs(), name=st.text(max_size=20))
def test_a_recommendation_is_read_back_exactly(
    folder: Path, config: TrainingConfig, name: str
) -> None:
    assert read_recommended(write(folder, recommended_yaml(summary(config, name=name)))) == config


def test_the_evidence_is_rounded_and_what_is_not_known_is_null() -> None:
    content = yaml.safe_load(recommended_yaml(summary(TrainingConfig())))
    assert list(content) == [
        "format",
        "settings",
        "learning_rate",
        "evidence",
        "same_batch",
        "baseline",
        "machine",
    ]
    evidence = content["evidence"]
    assert evidence["speedup"] == {"value": 2.346, "low": 2.3, "high": None}
    assert (evidence["verdict"], evidence["gain_probability"]) == ("faster", 0.9877)
    rate = evidence["samples_per_s"]["recommended"]
    assert rate["value"] == 234.6
    assert rate["low"] < 234.6 * exp(-0.02 * 1.96) < 234.6 * exp(0.02 * 1.96) < rate["high"], (
        "another run's spread"
    )
    assert evidence["busy_fraction"] == {
        "baseline": 0.9123,
        "recommended": 0.9123,
        "source": "NVML",
    }
    assert (evidence["peak_memory_gib"], evidence["memory_limit_gib"]) == (3.0, 64.0)
    assert (evidence["trials"], evidence["runs"]) == (
        {"ok": 2, "oom": 1},
        {"baseline": 1, "recommended": 3},
    )
    assert content["machine"]["fingerprint"] == summary(TrainingConfig()).environment.fingerprint


def test_fewer_runs_are_written_with_a_wider_interval() -> None:
    once, thrice = (
        yaml.safe_load(recommended_yaml(summary(TrainingConfig(), runs=runs)))["evidence"][
            "samples_per_s"
        ]
        for runs in (1, 3)
    )
    assert once["recommended"]["low"] < thrice["recommended"]["low"] < 234.6
    assert once["baseline"] == thrice["baseline"]


class Stream(IterableDataset[int]):
    """Four numbers, one after the other."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("config", "facts", "dataset"),
    [
        (TrainingConfig(micro_batch_size=2), {}, range(4)),
        (GROUP.model_copy(update={"micro_batch_size": 2}), {}, range(8)),
        (TrainingConfig(micro_batch_size=2), {"is_iterable": True}, Stream()),
        (TrainingConfig(micro_batch_size=2), {"fixed_batch_size": 2}, range(4)),
        (
            TrainingConfig(micro_batch_size=2, num_workers=1, worker_threads=1),
            {"fixed_batch_size": 2},
            range(4),
        ),
        (TrainingConfig(micro_batch_size=2, max_tokens=9), {"has_token_budget": True}, range(4)),
    ],
    ids=[
        "map",
        "ranks",
        "stream",
        "batch sampler",
        "threads beside a batch sampler",
        "token budget",
    ],
)
def test_the_headers_loader_is_one_that_torch_makes(
    config: TrainingConfig, facts: dict[str, Any], dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = summary(config)
    text = recommended_yaml(
        found.model_copy(update={"facts": found.facts.model_copy(update=facts)})
    )
    lines = [
        line.removeprefix("#     ")
        for line in text.splitlines()
        if re.match(r"#     (sampler|loader) = ", line)
    ]
    code = "\n".join(lines).replace("batch_sampler=...", "batch_sampler=[[0, 1], [2, 3]]")
    names: dict[str, Any] = {
        "batches": [[0, 1], [2, 3]],
        "DataLoader": DataLoader,
        "DistributedSampler": partial(DistributedSampler, num_replicas=2, rank=0),
        "config": config.model_copy(
            update={"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
        ),
        "dataset": dataset,
    }
    exec(code, names)
    assert [len(batch) for batch in names["loader"]] == [2, 2]
    assert threads_in_workers(names["loader"].worker_init_fn) == config.worker_threads


def test_every_setting_of_ddp_is_written_and_read_back_by_load(tmp_path: Path) -> None:
    path = write(tmp_path, recommended_yaml(summary(GROUP)))
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert content["settings"]["ddp"].keys() == DdpConfig.model_fields.keys()
    assert (content["settings"]["strategy"], content["settings"]["world_size"]) == ("ddp", 2)
    assert autotune.load(path) == GROUP


def test_settings_that_are_missing_are_told_in_their_order(tmp_path: Path) -> None:
    kept = [
        line
        for line in recommended_yaml(summary(GROUP)).splitlines()
        if not line.startswith(("  lr:", "  compile:"))
    ]
    with pytest.raises(ConfigError) as caught:
        autotune.load(write(tmp_path, "\n".join(kept)))
    fields = [
        field
        for problem in caught.value.problems
        for field in re.findall(r"settings\.\w+", problem)
    ]
    assert fields == ["settings.lr", "settings.compile"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    static_graph: false\n", "", r"settings\.ddp\.static_graph: "),
        ("bucket_cap_mb: 50.0", "bucket_cap_mb: 0", r"settings\.ddp\.bucket_cap_mb: .*0$"),
        ("comm_hook: fp16", "comm_hook: fp8", r"settings\.ddp\.comm_hook: .*'fp8'"),
        ("comm_hook: fp16", "comm_hook: fp16\n    hook: fp16", r"settings\.ddp\.hook: "),
        ("strategy: ddp", "strategy: single", "settings: .*'single'.*world_size=2"),
    ],
)
def test_a_changed_setting_of_ddp_is_told(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_recommended(tampered(tmp_path, old, new, GROUP))


def tampered(folder: Path, old: str, new: str, config: TrainingConfig | None = None) -> Path:
    text = recommended_yaml(summary(config or TrainingConfig()))
    assert old in text
    return write(folder, text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format: 1", "format: 2", r"x\.yaml:\d+:9: format: .*got 2;"),
        ("format: 1", "format: true", "format: .*got True;"),
        ("format: 1", "", r"x\.yaml.*recommended\.yaml"),
        ("settings:", "sets:", r"x\.yaml.*recommended\.yaml"),
        ("num_workers: 0", "num_workers: -1", r"x\.yaml:\d+:16: settings\.num_workers: .*-1$"),
        ("num_workers: 0", "num_worker: 0", r"settings\.num_worker: .*'num_workers'"),
        ("num_workers: 0", "", r"settings\.num_workers: "),
        ("num_workers: 0", "num_workers: !!binary aGk=", r"settings\.num_workers: .*binary"),
        ("num_workers: 0", "num_workers: 0\n  num_workers: 1", r"settings\.num_workers: .*line"),
        (
            "persistent_workers: false",
            "persistent_workers: true",
            "settings: persistent_workers .*num_workers=0",
        ),
    ],
)
def test_a_changed_recommendation_is_told(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_recommended(tampered(tmp_path, old, new))


def test_a_missing_recommendation_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recommended\.yaml"):
        read_recommended(tmp_path / "recommended.yaml")


def test_a_run_folder_in_place_of_its_recommendation_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"folder.*recommended\.yaml"):
        read_recommended(tmp_path)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(
    value=_VALUES,
    key=st.sampled_from(["settings", "format", "num_workers", "lr", "ddp", "amp_dtype"]),
)
def test_any_change_gives_settings_or_a_config_error(folder: Path, value: Any, key: str) -> None:
    content = yaml.safe_load(recommended_yaml(summary(TrainingConfig())))
    (content if key in content else content["settings"])[key] = value
    path = write(folder, yaml.safe_dump(content))
    try:
        config = read_recommended(path)
    except ConfigError:
        return
    assert read_recommended(write(folder, recommended_yaml(summary(config)))) == config


def test_a_name_that_no_file_system_takes_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="xxx"):
        read_recommended(tmp_path / ("x" * 5000))
