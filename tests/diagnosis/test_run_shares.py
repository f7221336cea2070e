"""An hour of training follows from some seconds of it: what recurs, by its period."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.diagnosis.run_shares import extrapolate, run_shares, unseen_parts, whole_run_gain
from autotune.records.breakdown import Share, TimeBreakdown
from autotune.records.watched_run import Recurring, RunPart, RunShare, Startup, WatchedRun


def recurring(part: RunPart, at_steps: tuple[int, ...], each_s: float, **given: Any) -> Recurring:
    fields: dict[str, Any] = {
        "part": part,
        "what": "f",
        "at_steps": at_steps,
        "seconds": (each_s,) * len(at_steps),
        "count": len(at_steps),
        "total_s": each_s * len(at_steps),
    }
    return Recurring(**(fields | given))


def watched(*kinds: Recurring, **given: Any) -> WatchedRun:
    """100 steps of 0.1 s, and what recurs."""
    parts = {"forward": 4.0, "backward": 6.0}
    for kind in kinds:
        parts[kind.part] = parts.get(kind.part, 0.0) + kind.total_s
    fields: dict[str, Any] = {
        "startup": Startup(before_loader_s=36.0, first_batch_s=0.0, first_step_s=0.0),
        "steps": 100,
        "watched_s": sum(parts.values()),
        "parts_s": parts,
        "recurring": kinds,
        "batches": 100,
        "epoch_batches": 1000,
    }
    return WatchedRun(**(fields | given))


def shares(run: WatchedRun) -> dict[str, RunShare]:
    return {share.part: share for share in run_shares(run, None, "cpu")}


def test_shares_add_up_to_the_hour() -> None:
    found = shares(
        watched(recurring("checkpoint", (9, 19, 29), 1.0), recurring("logging", (5,), 0.2))
    )
    assert sum(share.fraction for share in found.values()) == pytest.approx(1.0)
    assert found["startup"].fraction == pytest.approx(0.01)


def test_equal_distances_are_a_period() -> None:
    (checkpoint,) = extrapolate(watched(recurring("checkpoint", (4, 9, 14, 19), 0.5)))
    assert checkpoint.period == "every 5 steps"
    assert checkpoint.per_step_s.value == pytest.approx(0.1)
    assert checkpoint.per_step_s.low == pytest.approx(checkpoint.per_step_s.high)


def test_a_checkpoint_of_half_the_time_has_half_the_share() -> None:
    found = shares(watched(recurring("checkpoint", tuple(range(4, 100, 5)), 0.5)))
    assert found["checkpoint"].fraction == pytest.approx(0.99 / 2, abs=0.01)
    assert found["checkpoint"].seen == 20


def test_work_at_the_end_of_a_cut_epoch_recurs_with_whole_epochs() -> None:
    run = watched(
        recurring("restart", (100,), 2.0),
        recurring("validation", (100,), 10.0),
        epochs_ended=1,
        is_epoch_cut=True,
    )
    kinds = {one.kind.part: one for one in extrapolate(run)}
    assert kinds["validation"].period == "each epoch"
    assert kinds["validation"].per_step_s.value == pytest.approx(10.0 / 1000)
    found = shares(run)["validation"]
    assert found.low < found.fraction < found.high


def test_accumulation_makes_epochs_of_fewer_steps() -> None:
    run = watched(recurring("restart", (100,), 2.0), epochs_ended=1, is_epoch_cut=True, batches=400)
    (restart,) = extrapolate(run)
    assert restart.per_step_s.value == pytest.approx(2.0 / 250)


def test_what_was_seen_once_has_a_wide_interval() -> None:
    (once,) = extrapolate(watched(recurring("checkpoint", (60,), 1.0)))
    assert once.period == "seen once"
    assert once.per_step_s.low == 0.0
    assert once.per_step_s.high > 1.0 / 100


def test_irregular_work_has_the_rate_seen() -> None:
    (one,) = extrapolate(watched(recurring("collection", (3, 40, 45, 90), 0.1)))
    assert one.per_step_s.value == pytest.approx(4 * 0.1 / 100)
    assert one.per_step_s.low < one.per_step_s.value < one.per_step_s.high


def test_logging_of_every_step_is_no_event() -> None:
    run = watched(recurring("logging", tuple(range(100)), 0.05))
    assert not extrapolate(run)
    assert shares(run)["logging"].fraction == pytest.approx(0.99 / 3)


def test_a_few_occurrences_in_few_steps_are_no_part_of_every_step() -> None:
    run = watched(recurring("checkpoint", (1,), 5.0), steps=1)
    (once,) = extrapolate(run)
    assert once.per_step_s.low == 0.0


def test_work_of_every_fourth_epoch_is_not_taken_for_each() -> None:
    run = watched(
        recurring("restart", tuple(range(5, 100, 5)), 0.1),
        recurring("checkpoint", (20, 40, 60, 80), 1.0),
        epochs_ended=20,
        epoch_batches=5,
    )
    checkpoint = next(one for one in extrapolate(run) if one.kind.part == "checkpoint")
    assert checkpoint.period == "every 5 epochs"
    assert checkpoint.per_step_s.value == pytest.approx(4 * 1.0 / 100)


def test_work_still_running_at_the_end_may_take_much_longer() -> None:
    (cut,) = extrapolate(watched(recurring("validation", (60,), 2.0, is_cut=True)))
    assert cut.per_step_s.high > 5 * cut.per_step_s.value


def test_an_accelerators_step_is_divided_as_the_device_spends_it() -> None:
    def part(fraction: float) -> Share:
        return Share(fraction=fraction, source="profiler")

    breakdown = TimeBreakdown(
        data_wait=part(0.3),
        device_copy=part(0.1),
        compute=part(0.4),
        synchronise=part(0.1),
        idle=part(0.1),
        restart_fraction=0.0,
    )
    run = watched(recurring("checkpoint", tuple(range(4, 100, 5)), 0.1))
    found = {share.part: share for share in run_shares(run, breakdown, "cuda")}
    assert found["compute"].fraction / found["waiting"].fraction == pytest.approx(4 / 3)
    assert found["checkpoint"].fraction == pytest.approx(0.99 / 6, abs=0.01)
    assert "backward" not in found
    assert "other" not in found, "the checkpoints are the idle time"


def test_without_a_watch_the_shares_are_those_of_a_step() -> None:
    def part(fraction: float) -> Share:
        return Share(fraction=fraction, source="profiler")

    breakdown = TimeBreakdown(
        data_wait=part(0.5),
        device_copy=part(0.0),
        compute=part(0.5),
        synchronise=part(0.0),
        idle=part(0.0),
        restart_fraction=0.2,
    )
    found = {share.part: share.fraction for share in run_shares(None, breakdown, "cpu")}
    assert found == {"waiting": pytest.approx(0.3), "restart": 0.2, "compute": 0.5}


def test_a_gain_of_the_steps_counts_for_their_share_alone() -> None:
    half = [
        RunShare(part="forward", fraction=0.5, low=0.5, high=0.5),
        RunShare(part="validation", fraction=0.5, low=0.5, high=0.5),
    ]
    assert whole_run_gain(half, 1.0) == pytest.approx(1 / 0.75 - 1)
    assert whole_run_gain((), 1.0) == pytest.approx(1.0)


def test_parts_without_an_occurrence_are_unseen() -> None:
    assert unseen_parts(watched(recurring("checkpoint", (1,), 1.0))) == (
        "validation",
        "logging",
        "collection",
        "restart",
    )
