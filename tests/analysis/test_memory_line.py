"""Lines of memory against the micro batch, one for each kind of settings, and the largest batch that ran."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autotune.analysis.memory_line import (
    MemoryKind,
    MemoryLine,
    MemoryPoint,
    fit_memory,
    largest_batch_note,
    memory_kind,
    memory_lines,
)
from autotune.note import Note
from autotune.records.trial import Score, TrialRecord, TrialResult
from autotune.settings.training_config import TrainingConfig
from tests.factories import make_measurement

MIB = 2**20
BATCHES = st.lists(st.integers(1, 4096), min_size=2, max_size=12).filter(lambda batches: len(set(batches)) > 1)
MakeTrial = Callable[..., TrialRecord]


@pytest.fixture
def trial() -> MakeTrial:
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


def fitted(points: Sequence[tuple[int, ...]], num_workers: int = 0) -> MemoryLine:
    line = fit_memory(
        MemoryKind(amp_dtype="float32"), [MemoryPoint(*point) for point in points], num_workers=num_workers
    )
    assert line is not None
    return line


@settings(deadline=None)  # the first fit imports scipy
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


def test_one_batch_makes_no_line_and_two_points_an_uncertain_one() -> None:
    same = [MemoryPoint(32, 100), MemoryPoint(32, 110)]
    assert fit_memory(MemoryKind(amp_dtype="float32"), same) is None
    assert fitted([(32, 100), (64, 200)]).error_bytes == pytest.approx(20)


def test_memory_that_falls_with_the_batch_is_noise() -> None:
    line = fitted([(32, 110), (64, 100)])
    assert line.bytes_per_sample == 0
    assert line.largest_batch(10**9) is None


def test_each_precision_has_its_own_line(trial: MakeTrial) -> None:
    records = [trial(0, 32, 100), trial(1, 64, 200), trial(2, 32, 60, amp_dtype="bfloat16"), trial(3, 64, None)]
    (line,) = memory_lines(records, num_workers=None)
    assert (line.kind.amp_dtype, len(line.points)) == ("float32", 2)


def test_trials_on_other_devices_have_lines_of_their_own(trial: MakeTrial) -> None:
    """One rank takes 100 MiB and 1 MiB a sample, the two of a group twice that: one line would be off by far."""
    groups: list[dict[str, Any]] = [{}, {"strategy": "ddp", "world_size": 2}, {"strategy": "dp", "world_size": 2}]
    records = [
        trial(number, batch, settings.get("world_size", 1) * (100 + batch), **settings)
        for number, (batch, settings) in enumerate((batch, one) for batch in (32, 64, 128) for one in groups)
    ]
    lines = memory_lines(records, num_workers=None)
    assert [(line.kind.strategy, line.kind.world_size) for line in lines] == [("single", 1), ("ddp", 2), ("dp", 2)]
    assert [line.kind for line in lines] == [memory_kind(record.config) for record in records[:3]]
    assert [line.predict_bytes(64) for line in lines] == pytest.approx([164 * MIB, 328 * MIB, 328 * MIB])
    assert max(line.error_bytes for line in lines) < MIB
    of_two = records[-2].config
    largest = largest_batch_note(records, of_two, 1000 * MIB, batches=[32, 64, 128], counts_workers=False)
    assert largest is not None
    assert largest.code == "largest_batch_of_space"
    assert mib_of(largest)[:3] == pytest.approx([1000, 456, 456], abs=0.5)
    assert largest.figures["micro_batch_size"] == 128


# Loader workers


PLANE = st.tuples(st.integers(0, 10**10), st.integers(1, 10**8), st.integers(1, 10**9))
WORKERS = [0, 2, 4, 8, 1, 0, 8, 4, 2, 1, 3, 6]


@given(BATCHES.filter(lambda batches: len(set(batches)) > 4), PLANE, st.integers(0, 16))
def test_what_a_worker_takes_is_found_beside_the_batch(
    batches: list[int], plane: tuple[int, int, int], workers: int
) -> None:
    base, sample, worker = plane
    points = [(batch, base + sample * batch + worker * own, own) for batch, own in zip(batches, WORKERS, strict=False)]
    assume(abs(statistics.correlation(batches, WORKERS[: len(batches)])) < 0.9)
    line, most = fitted(points, workers), base + sample * 4096 + worker * 16
    assert line.bytes_per_worker == pytest.approx(worker, abs=1e-6 * most)
    assert line.predict_bytes(100) == pytest.approx(base + sample * 100 + worker * workers, abs=1e-5 * most)
    assert line.error_bytes == pytest.approx(0, abs=1e-5 * most)


def test_a_line_is_less_sure_for_workers_that_were_not_tried(trial: MakeTrial) -> None:
    peaks = [(32, 132, 0), (32, 191, 2), (64, 166, 0), (64, 224, 2), (128, 226, 0), (128, 291, 2)]
    records = [trial(number, batch, peak, num_workers=own) for number, (batch, peak, own) in enumerate(peaks)]
    (seen,), (between,), (beyond,) = (memory_lines(records, num_workers=count) for count in (0, 1, 8))
    assert seen.bytes_per_worker == pytest.approx(30 * MIB, rel=0.1)
    assert [line.predict_bytes(64) / MIB for line in (seen, between, beyond)] == pytest.approx([164, 194, 404], rel=0.1)
    assert between.error_bytes < seen.error_bytes < beyond.error_bytes
    assert seen.error_at(64) < 20 * MIB
    (mixed,) = memory_lines(records, num_workers=None)
    assert (mixed.bytes_per_worker, mixed.num_workers) == (0.0, 0)
    assert mixed.error_at(64) > 4 * seen.error_at(64)


@pytest.mark.parametrize(
    "points",
    [
        [(32, 132, 0), (64, 224, 2), (128, 228, 0), (256, 416, 2)],
        [(32, 132, 2), (64, 224, 4), (128, 268, 8), (256, 416, 16), (512, 700, 32)],
        [(32, 132, 2), (64, 164, 2), (128, 228, 2), (256, 356, 2), (512, 612, 2)],
    ],
    ids=["few trials", "they grow with the batch", "always as many"],
)
def test_a_workers_memory_that_trials_do_not_determine_is_left_out(points: list[tuple[int, ...]]) -> None:
    line, plain = fitted(points, 8), fitted([(batch, peak) for batch, peak, _ in points])
    assert line.bytes_per_worker == 0
    assert line.predict_bytes(1024) == pytest.approx(plain.predict_bytes(1024))
    assert line.error_at(1024) == pytest.approx(plain.error_at(1024))


def test_slopes_are_those_of_the_constrained_fit_not_clipped_ones() -> None:
    """Unconstrained, the batch's slope is negative, and the workers' too large: without it they explain less."""
    points = [(32, 100, 0), (64, 90, 0), (128, 150, 4), (256, 60, 0), (512, 160, 8), (48, 180, 8)]
    line = fitted(points)
    assert line.bytes_per_sample == 0
    workers, peaks = [own for _, _, own in points], [peak for _, peak, _ in points]
    assert line.bytes_per_worker == pytest.approx(statistics.linear_regression(workers, peaks).slope)


def test_workers_do_not_shrink_memory() -> None:
    points = [(32, 140, 0), (64, 160, 2), (128, 228, 0), (256, 350, 2), (512, 612, 0)]
    line, plain = fitted(points, 2), fitted([(batch, peak, 0) for batch, peak, _ in points], 0)
    assert line.bytes_per_worker == 0
    assert line.predict_bytes(1024) == pytest.approx(plain.predict_bytes(1024))
    assert line.error_at(1024) == pytest.approx(plain.error_at(1024))


def test_the_biggest_batch_is_predicted_for_its_own_workers(trial: MakeTrial) -> None:
    """It ran with 8 workers of 30 MiB, the others with none to four."""
    workers = {32: (0, 4), 64: (0, 2), 128: (0, 4), 512: (8,)}
    ran = [(batch, own) for batch, counts in workers.items() for own in counts]
    records = [trial(number, batch, 100 + batch + 30 * own, num_workers=own) for number, (batch, own) in enumerate(ran)]
    largest, mixed = (
        largest_batch_note(records, records[-1].config, 1000 * MIB, batches=[32, 64, 128, 512], counts_workers=counts)
        for counts in (True, False)
    )
    assert largest is not None
    assert mixed is not None
    assert mib_of(largest) == pytest.approx([1000, 852, 852, 0], abs=0.5)
    assert mib_of(mixed)[2] != pytest.approx(852, abs=0.5)


def mib_of(largest: Note) -> list[float]:
    """Limit, peak, prediction and its error."""
    names = ("limit_bytes", "peak_bytes", "predicted_bytes", "error_bytes")
    return [float(figure) / MIB for name in names if isinstance(figure := largest.figures[name], int | float)]


def largest_of(records: list[TrialRecord], *batches: int, overloaded: tuple[int, ...] = ()) -> tuple[str, int] | None:
    """The note's code, less what all have in common, and the batch."""
    largest = largest_batch_note(
        records, TrainingConfig(), 1000 * MIB, batches=batches, counts_workers=False, overloaded=overloaded
    )
    if largest is None:
        return None
    batch = largest.figures["micro_batch_size"]
    assert isinstance(batch, int)
    return largest.code.removeprefix("largest_batch_"), batch


