from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import autotune
from autotune.apply.cores import threads_in_workers
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.errors import ConfigError
from autotune.files.recommended import read_recommended, recommended_yaml
from autotune.records.measurement import Interval
from tests.factories import NO_ADVICE, make_facts, make_recommendation, make_summary
from tests.factories.configs import any_configs
from tests.golden import assert_golden

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


def recommended(config: TrainingConfig, **changes: Any) -> str:
    """Return the file of a search that found this configuration."""
    return recommended_yaml(
        make_summary(recommendation=make_recommendation(config=config), **changes)
    )


@given(config=any_configs(), name=st.text(max_size=20))
def test_settings_are_read_back_exactly(folder: Path, config: TrainingConfig, name: str) -> None:
    assert read_recommended(write(folder, recommended(config, name=name))) == config


def test_file() -> None:
    """Figures are rounded, and what is not known is null."""
    golden = Path(__file__).parent / "golden" / "recommended.yaml"
    speedup = Interval(value=2.345678, low=2.3, high=inf)
    found = make_recommendation(speedup=speedup, lr_advice=NO_ADVICE, reasons=())
    assert_golden(golden, recommended_yaml(make_summary(recommendation=found)))


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
def test_header_loader_runs(config: TrainingConfig, facts: dict[str, Any], dataset: Any) -> None:
    text = recommended(config, facts=make_facts(**facts))
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


def test_missing_settings(tmp_path: Path) -> None:
    kept = [
        line
        for line in recommended(GROUP).splitlines()
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
        ("format: 1", "format: 2", r"x\.yaml:\d+:1: format: .*got 2;"),
        ("format: 1", "format: true", "format: .*got True;"),
        ("format: 1", "", r"x\.yaml.*recommended\.yaml"),
        ("settings:", "sets:", r"x\.yaml.*recommended\.yaml"),
        ("num_workers: 2", "num_workers: -1", r"x\.yaml:\d+:3: settings\.num_workers: .*-1$"),
        ("num_workers: 2", "num_worker: 0", r"settings\.num_worker: .*'num_workers'"),
        ("num_workers: 2", "", r"settings\.num_workers: "),
        ("num_workers: 2", "num_workers: !!binary aGk=", r"settings\.num_workers: .*binary"),
        ("num_workers: 2", "num_workers: 0\n  num_workers: 1", r"settings\.num_workers: .*\d"),
        ("    static_graph: false\n", "", r"settings\.ddp\.static_graph: "),
        ("bucket_cap_mb: 50.0", "bucket_cap_mb: 0", r"settings\.ddp\.bucket_cap_mb: .*0$"),
        ("strategy: ddp", "strategy: single", "settings: .*'single'.*world_size=2"),
    ],
)
def test_changed_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = recommended(GROUP)
    assert old in text
    with pytest.raises(ConfigError, match=message):
        read_recommended(write(tmp_path, text.replace(old, new, 1)))


def test_run_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "recommended.yaml").write_text(recommended(GROUP))
    assert autotune.load(tmp_path) == GROUP


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
def test_any_change_gives_settings_or_config_error(folder: Path, value: Any, key: str) -> None:
    content = yaml.safe_load(recommended(TrainingConfig()))
    (content if key in content else content["settings"])[key] = value
    path = write(folder, yaml.safe_dump(content))
    try:
        config = read_recommended(path)
    except ConfigError:
        return
    assert read_recommended(write(folder, recommended(config))) == config


def test_impossible_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="xxx"):
        read_recommended(tmp_path / ("x" * 5000))
