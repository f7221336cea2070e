"""Fit lines of memory over the micro batch, and note the largest batch that ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.plan import Objective
from autotune.config.training_config import TrainingConfig
from autotune.models.memory import (
    MemoryLine,
    MemoryModel,
    Peak,
    largest_batch_note,
    memory_kind,
    memory_lines,
    memory_of_trials,
)
from autotune.models.observations import ConfiguredPoint, configured_points
from autotune.note import Note
from autotune.policy import POLICY
from autotune.records.measurement import Block, Measurement
from autotune.records.result import CurvePoint, Curves
from autotune.records.trial import Score, TrialRecord, TrialResult
from tests.factories import (
    CPU,
    GPU,
    make_measurement,
    make_point,
    make_record,
    make_space,
    with_first,
)

MIB = 2**20
LIMIT = 1_000
ONE = TrainingConfig()
BATCHES = st.lists(st.integers(1, 4096), min_size=2, max_size=12).filter(
    lambda batches: len(set(batches)) > 1
)
MakeTrial = Callable[..., TrialRecord]


@pytest.fixture
def trial() -> MakeTrial:
    """(number, micro batch, MiB) of a trial under a limit of 1000 MiB; outcome "oom" for no memory figure."""

    def make(number: int, batch: int, peak_mib: int | None, **settings: object) -> TrialRecord:
        config = TrainingConfig.model_validate({"micro_batch_size": batch, **settings})
        result = TrialResult(outcome="oom")
        if peak_mib is not None:
            measurement = make_measurement(peak_memory_bytes=peak_mib * MIB)
            result = TrialResult(outcome="ok", measurement=measurement)
        score = Score(value=1.0, feasible=(peak_mib or 0) <= 1000)
        return make_record(number, config=config, result=result, score=score)

    return make


def lines_of(
    records: Sequence[TrialRecord], config: TrainingConfig = ONE, *, limit_is_ram: bool = False
) -> tuple[MemoryLine, ...]:
    return memory_lines(records, config, 1000 * MIB, limit_is_ram=limit_is_ram)


def fitted(points: Sequence[tuple[int, int]]) -> MemoryLine:
    peaks = [Peak(TrainingConfig(micro_batch_size=batch), peak) for batch, peak in points]
    model = MemoryModel(observed=peaks, has_workers_in_ram=False)
    return MemoryLine(
        model=model, config=TrainingConfig(), batches=tuple(sorted(batch for batch, _ in points))
    )


@given(
    BATCHES,
    st.lists(st.integers(10**6, 10**9), min_size=12, max_size=12),
    st.integers(10**6, 10**10),
)
def test_largest_batch_of_a_line(batches: list[int], peaks: list[int], limit: int) -> None:
    line = fitted(list(zip(batches, peaks, strict=False)))
    largest, most = line.largest_batch(limit, 200), 200
    assert line.bytes_per_sample >= 0
    sizes = [
        line.config.model_copy(update={"micro_batch_size": size})
        for size in (largest, largest + 1)
        if size
    ]
    chances = line.model.chance_to_fit(sizes, limit).tolist()
    assert largest == 0 or chances[0] >= POLICY.trials.sure_to_fit
    assert largest == most or chances[-1] < POLICY.trials.sure_to_fit


def test_line_needs_two_batches(trial: MakeTrial) -> None:
    records = [trial(0, 32, 132), trial(1, 64, 164)]
    assert lines_of([records[0], records[0]]) == ()
    (two,), (eight,) = lines_of(records), lines_of(records * 4)
    assert 0 < eight.error_bytes < two.error_bytes / 1.5


def test_memory_that_falls_with_the_batch_is_noise() -> None:
    assert fitted([(32, 110 * MIB), (64, 60 * MIB), (128, 50 * MIB)]).bytes_per_sample == 0


def test_each_precision_has_its_own_line(trial: MakeTrial) -> None:
    records = [
        trial(0, 32, 100),
        trial(1, 64, 200),
        trial(2, 32, 60, amp_dtype="bfloat16"),
        trial(3, 64, None),
    ]
    (line,) = lines_of(records)
    assert (line.config.amp_dtype, line.batches) == ("float32", (32, 64))


def test_one_line_for_each_kind(trial: MakeTrial) -> None:
    """One rank takes 100 MiB and 1 MiB a sample, the two of a group twice that: one line would be off by far."""
    groups: list[dict[str, Any]] = [
        {},
        {"strategy": "ddp", "world_size": 2},
        {"strategy": "dp", "world_size": 2},
    ]
    records = [
        trial(number, batch, settings.get("world_size", 1) * (100 + batch), **settings)
        for number, (batch, settings) in enumerate(
            (batch, one) for batch in (32, 64, 128) for one in groups
        )
    ]
    lines = lines_of(records)
    assert [(line.config.strategy, line.config.world_size) for line in lines] == [
        ("single", 1),
        ("ddp", 2),
        ("dp", 2),
    ]
    assert [memory_kind(line.config) for line in lines] == [
        memory_kind(record.config) for record in records[:3]
    ]
    assert [line.predict(64)[0] / MIB for line in lines] == pytest.approx([164, 328, 328], rel=0.02)
    assert max(line.error_bytes for line in lines) < 30 * MIB
    largest = note_of(records, records[-2].config, 32, 64, 128)
    assert largest is not None
    assert largest.figures["bounded_by"] == "space"
    assert mib_of(largest)[:3] == [1000, 456, pytest.approx(456, abs=30)]
    assert largest.figures["micro_batch_size"] == 128


# Loader workers


def test_line_of_untried_workers_is_less_sure(trial: MakeTrial) -> None:
    peaks = [(32, 132, 0), (32, 191, 2), (64, 166, 0), (64, 224, 2), (128, 226, 0), (128, 291, 2)]
    records = [
        trial(number, batch, peak, num_workers=own)
        for number, (batch, peak, own) in enumerate(peaks)
    ]
    (seen,), (beyond,) = (
        lines_of(records, TrainingConfig(num_workers=count), limit_is_ram=True) for count in (2, 8)
    )
    assert seen.workers_bytes == pytest.approx(60 * MIB, rel=0.1)
    assert seen.predict(64)[0] == pytest.approx(224 * MIB, rel=0.03)
    assert 2 * seen.error_bytes < beyond.error_bytes
    (mixed,) = lines_of(records, TrainingConfig(num_workers=8))
    assert mixed.workers_bytes == 0
    assert mixed.error_bytes > 2 * seen.error_bytes


def test_workers_do_not_shrink_memory(trial: MakeTrial) -> None:
    points = [(32, 140, 0), (64, 160, 2), (128, 228, 0), (256, 350, 2), (512, 612, 0)]
    records = [
        trial(number, batch, peak, num_workers=own)
        for number, (batch, peak, own) in enumerate(points)
    ]
    (line,) = lines_of(records, TrainingConfig(num_workers=2), limit_is_ram=True)
    assert line.workers_bytes >= 0


def test_prediction_uses_the_trials_workers(trial: MakeTrial) -> None:
    """Predict a batch with 8 workers of 30 MiB from others with none to four."""
    workers = {32: (0, 4), 64: (0, 2), 128: (0, 4), 512: (8,)}
    ran = [(batch, own) for batch, counts in workers.items() for own in counts]
    records = [
        trial(number, batch, 100 + batch + 30 * own, num_workers=own)
        for number, (batch, own) in enumerate(ran)
    ]
    own, mixed = (
        note_of(records, records[-1].config, 32, 64, 128, 512, limit_is_ram=counts)
        for counts in (True, False)
    )
    assert own is not None
    assert mixed is not None
    _, peak, predicted, error = mib_of(own)
    assert abs(predicted - peak) < error
    assert abs(mib_of(mixed)[2] - peak) > abs(predicted - peak)


def mib_of(largest: Note) -> list[float]:
    """Limit, peak, prediction and its error."""
    names = ("limit_bytes", "peak_bytes", "predicted_bytes", "error_bytes")
    return [
        float(figure) / MIB
        for name in names
        if isinstance(figure := largest.figures[name], int | float)
    ]


def note_of(
    records: list[TrialRecord],
    config: TrainingConfig,
    *batches: int,
    limit_is_ram: bool = False,
    overloaded: Sequence[int] = (),
) -> Note | None:
    space = make_space(
        {"micro_batch_size": [*batches]},
        environment=CPU if limit_is_ram else GPU,
    )
    limited = replace(space, objective=Objective(memory_limit=1000 * MIB))
    return largest_batch_note(records, config, limited, overloaded=overloaded)


def make_thrashing(peak_bytes: int) -> Measurement:
    measured = make_measurement(peak_memory_bytes=peak_bytes)
    memory = measured.memory.model_copy(update={"alloc_retries": 2})
    return measured.model_copy(update={"memory": memory})


def test_prediction_of_the_largest_batch(trial: MakeTrial) -> None:
    records = [
        trial(number, batch, 100 + batch) for number, batch in enumerate((32, 64, 128, 1024))
    ]
    largest = note_of([*records, trial(4, 512, 700)], TrainingConfig(), 32, 512, 1024)
    assert largest is not None
    assert mib_of(largest)[:3] == pytest.approx([1000, 700, 612], abs=60)


def test_prediction_needs_two_other_batches(trial: MakeTrial) -> None:
    largest = note_of([trial(0, 32, 132)], TrainingConfig(), 32)
    assert largest is not None
    assert mib_of(largest) == [1000, 132]


@pytest.mark.parametrize(
    ("peaks", "batches", "overloaded", "expected"),
    [
        ({32: 132, 64: None}, (32, 64), (), ("limit", 32)),
        ({32: 132, 512: 700, 1024: 1124}, (32, 512, 1024), (), ("limit", 512)),
        ({32: 132, 64: 164}, (32, 64), (), ("space", 64)),
        ({32: 132, 64: 164}, (32, 64, 256), (), ("trials", 64)),
        ({32: 132, 64: 164, 512: None}, (32, 64, 256, 512), (), ("trials", 64)),
        ({32: 132, 64: 164, 128: 228, 256: 356}, (32, 64, 128, 256), (2,), ("limit", 64)),
        ({32: 132, 64: 164}, (32, 64), (0,), None),
        ({32: 2000}, (32, 64), (), None),
    ],
)
def test_what_bounds_the_largest_batch(
    trial: MakeTrial,
    peaks: dict[int, int | None],
    batches: tuple[int, ...],
    overloaded: tuple[int, ...],
    expected: tuple[str, int] | None,
) -> None:
    """`overloaded`: trials that failed on the largest samples."""
    records = [trial(number, *point) for number, point in enumerate(peaks.items())]
    note = note_of(records, TrainingConfig(), *batches, overloaded=overloaded)
    assert (note and (note.figures["bounded_by"], note.figures["micro_batch_size"])) == expected


def test_thrashing_trial_is_too_big(trial: MakeTrial) -> None:
    thrashing = with_first(trial(2, 128, 999), measurement=make_thrashing(999 * MIB))
    thrashing = thrashing.model_copy(update={"score": Score(value=1.0, feasible=False)})
    records = [trial(0, 32, 132), trial(1, 64, 164), thrashing]
    largest = note_of(records, TrainingConfig(), 32, 64, 128)
    assert largest is not None
    assert largest.figures["bounded_by"] == "limit"
    (line,) = lines_of(records)
    assert line.batches == (32, 64)


# Peaks of trials and of curves


def peaks(
    looks: list[ConfiguredPoint], *records: TrialRecord, limit_is_ram: bool = False
) -> list[tuple[int, int]]:
    """Micro batch and peak of each."""
    seen = memory_of_trials(looks, records, LIMIT, limit_is_ram=limit_is_ram).observed
    return [(peak.config.micro_batch_size, peak.peak_bytes) for peak in seen]


def test_peaks_are_those_of_looks_and_of_trials() -> None:
    point = CurvePoint(changes={"micro_batch_size": 64}, ceiling=None, peak_memory_bytes=300)
    looks = configured_points(Curves(device=(point,), loader=(make_point(500.0),)), make_space())
    result = TrialResult(outcome="ok", measurement=make_measurement(peak_memory_bytes=200))
    assert peaks(looks, make_record(result=result)) == [(64, 300), (32, 200)]


def test_copies_to_come_are_no_part_of_a_fitted_peak() -> None:
    measured = make_measurement(peak_memory_bytes=900)
    memory = measured.memory.model_copy(update={"to_come_bytes": 500})
    record = make_record(
        result=TrialResult(outcome="ok", measurement=measured.model_copy(update={"memory": memory}))
    )
    assert [peak for _, peak in peaks([], record)] == [400]


STOPPED = (Block(samples=90, batches=4, seconds=1.0, data_wait_s=0.0),)


@pytest.mark.parametrize(
    ("result", "limit_is_ram", "found"),
    [
        ({"outcome": "oom", "violation": 0.5}, False, [1_500]),
        ({"outcome": "oom"}, False, [1_250]),
        ({"outcome": "ok", "measurement": make_thrashing(LIMIT)}, False, [1_250]),
        ({"outcome": "host_oom", "violation": 0.5}, True, [1_500]),
        ({"outcome": "host_oom"}, True, []),  # such as open files
        ({"outcome": "host_oom", "violation": 0.5}, False, []),
        ({"outcome": "crashed"}, False, []),
        ({"outcome": "timeout"}, False, []),
        ({"outcome": "pruned", "blocks": STOPPED}, False, []),
    ],
)
def test_peaks_of_trials_that_failed(
    result: dict[str, Any], limit_is_ram: bool, found: list[int]
) -> None:
    record = make_record(result=TrialResult.model_validate(result), score=None)
    assert peaks([], record, limit_is_ram=limit_is_ram) == [(32, peak) for peak in found]


def test_a_look_at_the_device_has_no_workers() -> None:
    baseline = TrainingConfig(num_workers=4, prefetch_factor=2, persistent_workers=True)
    point = CurvePoint(changes={}, ceiling=None, peak_memory_bytes=300)
    looks = configured_points(Curves(device=(point,)), make_space(baseline=baseline))
    assert memory_of_trials(looks, [], LIMIT, limit_is_ram=True).observed == [
        Peak(TrainingConfig(), 300, "alone")
    ]


def test_line_holds_at_three_times_the_batch() -> None:
    """GPT-2 there, in bytes: benchmarks/results/gpu-nvidia-h200.json, memory_line."""
    line = fitted([(4, 5_109_514_240), (8, 7_921_795_072), (16, 12_839_616_512)])
    for batch, seen in ((42, 31_567_183_872), (56, 41_511_878_656)):
        expected, half = line.predict(batch)
        assert abs(expected - seen) <= half < 0.1 * expected
