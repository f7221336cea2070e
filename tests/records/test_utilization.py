"""When two sources of the busy fraction disagree."""

from __future__ import annotations

import pytest

from autotune.records.measurement import (
    GPM_SOURCE,
    NVML_SOURCE,
    PROFILER_SOURCE,
    WAIT_SOURCE,
    BusyReading,
    best_common_source,
    disagreement,
)


def readings(*given: tuple[str, float]) -> list[BusyReading]:
    return [BusyReading(source=source, fraction=fraction) for source, fraction in given]


@pytest.mark.parametrize(("nvml", "differs"), [(0.60, True), (0.85, False), (1.0, True)])
def test_sources_over_ten_points_apart_disagree(nvml: float, differs: bool) -> None:
    found = disagreement(readings((PROFILER_SOURCE, 0.80), (NVML_SOURCE, nvml)))
    assert (found is not None) == differs
    if found is not None:
        assert found[0].fraction < found[1].fraction


def test_the_loops_waits_are_no_rival_to_what_a_device_tells() -> None:
    assert disagreement(readings((NVML_SOURCE, 0.9), (WAIT_SOURCE, 0.2))) is None


@pytest.mark.parametrize(
    ("told", "best"),
    [
        (
            [{WAIT_SOURCE, NVML_SOURCE, PROFILER_SOURCE}, {PROFILER_SOURCE, NVML_SOURCE}],
            PROFILER_SOURCE,
        ),
        ([{WAIT_SOURCE, NVML_SOURCE, PROFILER_SOURCE}, {WAIT_SOURCE, NVML_SOURCE}], NVML_SOURCE),
        ([{WAIT_SOURCE, NVML_SOURCE, GPM_SOURCE}, {NVML_SOURCE, GPM_SOURCE}], GPM_SOURCE),
        ([{PROFILER_SOURCE, GPM_SOURCE}, {GPM_SOURCE, PROFILER_SOURCE}], PROFILER_SOURCE),
        ([{WAIT_SOURCE, NVML_SOURCE}, {WAIT_SOURCE}], WAIT_SOURCE),
        ([{WAIT_SOURCE, "a counter of its own"}], "a counter of its own"),
        ([{NVML_SOURCE, "a counter of its own"}], NVML_SOURCE),
        ([{NVML_SOURCE}, {PROFILER_SOURCE}], None),
        ([], None),
    ],
)
def test_the_best_source_is_one_that_told_of_all(told: list[set[str]], best: str | None) -> None:
    assert best_common_source(told) == best