def test_the_largest_batch_ran_and_stands_beside_its_prediction(trial: MakeTrial) -> None:
    records = [trial(0, 32, 132), trial(1, 64, 164), trial(2, 128, 228), trial(3, 512, 700), trial(4, 1024, 1124)]
    batches = (32, 64, 128, 256, 512, 1024)
    assert largest_of(records, *batches) == ("of_limit", 512)
    largest = largest_batch_note(records, TrainingConfig(), 1000 * MIB, batches=batches, counts_workers=False)
    assert largest is not None
    assert mib_of(largest)[:3] == pytest.approx([1000, 700, 612], abs=30)


def test_without_two_other_batches_there_is_no_prediction(trial: MakeTrial) -> None:
    largest = largest_batch_note([trial(0, 32, 132)], TrainingConfig(), 1000 * MIB, batches=[32], counts_workers=False)
    assert largest is not None
    assert mib_of(largest) == [1000, 132]


def test_out_of_memory_shows_a_largest_batch_too(trial: MakeTrial) -> None:
    assert largest_of([trial(0, 32, 132), trial(1, 64, None)], 32, 64) == ("of_limit", 32)


def test_a_trial_that_thrashed_is_too_big_and_no_point_of_a_line(trial: MakeTrial) -> None:
    thrashing = trial(2, 128, 999)
    assert thrashing.measurement is not None
    memory = thrashing.measurement.memory.model_copy(update={"alloc_retries": 5})
    result = TrialResult(outcome="ok", measurement=thrashing.measurement.model_copy(update={"memory": memory}))
    thrashing = thrashing.model_copy(update={"result": result, "score": Score(value=1.0, feasible=False)})
    records = [trial(0, 32, 132), trial(1, 64, 164), thrashing]
    assert largest_of(records, 32, 64, 128) == ("of_limit", 64)
    (line,) = memory_lines(records, num_workers=None)
    assert [point.micro_batch_size for point in line.points] == [32, 64]


