"""The winner is run on the largest samples; what fails there is refuted with its figures, and the next one is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.launch.launcher import Exit, Launch
from autotune.note import Note
from autotune.protocol.disk import write_model
from autotune.protocol.jobs import StressJob, TrialJob, read_job
from autotune.protocol.reports import RankReport
from autotune.records.run_spread import RunSpread
from autotune.records.trial import Outcome, TrialResult
from autotune.settings.training_config import TrainingConfig
from autotune.testing import FakeLauncher, FakeTrial, analytic_cost
from autotune.tuning.outcomes import ConfirmationOutcome
from autotune.tuning.selection import select
from tests.factories.searches import (
    GIB,
    NARROW,
    FailingLauncher,
    codes_of,
    confirmed,
    figures_of,
    finals_of,
    finished,
    make_search,
)

FEW: dict[str, Any] = {**NARROW, "n_trials": 6}
"""A short search, where what it finds is not what is asked about."""


def stressed(launcher: FakeLauncher) -> list[TrainingConfig]:
    return [job.config for job in launcher.jobs if job.kind == "stress"]


def overflowing(where: Callable[[TrainingConfig], bool]) -> Callable[[TrainingConfig], FakeTrial]:
    """Samples of which the largest take 20 GiB in some configurations."""

    def cost(config: TrainingConfig) -> FakeTrial:
        trial = analytic_cost(config)
        peak = 20 * GIB if where(config) else None
        return FakeTrial(
            samples_per_s=trial.samples_per_s * (1 + 1e-3 * config.micro_batch_size),
            peak_memory_bytes=trial.peak_memory_bytes,
            stress_peak_bytes=peak,
        )

    return cost


def test_the_winner_is_run_on_the_largest_samples(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    _, chosen = finished(tmp_path, launcher, **FEW)
    assert stressed(launcher) == [chosen.config.model_copy(update={"lr": TrainingConfig().lr})]
    assert chosen.stress is not None
    assert chosen.stress.items_seen == 100


def test_a_winner_that_passes_the_limit_there_is_refuted_and_the_next_is_tried(tmp_path: Path) -> None:
    launcher = FakeLauncher(overflowing(lambda config: config.micro_batch_size >= 256))
    sure, chosen = finished(tmp_path, launcher, n_trials=20)
    tried = stressed(launcher)
    assert len(tried) >= 2
    assert tried[0].micro_batch_size == 256
    refuted = {one.config for one in chosen.confirmations if not one.is_feasible}
    assert refuted >= set(tried[:-1])
    assert chosen.config.micro_batch_size < 256
    assert chosen.number not in sure.overloaded
    over = figures_of(sure.notes, "stress_over_limit")
    assert [one["trial"] for one in over] == list(sure.overloaded)
    assert {(one["own_bytes"], one["limit_bytes"]) for one in over} == {(20 * GIB, 14 * GIB)}


def test_at_most_three_are_tried_and_then_the_baseline_stays(tmp_path: Path) -> None:
    launcher = FakeLauncher(overflowing(lambda config: config != TrainingConfig()))
    sure, chosen = finished(tmp_path, launcher, n_trials=20)
    assert len(stressed(launcher)) == len(sure.overloaded) == 3
    assert (chosen.number, chosen.verdict, chosen.stress) == (0, "already_best", None)
    assert chosen.overloaded == sure.overloaded
    assert figures_of(chosen.reasons, "faster_ones_overloaded") == [{"has_untried": True}]
    (untried,) = figures_of(sure.notes, "stress_not_tried")
    assert not untried["is_recommended"]


def test_where_all_that_is_faster_fails_there_the_baseline_stays_and_the_reason_says_so(tmp_path: Path) -> None:
    space: dict[str, Any] = {"micro_batch_size": [32, 256], "amp_dtype": "float32", "num_workers": 0}
    space |= {"grad_accum_steps": 1, "pin_memory": False, "channels_last": False}
    launcher = FakeLauncher(overflowing(lambda config: config.micro_batch_size > 32))
    sure, chosen = finished(tmp_path, launcher, **space)
    assert len(stressed(launcher)) == len(sure.overloaded) == 1
    assert (chosen.number, chosen.verdict) == (0, "already_best")
    assert figures_of(chosen.reasons, "faster_ones_overloaded") == [{"has_untried": False}]
    assert "stress_not_tried" not in codes_of(sure.notes)


def test_without_a_baseline_that_runs_the_next_is_recommended_and_said_to_be_untried(tmp_path: Path) -> None:
    cost = overflowing(lambda _: True)

    def too_big_today(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(samples_per_s=1.0, peak_memory_bytes=99 * GIB) if config == TrainingConfig() else cost(config)

    launcher = FakeLauncher(too_big_today)
    sure, chosen = finished(tmp_path, launcher, n_trials=20)
    assert len(stressed(launcher)) == 3
    assert (chosen.verdict, chosen.stress) == ("baseline_infeasible", None)
    assert chosen.number not in {0, *sure.overloaded}
    assert figures_of(sure.notes, "stress_not_tried") == [{"trial": chosen.number, "is_recommended": True}]


class OneStressAtAll(FakeLauncher):
    """The time-out comes with the end of the first stress run."""

    now_s = 0.0

    def launch(self, launch: Launch) -> Exit:
        done = FakeLauncher.launch(self, launch)
        if self.jobs[-1].kind == "stress":
            self.now_s = 1e6
        return done


class Ticking(FakeLauncher):
    """Time passes: of each trial and stress run its whole window, and of a trial what it takes beside."""

    now_s = 0.0
    beside_s = 0.0

    def launch(self, launch: Launch) -> Exit:
        done = FakeLauncher.launch(self, launch)
        match self.jobs[-1]:
            case TrialJob(window=window):
                self.now_s += window.max_s + self.beside_s
            case StressJob(train_s=train_s):
                self.now_s += train_s
        return replace(done, wall_s=done.wall_s + self.beside_s)


class RefusingOrdinals(FakeLauncher):
    """The stress runs of these ordinals end in a crash."""

    crashing: frozenset[int] = frozenset()

    def launch(self, launch: Launch) -> Exit:
        done = FakeLauncher.launch(self, launch)
        if self.jobs[-1].kind == "stress" and len(stressed(self)) in self.crashing:
            crash = TrialResult(outcome="crashed", reason="AssertionError: lengths must be sorted")
            write_model(launch.folder.report, RankReport(result=crash))
        return done


def test_what_could_not_be_run_there_after_another_failed_does_not_win(tmp_path: Path) -> None:
    launcher = OneStressAtAll(overflowing(lambda config: config.micro_batch_size >= 256))
    sure, chosen = finished(tmp_path, launcher, n_trials=20, timeout_s=1e5, now=lambda: launcher.now_s)
    assert len(stressed(launcher)) == 1
    assert "stress_no_time" in codes_of(sure.notes)
    assert (chosen.number, chosen.stress) == (0, None)
    assert figures_of(chosen.reasons, "faster_ones_overloaded") == [{"has_untried": True}]


def test_what_passes_there_wins_over_a_faster_one_that_could_not_be_run(tmp_path: Path) -> None:
    class Launcher(RefusingOrdinals):
        crashing = frozenset({2})

    launcher = Launcher(overflowing(lambda config: config.micro_batch_size >= 256))
    space: dict[str, Any] = {"micro_batch_size": [32, 64, 128, 256], "amp_dtype": "float32", "grad_accum_steps": 1}
    space |= {"num_workers": 0, "pin_memory": False, "channels_last": False}
    search = make_search(tmp_path, launcher, method="tpe", **space)  # a model would have two stopped early
    search.time.study.prior_spread = RunSpread(sd=0.01, degrees_of_freedom=3.0)  # else no trial shows a batch's worth
    search.run()
    sure, chosen = confirmed(search)
    assert [config.micro_batch_size for config in stressed(launcher)] == [256, 128, 64]
    assert chosen.config.micro_batch_size == 64
    assert chosen.stress is not None
    assert chosen.is_outrun
    assert figures_of(chosen.reasons, "best_believed") == [
        {"configurations": 4, "is_outrun": True, "leaves_out_larger": False}
    ]
    (failed,) = figures_of(sure.notes, "stress_failed")
    assert failed["reason"].startswith("AssertionError")


@pytest.mark.parametrize("outcome", ["oom", "host_oom"])
def test_running_out_of_memory_there_refutes(tmp_path: Path, outcome: Outcome) -> None:
    launcher = FailingLauncher(failures={"stress": TrialResult(outcome=outcome, reason="no room")})
    sure, chosen = finished(tmp_path, launcher, **FEW)
    assert len(sure.overloaded) == len(stressed(launcher)) >= 1
    assert chosen.number == 0
    assert figures_of(sure.notes, "stress_out_of_memory")[0]["reason"] == "no room"


@pytest.mark.parametrize("outcome", ["timeout", "crashed"])
def test_a_run_that_says_nothing_of_the_memory_refutes_nobody(tmp_path: Path, outcome: Outcome) -> None:
    launcher = FailingLauncher(failures={"stress": TrialResult(outcome=outcome, reason="too long")})
    sure, chosen = finished(tmp_path, launcher, **FEW)
    assert not sure.overloaded
    assert chosen.verdict == "faster"
    assert chosen.stress is None
    assert figures_of(sure.notes, "stress_failed") == [{"trial": chosen.number, "reason": "too long"}]


@pytest.mark.parametrize("is_over", [False, True])
def test_something_faster_that_may_not_be_used_is_no_part_of_the_fastest(tmp_path: Path, is_over: bool) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        faster = 1e6 if config.amp_dtype != "float32" else analytic_cost(config).samples_per_s
        peak = 99 * GIB if is_over and config.amp_dtype != "float32" else GIB
        return FakeTrial(samples_per_s=faster, peak_memory_bytes=peak, passes_guard=config.amp_dtype == "float32")

    _, chosen = finished(tmp_path, FakeLauncher(cost), amp_dtype=["float32", "bfloat16"])
    assert chosen.verdict == "faster"
    assert chosen.is_outrun
    assert all(one["is_outrun"] for one in figures_of(chosen.reasons, "best_believed"))


def test_a_baseline_outrun_by_what_may_not_be_used_is_not_said_to_beat_it(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        is_plain = config.amp_dtype == "float32"
        return FakeTrial(samples_per_s=100.0 if is_plain else 1e6, peak_memory_bytes=GIB, passes_guard=is_plain)

    _, chosen = finished(tmp_path, FakeLauncher(cost, noise=1e-6), amp_dtype=["float32", "bfloat16"])
    assert (chosen.number, chosen.is_outrun) == (0, True)
    (reason,) = figures_of(chosen.reasons, "nothing_beats_baseline")
    assert (reason["configurations"], reason["is_outrun"]) == (12, True)


def test_nothing_is_outrun_where_nothing_faster_was_left_out(tmp_path: Path) -> None:
    _, chosen = finished(tmp_path, FakeLauncher(), **FEW)
    assert not chosen.is_outrun
    assert not any(isinstance(item, Note) and item.figures.get("is_outrun") for item in chosen.reasons)


def test_the_biggest_batch_is_told_after_the_stress_runs_without_what_failed_there(tmp_path: Path) -> None:
    launcher = FakeLauncher(overflowing(lambda config: config.micro_batch_size >= 256))
    space: dict[str, Any] = {"micro_batch_size": [32, 64, 128, 256], "amp_dtype": "float32", "grad_accum_steps": 1}
    sure, chosen = finished(tmp_path, launcher, n_trials=20, method="tpe", **space)
    assert chosen.config.micro_batch_size < 256
    (largest,) = (note for note in sure.notes if isinstance(note, Note) and note.code == "largest_batch_of_limit")
    assert largest.figures["micro_batch_size"] == 128


def test_a_baseline_that_stays_the_best_is_not_run_again(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda _: FakeTrial(samples_per_s=100.0, peak_memory_bytes=GIB), noise=1e-6)
    _, chosen = finished(tmp_path, launcher)
    assert chosen.number == 0
    assert stressed(launcher) == []


def test_without_time_the_run_is_left_out_and_said(tmp_path: Path) -> None:
    moment = [0.0]
    launcher = FakeLauncher()
    search = make_search(tmp_path, launcher, timeout_s=100.0, now=lambda: moment[0], **FEW)
    search.run()
    moment[0] = 99.0
    sure, _ = confirmed(search)
    assert stressed(launcher) == []
    assert "stress_no_time" in codes_of(sure.notes)


def test_a_time_out_leaves_the_run_its_part(tmp_path: Path) -> None:
    launcher = Ticking()
    search = make_search(tmp_path, launcher, timeout_s=60.0, now=lambda: launcher.now_s, **FEW)
    search.run()
    began_s = launcher.now_s
    confirmed(search)
    (stress,) = (job for job in launcher.jobs if job.kind == "stress")
    assert 0.15 * (60 - began_s) < stress.train_s <= 12
    assert stress.process.deadline_s <= 60 - began_s
    assert launcher.now_s <= 60


@pytest.mark.parametrize("beside_s", [2.0, 5.0])
def test_runs_that_take_longer_than_planned_leave_the_stress_run_its_part(tmp_path: Path, beside_s: float) -> None:
    launcher = Ticking()
    search = make_search(tmp_path, launcher, timeout_s=60.0, now=lambda: launcher.now_s, **FEW)
    search.run()
    left_s, launcher.beside_s, before = 60 - launcher.now_s, beside_s, len(launcher.jobs)
    confirmed(search)
    *runs, stress = launcher.jobs[before:]
    windows = [job.window.max_s for job in runs if job.kind == "trial"]
    assert windows == sorted(windows, reverse=True)
    planned = 3 * len({job.config for job in runs})
    assert windows[-1] < windows[0] or len(windows) < planned
    assert stress.kind == "stress"
    assert stress.train_s > 0.12 * left_s


def test_the_first_round_of_every_entrant_shows_where_the_time_goes(tmp_path: Path) -> None:
    _, chosen = finished(tmp_path, FakeLauncher(), **FEW)
    assert len(chosen.confirmations) > 1
    for one in chosen.confirmations:
        first, *later = one.rounds
        assert first is not None
        assert first.breakdown is not None
        assert first.ceilings is not None
        assert first.ceilings.loader is not None
        assert first.ceilings.device is not None
        assert all(run is not None and run.breakdown is None for run in later)


def test_an_interrupted_search_still_recommends_without_what_was_refuted(tmp_path: Path) -> None:
    search = make_search(tmp_path, FakeLauncher(), **FEW)
    search.run()
    sure, chosen = confirmed(search)
    refuted = (one.model_copy(update={"is_feasible": one.number != chosen.number}) for one in sure.confirmations)
    cut_short = replace(sure, is_confirmed=False, is_complete=False, confirmations=tuple(refuted))
    left = select(search.outcome(), cut_short)
    assert left is not None
    assert left.number not in {0, chosen.number}
    assert left.verdict == "unconfirmed"


def test_an_interruption_of_the_stress_run_keeps_the_confirmation(tmp_path: Path) -> None:
    class Interrupting(FakeLauncher):
        def launch(self, launch: Launch) -> Exit:
            if read_job(launch.folder.job).kind == "stress":
                raise KeyboardInterrupt
            return FakeLauncher.launch(self, launch)

    search = make_search(tmp_path, Interrupting(), **FEW)
    search.run()
    finals = finals_of(search)
    with pytest.raises(KeyboardInterrupt):
        finals.run()
    sure = finals.outcome()
    assert (sure.is_confirmed, sure.is_complete) == (True, False)
    chosen = select(search.outcome(), sure)
    assert chosen is not None
    assert (chosen.verdict, chosen.stress) == ("faster", None)
    assert chosen.speedup is not None
    assert "confirmed" in codes_of(chosen.reasons)


def test_without_a_single_round_nothing_is_confirmed(tmp_path: Path) -> None:
    """The time-out leaves nothing; what trials seem to say is not proven, for the baseline neither."""
    moment, launcher = [0.0], FakeLauncher()
    search = make_search(tmp_path, launcher, timeout_s=100.0, now=lambda: moment[0], **FEW)
    found = search.run()
    moment[0] = 100.0
    sure, chosen = confirmed(search)
    assert sure.confirmations == ()
    assert (sure.is_confirmed, chosen.verdict) == (False, "unconfirmed")
    slow = tuple(record for record in found.records if record.number == 0)
    alone = select(replace(found, records=slow), sure)
    assert alone is not None
    assert (alone.number, alone.verdict) == (0, "unconfirmed")


def test_where_nobody_challenges_the_baseline_nothing_is_missing(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(samples_per_s=100.0 if config == TrainingConfig() else 80.0, peak_memory_bytes=GIB)

    sure, chosen = finished(tmp_path, FakeLauncher(cost, noise=0.0))
    assert sure.confirmations == ()
    assert (sure.is_confirmed, sure.is_complete, chosen.verdict) == (True, True, "already_best")


def test_what_is_recommended_follows_from_the_outcomes_alone(tmp_path: Path) -> None:
    search = make_search(tmp_path, FakeLauncher(), **FEW)
    found = search.run()
    sure, chosen = confirmed(search)
    search.study.close()
    assert select(found, sure) == chosen
    before_any_confirmation = select(found, ConfirmationOutcome())
    assert before_any_confirmation is not None
    assert before_any_confirmation.verdict == "unconfirmed"
