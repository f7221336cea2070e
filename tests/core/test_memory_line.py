"""The line of memory against the micro batch, its error, and what is said of the biggest batch: only what was run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.measurement import Measurement
from autotune.core.memory_line import MemoryLine, fit_memory, memory_lines, say_largest
from autotune.core.objective import Score
from autotune.core.training_config import TrainingConfig
from autotune.core.trial import TrialRecord, TrialResult

MIB = 2**20
BATCHES = st.lists(st.integers(1, 4096), min_size=2, max_size=12).filter(lambda batches: len(set(batches)) > 1)
MakeTrial = Callable[..., TrialRecord]


@pytest.fixture
def trial(make_measurement: Callable[..., Measurement]) -> MakeTrial:
    """(number, micro batch, MiB) of a trial under a limit of 1000 MiB; outcome "oom" for no memory figure."""

    def make(number: int, batch: int, peak_mib: int | None, **settings: object) -> TrialRecord:
        config = TrainingConfig.model_validate({"micro_batch_size": batch, **settings})
        if peak_mib is None:
            return TrialRecord(number=number, config=config, result=TrialResult(outcome="oom"))
        measurement = make_measurement(peak_memory_bytes=peak_mib * MIB)
        score = Score(value=1.0, feasible=peak_mib <= 1000)
        return TrialRecord(
            number=number, config=config, result=TrialResult(outcome="ok", measurement=measurement), score=score
        )

    return make


def fitted(points: list[tuple[int, int]]) -> MemoryLine:
    line = fit_memory("float32", points)
    assert line is not None
    return line


@given(BATCHES, st.integers(0, 10**10), st.integers(1, 10**8))
def test_memory_that_is_a_line_is_found_again(batches: list[int], fixed: int, slope: int) -> None:
    line = fitted([(batch, fixed + slope * batch) for batch in batches])
    most = fixed + slope * 8192
    assert line.predict_bytes(8192) == pytest.approx(most, rel=1e-6)
    assert line.bytes_per_sample == pytest.approx(slope, rel=1e-6)
    if len(batches) > 2:
        assert line.error_bytes == pytest.approx(0, abs=1e-6 * most)


@given(BATCHES, st.lists(st.integers(10**6, 10**9), min_size=12, max_size=12), st.integers(10**6, 10**10))
def test_the_largest_batch_fits_with_its_error_and_the_next_does_not(
    batches: list[int], peaks: list[int], limit: int
) -> None:
    line = fitted(list(zip(batches, peaks, strict=False)))
    largest = line.largest_batch(limit)
    assert line.bytes_per_sample >= 0
    if largest is None:
        assert line.bytes_per_sample == 0
        return
    assert not line.fits(largest + 1, limit) or line.fits(largest, limit)
    if largest > max(batches):
        assert line.fits(largest, limit)
        assert not line.fits(largest + 1, limit)


@given(BATCHES, st.lists(st.integers(10**6, 10**9), min_size=12, max_size=12))
def test_the_error_grows_away_from_the_points(batches: list[int], peaks: list[int]) -> None:
    line = fitted(list(zip(batches, peaks, strict=False)))
    far = [line.error_at(max(batches) * times) for times in (1, 2, 4)]
    assert far == sorted(far)
    assert far[0] >= line.error_bytes * 0.999999


def test_one_batch_makes_no_line_and_two_points_a_vague_one() -> None:
    assert fit_memory("float32", [(32, 100), (32, 110)]) is None
    assert fitted([(32, 100), (64, 200)]).error_bytes == pytest.approx(20)


def test_memory_that_falls_with_the_batch_is_noise() -> None:
    line = fitted([(32, 110), (64, 100)])
    assert line.bytes_per_sample == 0
    assert line.largest_batch(10**9) is None


def test_each_precision_has_its_own_line(trial: MakeTrial) -> None:
    records = [trial(0, 32, 100), trial(1, 64, 200), trial(2, 32, 60, amp_dtype="bfloat16"), trial(3, 64, None)]
    assert [(line.amp_dtype, len(line.points)) for line in memory_lines(records)] == [("float32", 2)]


def test_the_biggest_batch_is_one_that_was_run_with_what_was_predicted_of_it(trial: MakeTrial) -> None:
    records = [trial(0, 32, 132), trial(1, 64, 164), trial(2, 128, 228), trial(3, 512, 700), trial(4, 1024, 1124)]
    said = say_largest(records, "float32", 1000 * MIB, batches=[32, 64, 128, 256, 512, 1024])
    assert said is not None
    assert "limit of 1,000 MiB allows is 512" in said
    assert "it took 700 MiB" in said
    assert "predicted from other batches: 612 MiB" in said


def said_of(records: list[TrialRecord], *batches: int, overloaded: tuple[int, ...] = ()) -> str:
    return say_largest(records, "float32", 1000 * MIB, batches=batches, overloaded=overloaded) or ""


def test_running_out_of_memory_tells_a_biggest_batch_too(trial: MakeTrial) -> None:
    records = [trial(0, 32, 132), trial(1, 64, None)]
    assert "allows is 32 (run, it took 132 MiB)" in said_of(records, 32, 64)


def test_a_batch_between_that_was_never_run_leaves_open_what_the_limit_allows(trial: MakeTrial) -> None:
    records = [trial(0, 32, 132), trial(1, 64, 164), trial(2, 512, None)]
    assert "allows is 64" in said_of(records, 32, 64, 512)
    assert said_of(records, 32, 64, 256, 512).startswith("The biggest micro batch that was run within 1,000 MiB is 64")


def test_a_batch_that_failed_on_the_largest_samples_counts_as_too_big(trial: MakeTrial) -> None:
    records = [trial(0, 32, 132), trial(1, 64, 164), trial(2, 128, 228), trial(3, 128, 228), trial(4, 256, 356)]
    assert "of the space, 256," in said_of(records, 32, 64, 128, 256)
    assert "allows is 64" in said_of(records, 32, 64, 128, 256, overloaded=(2,))
    assert said_of(records, 32, 64, 128, 256, overloaded=(0,)) == ""


def test_without_a_batch_that_was_too_big_nothing_is_claimed_of_the_limit(trial: MakeTrial) -> None:
    records = [trial(0, 32, 132), trial(1, 64, 164)]
    assert "of the space, 64," in said_of(records, 32, 64)
    assert "that was run" in said_of(records, 32, 64, 256)


def test_nothing_within_the_limit_is_nothing_to_say(trial: MakeTrial) -> None:
    assert said_of([trial(0, 32, 2000)], 32, 64) == ""
