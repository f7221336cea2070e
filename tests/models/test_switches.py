from __future__ import annotations

from dataclasses import replace
from typing import Literal

from autotune.config.plan import OptimizerFacts
from autotune.config.training_config import TrainingConfig
from autotune.models.evidence import assumed_variation
from autotune.models.observations import (
    ConfiguredPoint,
    changes_no_effect_setting,
    no_effect_settings,
    unhelpful_switches,
)
from autotune.models.throughput import Observation, RateModel
from autotune.space.space import ResolvedSpace
from autotune.testing import fake_environment
from tests.factories import make_point, make_space

OWN = TrainingConfig(num_workers=4, prefetch_factor=2)
SPACE = {"in_order": [True, False], "worker_threads": [None, 1], "fused": [False, True]}


def space_of(**given: object) -> ResolvedSpace:
    optimizer = OptimizerFacts(name="SGD", can_fuse=True)
    return make_space(
        {**SPACE, **given}, baseline=OWN, environment=fake_environment(), optimizer=optimizer
    )


def model(out_of_order: float) -> RateModel:
    """Return a model in which the loader limits, and only order changes it, by this factor."""

    def seen(
        kind: Literal["run", "device", "loader"], rate: float, sd: float = 0.02, **changes: object
    ) -> Observation:
        config = OWN.model_copy(update=changes)
        return Observation(kind=kind, config=config, samples_per_s=rate, relative_sd=sd)

    observed = [
        seen("run", 100.0, 0.005),
        seen("device", 2000.0),
        seen("loader", 100.0),
        seen("loader", 100.0 * out_of_order, in_order=False),
        seen("loader", 100.0, worker_threads=1),
    ]
    return RateModel(observed, fake_environment(), assumed_variation("cuda"))


def look(**rates: float) -> list[ConfiguredPoint]:
    """Return the loader's points at the baseline, and with another value of each switch."""
    values = {"in_order": False, "worker_threads": 1, "fused": True}
    changes = [({}, 100.0), *(({name: values[name]}, rate) for name, rate in rates.items())]
    return [
        ConfiguredPoint(
            side="loader",
            config=OWN.model_copy(update=changed),
            point=make_point(rate, **changed),
        )
        for changed, rate in changes
    ]


def test_no_effect_without_a_gain() -> None:
    seen = look(in_order=101.0, worker_threads=150.0, fused=90.0)
    assert no_effect_settings(seen, space_of()) == {"in_order", "fused"}
    assert no_effect_settings(look(), space_of()) == frozenset(), "what was not looked at may win"


def test_baselines_value_must_be_possible() -> None:
    seen = look(in_order=100.0, worker_threads=100.0, fused=100.0)
    assert no_effect_settings(seen, space_of(in_order=False, worker_threads=[1, 2])) == {"fused"}


def test_worker_threads_on_a_cpu() -> None:
    space = space_of()
    on_cpu = replace(
        space,
        environment=space.environment.model_copy(update={"device": "cpu", "device_kind": "cpu"}),
    )
    assert no_effect_settings(look(worker_threads=100.0), space) == {"worker_threads"}
    assert no_effect_settings(look(worker_threads=100.0), on_cpu) == frozenset()


def test_changes_no_effect_setting() -> None:
    tried = OWN.model_copy(update={"in_order": False})
    assert changes_no_effect_setting(tried, OWN, {"in_order"})
    assert not changes_no_effect_setting(tried, OWN, {"fused"})
    unordered = OWN.model_copy(update={"in_order": False})
    assert not changes_no_effect_setting(TrainingConfig(), unordered, {"in_order"}), (
        "without workers there is no other value"
    )


def test_unhelpful_switches_are_reset() -> None:
    tried = OWN.model_copy(update={"in_order": False, "worker_threads": 1, "fused": True})
    assert unhelpful_switches(tried, space_of(), model(2.0)) == {
        "worker_threads": None,
        "fused": False,
    }
    assert unhelpful_switches(tried, space_of(), model(1.0)).keys() == {
        "in_order",
        "worker_threads",
        "fused",
    }
    assert unhelpful_switches(OWN, space_of(), model(2.0)) == {}


def test_no_reset_outside_the_space() -> None:
    tried = OWN.model_copy(update={"in_order": False})
    assert unhelpful_switches(tried, space_of(in_order=False), model(1.0)) == {}