def test_a_batch_between_that_never_ran_leaves_open_what_the_limit_allows(trial: MakeTrial) -> None:
    records = [trial(0, 32, 132), trial(1, 64, 164), trial(2, 512, None)]
    assert largest_of(records, 32, 64, 512) == ("of_limit", 64)
    assert largest_of(records, 32, 64, 256, 512) == ("that_ran", 64)


def test_a_batch_that_failed_on_the_largest_samples_counts_as_too_big(trial: MakeTrial) -> None:
    records = [trial(0, 32, 132), trial(1, 64, 164), trial(2, 128, 228), trial(3, 128, 228), trial(4, 256, 356)]
    assert largest_of(records, 32, 64, 128, 256) == ("of_space", 256)
    assert largest_of(records, 32, 64, 128, 256, overloaded=(2,)) == ("of_limit", 64)
    assert largest_of(records, 32, 64, 128, 256, overloaded=(0,)) is None


def test_without_a_batch_that_was_too_big_nothing_is_claimed_of_the_limit(trial: MakeTrial) -> None:
    records = [trial(0, 32, 132), trial(1, 64, 164)]
    assert largest_of(records, 32, 64) == ("of_space", 64)
    assert largest_of(records, 32, 64, 256) == ("that_ran", 64)


def test_where_nothing_is_within_the_limit_there_is_no_largest_batch(trial: MakeTrial) -> None:
    assert largest_of([trial(0, 32, 2000)], 32, 64) is None
