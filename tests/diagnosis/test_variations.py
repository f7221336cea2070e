"""What a diagnosis measures beside today's settings, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.advice import list_variations
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import Ceilings, Measurement
from autotune.records.result import changed_settings
from tests.factories import GPU, make_breakdown, make_loader_costs, make_measurement, make_space

FOUR = TrainingConfig(num_workers=4, micro_batch_size=256)
DEAR, CHEAP = make_loader_costs(5.38e-3, collate_s=0.126), make_loader_costs(1e-6)


def alone(samples_per_s: float) -> Ceiling:
    return Ceiling(
        samples_per_s=samples_per_s, samples=1000, seconds=1000 / samples_per_s, batches=10
    )


def run_of(loader: float, device: float, **changes: Any) -> Measurement:
    """A run held by the slower of its sides."""
    ceilings = Ceilings(loader=alone(loader), device=alone(device))
    values: dict[str, Any] = {
        "ceilings": ceilings,
        "breakdown": make_breakdown(wait=0.8),
        "loader_costs": DEAR,
    }
    return make_measurement(min(loader, device), **values | changes)


def varied(
    run: Measurement, own: TrainingConfig = FOUR, cores: int = 16, **space: object
) -> list[dict[str, object]]:
    """What each variation changes, by name."""
    environment = GPU.model_copy(
        update={"cores": cores, "native_amp_dtypes": ("float32", "bfloat16")}
    )
    configs = list_variations(make_space(space, baseline=own, environment=environment), run)
    assert len(set(configs)) == len(configs), "none twice"
    return [
        {name: after for name, (_, after) in changed_settings(one, own).items()} for one in configs
    ]


def counts(changes: list[dict[str, object]]) -> list[object]:
    """The numbers of workers that are measured, in order."""
    return [change["num_workers"] for change in changes if "num_workers" in change]


def test_number_of_cores_comes_first() -> None:
    changes = varied(run_of(658.0, 5172.0))
    assert changes[0] == {"num_workers": 16, "persistent_workers": True}
    assert counts(changes) == [16, 8, 32, 2]
    assert counts(varied(run_of(658.0, 5172.0), cores=12)) == [12, 16, 8, 2]


def test_one_worker_and_none_come_last() -> None:
    assert counts(varied(run_of(658.0, 5172.0, loader_costs=CHEAP))) == [16, 8, 32, 2, 0, 1]
    assert counts(varied(run_of(658.0, 5172.0, loader_costs=None))) == [16, 8, 32, 2, 0, 1]


@pytest.mark.parametrize(("restart", "is_measured"), [(0.0, False), (0.008, False), (0.1, True)])
def test_persistent_workers_if_restarts_take_time(restart: float, is_measured: bool) -> None:
    run = run_of(658.0, 5172.0, breakdown=make_breakdown(wait=0.8, restart=restart))
    assert ({"persistent_workers": True} in varied(run)) == is_measured


def test_workers_persist_only_where_the_space_allows_it() -> None:
    changes = varied(run_of(658.0, 5172.0), persistent_workers=[False])
    assert counts(changes)
    assert not any("persistent_workers" in change for change in changes)


def test_unreachable_device_is_not_measured() -> None:
    # 16 cores make 2,725 items a second
    assert {*varied(run_of(658.0, 5172.0))[0]} == {"num_workers", "persistent_workers"}
    assert not any("micro_batch_size" in change for change in varied(run_of(658.0, 5172.0)))
    assert any("micro_batch_size" in change for change in varied(run_of(658.0, 2500.0)))


def test_ample_loader_is_not_measured() -> None:
    assert counts(varied(run_of(1e6, 1000.0))) == []
    assert counts(varied(run_of(5000.0, 1000.0))) != []


def test_larger_batches_and_precisions_come_first() -> None:
    changes = varied(run_of(1e6, 1000.0))
    first = [{"micro_batch_size": 512}, {"micro_batch_size": 1024}, {"amp_dtype": "bfloat16"}]
    assert changes[:3] == first
    assert changes[-1] == {"micro_batch_size": 128}


def test_unmeasured_sides_are_measured() -> None:
    changes = varied(make_measurement())
    assert {name for change in changes for name in change} >= {
        "num_workers",
        "micro_batch_size",
        "amp_dtype",
    }
