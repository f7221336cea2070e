"""What TfData refuses, with and without TensorFlow installed; what it does with a pipeline: tests/integrations."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config import tf_data
from autotune.config.plan import Objective, Workload, WorkloadFacts
from autotune.config.tf_data import TfData
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError
from autotune.space.constraints import normalised, without_effect
from autotune.space.ranges import Basis, default_ranges, whole_numbers
from tests.factories import make_environment, make_facts


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow seems to be installed."""
    monkeypatch.setattr(tf_data, "find_spec", lambda name: name)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow is not installed."""
    monkeypatch.setattr(tf_data, "find_spec", lambda name: None)


def build(batch_size: int, num_parallel_calls: int | None) -> Any:
    raise AssertionError("nobody builds it here")


def of_pipeline() -> WorkloadFacts:
    return make_facts(is_tf_data=True, is_iterable=True, is_sharded=True)


@pytest.mark.usefixtures("missing")
def test_without_tensorflow_the_error_names_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"pip install tensorflow-cpu$"):
        TfData(build)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (range(3), "but got builtins.range"),
        (lambda: None, r"must take \(batch_size, num_parallel_calls\)"),
        (lambda batch_size: None, "does not"),
    ],
)
def test_what_is_no_builder_is_refused_with_the_rule(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TfData(given)


@pytest.mark.usefixtures("installed")
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
def test_what_belongs_to_the_pipeline_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"got {name} "):
        Workload(model=None, dataset=TfData(build), **{name: value})


@pytest.mark.usefixtures("installed")
def test_a_pipeline_alone_is_a_dataset() -> None:
    assert Workload(model=None, dataset=TfData(build)).dataset == TfData(build)


def test_persistent_workers_are_not_searched_and_said_to_do_nothing() -> None:
    facts, environment = of_pipeline(), make_environment()
    config = TrainingConfig(num_workers=2, persistent_workers=True)
    assert without_effect(config, facts, environment)["persistent_workers"] == "tf_data"
    assert normalised(config.model_dump(), facts, environment)["persistent_workers"] is False
    basis = Basis(
        given={}, baseline=config, objective=Objective(), facts=facts, environment=environment
    )
    assert list(default_ranges(basis)["persistent_workers"]) == [False]
    assert max(whole_numbers(default_ranges(basis)["num_workers"])) >= 8
