"""Score by throughput, within the memory limit."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.plan import Objective
from autotune.models.statistics import evaluate, memory_fault
from autotune.records.measurement import BusyReading
from tests.factories import make_measurement

_LIMIT = 2**31


def test_the_baselines_own_score_is_close_to_one() -> None:
    baseline = make_measurement(busy_fraction=0.5)
    assert evaluate(baseline, baseline, Objective(), _LIMIT).value == pytest.approx(0.99)


def test_the_score_is_the_designs_formula() -> None:
    # 150 / 100 * (1 - 0.02 * (1 - 0.75)) = 1.4925
    score = evaluate(
        make_measurement(150, busy=0.75), make_measurement(100, busy=0.5), Objective(), _LIMIT
    )
    assert score.value == pytest.approx(1.4925)
    assert score.feasible
    assert score.violation == pytest.approx(-0.5)


def test_between_equals_the_busier_device_wins() -> None:
    busy, idle = (
        evaluate(make_measurement(busy_fraction=share), make_measurement(), Objective(), _LIMIT)
        for share in (0.9, 0.1)
    )
    assert busy.value > idle.value


def test_other_busy_source_is_not_compared() -> None:
    baseline = make_measurement(busy_fraction=0.5, busy_source="nvml")
    odd = make_measurement(busy_fraction=1.0, busy_source="1 - data wait")
    assert evaluate(odd, baseline, Objective(), _LIMIT) == evaluate(
        baseline, baseline, Objective(), _LIMIT
    )


def test_busy_by_the_baselines_source() -> None:
    baseline = make_measurement(busy_fraction=0.5, busy_source="nvml")
    readings = (BusyReading(fraction=0.9, source="gpm"), BusyReading(fraction=0.7, source="nvml"))
    several = make_measurement(busy_fraction=0.9, busy_source="gpm", busy_readings=readings)
    alike = make_measurement(busy_fraction=0.7, busy_source="nvml")
    assert evaluate(several, baseline, Objective(), _LIMIT) == evaluate(
        alike, baseline, Objective(), _LIMIT
    )


def test_no_busy_fraction() -> None:
    silent: dict[str, Any] = {"busy_fraction": None, "busy_source": None}
    score = evaluate(
        make_measurement(200, **silent), make_measurement(100, **silent), Objective(), _LIMIT
    )
    assert score.value == 2.0


def test_over_memory_is_a_violation() -> None:
    score = evaluate(
        make_measurement(1e9, peak_memory_bytes=3 * 2**30), make_measurement(), Objective(), _LIMIT
    )
    assert not score.feasible
    assert score.violation == pytest.approx(0.5)
    assert "2,048 MiB" in score.reason
    assert "3,072 MiB" in score.reason


def test_reaching_the_limit_exactly_is_allowed() -> None:
    assert evaluate(
        make_measurement(peak_memory_bytes=_LIMIT), make_measurement(), Objective(), _LIMIT
    ).feasible


@pytest.mark.parametrize(("retries", "fits"), [(None, True), (1, True), (2, False)])
def test_thrashing_does_not_fit(retries: int | None, fits: bool) -> None:
    calm = make_measurement(peak_memory_bytes=_LIMIT)
    seen = calm.model_copy(
        update={"memory": calm.memory.model_copy(update={"alloc_retries": retries})}
    )
    score, fault = evaluate(seen, calm, Objective(), _LIMIT), memory_fault(seen, _LIMIT)
    assert (score.feasible, score.violation <= 0, fault is None) == (fits, fits, fits)
    assert score.reason == (fault or "")
    assert fits or "2,048 MiB" in score.reason


def test_thrashing_over_the_limit() -> None:
    over = make_measurement(peak_memory_bytes=_LIMIT + 2**20)
    over = over.model_copy(update={"memory": over.memory.model_copy(update={"alloc_retries": 3})})
    score = evaluate(over, over, Objective(), _LIMIT)
    assert score.violation == pytest.approx(2**20 / _LIMIT)
    assert "2,049 MiB" in score.reason
