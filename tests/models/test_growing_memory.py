"""Copies in workers and kept graphs are found in the readings of a run, and forecast."""

from __future__ import annotations

from math import exp, inf

import pytest

from autotune.models.growing_memory import (
    PagesRead,
    copying_between,
    copying_of,
    kept_graphs_of,
    with_copies,
)
from autotune.models.statistics import memory_fault
from autotune.records.measurement import MemorySample
from autotune.records.watched_run import MemoryReading, MemoryUse
from tests.factories.measurements import make_measurement, make_window
from tests.factories.watched_runs import MIB, make_copying


def pages(samples: int, mib: float) -> PagesRead:
    """Return two workers that have copied this much of 400 MiB."""
    own = (round((10 + mib) * MIB), round((400 - mib) * MIB))
    return PagesRead(samples, [own, own])


def test_growth_per_sample_of_each_worker() -> None:
    found = copying_of(make_copying(mib_per_reading=10))
    assert found is not None
    # each of two workers makes 5,000 samples between readings
    assert found.bytes_per_sample == pytest.approx(10 * MIB / 5_000)
    assert (found.workers, found.samples) == (2, 80_000)
    assert found.copied_bytes == 80 * MIB


def test_steady_growth_ends_with_what_is_shared() -> None:
    found = copying_of(make_copying(mib_per_reading=10, shared_mib=400))
    assert found is not None
    assert found.further_bytes(10_000) == pytest.approx(2 * 10 * MIB)
    assert found.further_bytes(10**9) == pytest.approx(2 * 320 * MIB)
    assert found.further_bytes(inf) == pytest.approx(2 * 320 * MIB)
    assert found.further_bytes(-5) == 0


def test_growth_that_slows_down_ends_by_itself() -> None:
    # 100 MiB in all, approached with 20,000 samples of both workers
    readings = [
        pages(samples, 100 * (1 - exp(-samples / 20_000))) for samples in range(0, 20_001, 2_000)
    ]
    found = copying_between(readings)
    assert found is not None
    assert found.decay_samples == pytest.approx(10_000, rel=0.1)
    assert found.further_bytes(inf) == pytest.approx(2 * 100 * exp(-1) * MIB, rel=0.1)
    assert found.further_bytes(20_000) < 0.7 * found.further_bytes(inf)


def test_growth_that_has_ended_adds_nothing() -> None:
    found = copying_between([pages(0, 0), pages(100, 50), pages(200, 50)])
    assert found is not None
    assert found.further_bytes(inf) == 0
    assert found.copied_bytes == 50 * MIB


def test_one_jump_is_no_growth() -> None:
    # such as an import within the workers
    assert copying_between([pages(0, 0), pages(1_000, 0), pages(2_000, 30)]) is None


def test_growth_is_not_forecast_to_speed_up() -> None:
    found = copying_between([pages(0, 0), pages(1_000, 1), pages(2_000, 31)])
    assert found is not None
    assert found.bytes_per_sample == pytest.approx(MIB / 500)
    assert found.copied_bytes == 31 * MIB


def test_cache_of_a_worker_is_no_copy() -> None:
    readings = [
        reading.model_copy(update={"worker_shared_bytes": (400 * MIB,) * 2})
        for reading in make_copying().readings
    ]
    assert copying_of(MemoryUse(readings=tuple(readings))) is None


def test_pages_given_back_are_no_copy() -> None:
    readings = [
        reading.model_copy(update={"worker_private_bytes": (MIB,) * 2})
        for reading in make_copying().readings
    ]
    assert copying_of(MemoryUse(readings=tuple(readings))) is None


@pytest.mark.parametrize("readings", [0, 1, 2])
def test_few_readings_show_nothing(readings: int) -> None:
    assert copying_of(make_copying(readings=readings)) is None


@pytest.mark.parametrize(
    ("epoch_samples", "to_come_mib"),
    [(3_000, 2 * 20), (10_000_000, 2 * 360), (1_000, 0), (None, 0)],
)
def test_peak_of_a_trial_counts_copies_to_come(
    epoch_samples: int | None, to_come_mib: float
) -> None:
    copying = copying_between([pages(0, 0), pages(1_000, 20), pages(2_000, 40)])
    window = make_window(epoch_samples=epoch_samples)
    found = with_copies(MemorySample(peak_bytes=MIB, source="PSS"), copying, window)
    assert found.to_come_bytes == pytest.approx(to_come_mib * MIB)
    assert found.peak_bytes == MIB + found.to_come_bytes


def test_few_copied_pages_add_nothing() -> None:
    memory = MemorySample(peak_bytes=MIB, source="PSS")
    copying = copying_between([pages(0, 0), pages(10, 0.5), pages(20, 1)])
    assert with_copies(memory, copying, make_window()) == memory
    assert with_copies(memory, None, make_window()) == memory


def test_readings_must_be_of_the_same_workers() -> None:
    one = PagesRead(0, [(MIB, 9 * MIB)])
    assert copying_between([one, pages(10, 1), pages(20, 2)]) is None
    assert copying_between([pages(10, 0), pages(10, 1), pages(10, 2)]) is None
    assert copying_between([PagesRead(0, []), PagesRead(1, []), PagesRead(2, [])]) is None


def test_refusal_names_copies_to_come() -> None:
    plain = make_measurement(gib=2.0)
    memory = plain.memory.model_copy(update={"to_come_bytes": 2**30})
    growing = plain.model_copy(update={"memory": memory})
    assert memory_fault(plain, 2**30) != memory_fault(growing, 2**30)
    assert memory_fault(growing, 2**32) is None


def use_of(nodes: list[int | None], *, mib: float = 0.0, on_device: bool = False) -> MemoryUse:
    """Return readings at every tenth step, with memory that grows by some MiB from each to the next."""
    name = "device_bytes" if on_device else "process_bytes"
    readings = [
        MemoryReading(
            steps=10 * number,
            samples=80 * number,
            graph_nodes=found,
            **{name: round((100 + mib * number) * MIB)},
        )
        for number, found in enumerate(nodes)
    ]
    return MemoryUse(readings=tuple(readings))


@pytest.mark.parametrize("on_device", [False, True])
def test_kept_graphs(on_device: bool) -> None:
    found = kept_graphs_of(use_of([*range(5, 500, 50)], mib=2.0, on_device=on_device))
    assert found is not None
    assert found.nodes_per_step == pytest.approx(5)
    assert found.bytes_per_step == pytest.approx(0.2 * MIB)
    assert found.is_on_device == on_device


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [5, 55],
        [50] * 9,
        [5, 55, 5, 55, 105],
        [None] * 9,
        [5, 6, 7, 8],
    ],
)
def test_no_kept_graphs(nodes: list[int | None]) -> None:
    assert kept_graphs_of(use_of(nodes)) is None


def test_growth_within_its_error_is_zero() -> None:
    found = kept_graphs_of(use_of([*range(5, 500, 50)]))
    assert found is not None
    assert found.bytes_per_step == 0
