"""Refuse what TfData can't take, with and without TensorFlow; pipelines are in tests/integrations."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config import tf_data
from autotune.config.plan import Objective, Workload
from autotune.config.tf_data import TfData
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError
from autotune.space.constraints import normalised, without_effect
from autotune.space.ranges import Basis, default_ranges, whole_numbers
from tests.factories import make_environment, make_facts


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf_data, "find_spec", lambda name: name)


def build(batch_size: int, num_parallel_calls: int | None) -> Any:
    raise AssertionError("nobody builds it here")


def test_tensorflow_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf_data, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install tensorflow-cpu$"):
        TfData(build)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (range(3), "but got range"),
        (lambda: None, "too many positional"),
        (lambda batch_size: None, "too many positional"),
    ],
)
def test_no_builder(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TfData(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("collate_fn", list),
        ("sampler", iter),
        ("batch_sampler", iter),
        ("worker_init_fn", print),
        ("multiprocessing_context", "spawn"),
        ("shuffle", False),
        ("drop_last", False),
    ],
)
def test_workload_parts_of_a_pipeline(name: str, value: Any) -> None:
    assert Workload(model=None, dataset=TfData(build)).dataset == TfData(build)
    with pytest.raises(ValueError, match=f"got {name} "):
        Workload(model=None, dataset=TfData(build), **{name: value})


def test_persistent_workers_have_no_effect() -> None:
    facts = make_facts(is_tf_data=True, is_iterable=True, is_sharded=True)
    environment = make_environment()
    config = TrainingConfig(num_workers=2, persistent_workers=True)
    assert without_effect(config, facts, environment)["persistent_workers"] == "tf_data"
    assert normalised(config.model_dump(), facts, environment)["persistent_workers"] is False
    basis = Basis(
        given={}, baseline=config, objective=Objective(), facts=facts, environment=environment
    )
    assert list(default_ranges(basis)["persistent_workers"]) == [False]
    assert max(whole_numbers(default_ranges(basis)["num_workers"])) >= 8
