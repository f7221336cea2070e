"""What a search lets its parts take: with a time-out and without, one by one and side by side, begun and resumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import pytest

from autotune.config.plan import Budget
from autotune.config.training_config import TrainingConfig
from autotune.messages.search import (
    costs_more_than_it_saves,
    no_time_for_a_trial,
    starts_are_slow,
    training_hours_unused,
)
from autotune.policy import POLICY
from autotune.records.measurement import Block
from autotune.records.result import RunVariation
from autotune.records.trial import Score, TrialRecord, TrialResult, best_of
from autotune.space.space import ResolvedSpace
from autotune.testing import FakeLauncher
from autotune.tuning.study import METHODS, SearchMethod
from autotune.tuning.time_budget import TimeBudget
from tests.factories import make_fake_space, make_measurement, with_first
from tests.factories.searches import make_search

WINDOW_S, OVERHEAD_S = 10.0, 3.0
LIMITS = POLICY.time
SHORTEST_TRIAL_S = OVERHEAD_S + LIMITS.shortest_window_s


@dataclass(slots=True)
class Held:
    """Takes the place of a study: what has run, and what runs."""

    records: list[TrialRecord]
    running: list[TrialRecord] = field(default_factory=list)
    method: SearchMethod = METHODS["model"]
    space: ResolvedSpace = field(default_factory=make_fake_space)
    spread: RunVariation = field(
        default_factory=lambda: RunVariation(sd=0.03, degrees_of_freedom=9.0)
    )

    @property
    def ended(self) -> list[TrialRecord]:
        """They ended in the order in which they are held."""
        return self.records

    @property
    def best(self) -> TrialRecord | None:
        """By the scores that they hold."""
        return best_of(self.records)


def ran(
    number: int, score: float = 1.0, *, feasible: bool = True, startup_s: float = 1.0
) -> TrialRecord:
    measurement = make_measurement(100 * score, startup_s=startup_s)
    result = TrialResult(outcome="ok", measurement=measurement, wall_s=WINDOW_S + OVERHEAD_S)
    score_ = Score(value=score, feasible=feasible)
    return TrialRecord(
        number=number, config=TrainingConfig(num_workers=number), results=(result,), score=score_
    )


@pytest.fixture
def make_budget(tmp_path: Path) -> Any:
    def make(
        records: list[TrialRecord],
        *,
        timeout_s: float | None = None,
        elapsed_s: float = 0.0,
        n_trials: int | None = None,
        slots: int = 1,
    ) -> TimeBudget:
        search = make_search(
            tmp_path,
            FakeLauncher(),
            timeout_s=timeout_s,
            now=lambda: elapsed_s,
            n_trials=n_trials,
            method="random",
        )
        budget = search.time
        running = [
            TrialRecord(number=len(records), config=TrainingConfig())
        ]  # the one that a window is asked for
        budget.study = Held(records, running)  # type: ignore[assignment] # all that is asked of a study here
        budget.slots = lambda: slots
        return budget

    return make


def test_without_a_time_out_nothing_is_short(make_budget: Any) -> None:
    budget = make_budget([ran(0)])
    assert budget.left_for_trials_s == inf
    assert budget.why_over is None
    assert budget.window().precision == 0.03, "no surer than runs differ"
    assert budget.longest_s == inf
    assert budget.sides_s == 12.0
    assert budget.deadline_s(TrialRecord(number=1, config=TrainingConfig())) == 10 * (
        WINDOW_S + OVERHEAD_S
    )
    assert (
        budget.deadline_s(TrialRecord(number=0, config=TrainingConfig()))
        == LIMITS.baseline_deadline_s
    )
    assert budget.guard_deadline_s(TrainingConfig(compile=True)) == 10 * (WINDOW_S + OVERHEAD_S)


def test_a_model_that_is_compiled_for_minutes_gets_minutes(make_budget: Any) -> None:
    budget = make_budget([ran(0)])
    modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    compiled = [
        budget.usual_deadline_s(TrainingConfig(compile=True, compile_mode=mode)) for mode in modes
    ]
    assert compiled[:2] == [10 * (WINDOW_S + OVERHEAD_S)] * 2
    assert compiled[2] == compiled[3] == LIMITS.baseline_deadline_s


def test_a_workload_that_starts_slowly_gets_longer_for_its_sides(make_budget: Any) -> None:
    slow = ran(0, startup_s=40.0)
    assert make_budget([slow]).sides_s == 160.0
    assert make_budget([slow], timeout_s=100.0, elapsed_s=10.0).sides_s == pytest.approx(
        0.15 * 65.0
    )


@pytest.mark.parametrize(
    ("slots", "left_s"), [(1, 60.0 - 13.0 - 2 * SHORTEST_TRIAL_S), (2, 0.75 * 60.0 - 13.0)]
)
def test_one_by_one_trials_may_go_on_until_the_time_for_two_short_runs(
    make_budget: Any, slots: int, left_s: float
) -> None:
    budget = make_budget([ran(0)], timeout_s=60.0, elapsed_s=13.0, n_trials=11, slots=slots)
    assert budget.left_for_trials_s == pytest.approx(left_s)


def noisy(number: int, block_sd: float) -> TrialRecord:
    """Build a trial of 50 blocks of 0.2 s, whose rates differ by a share; its start took 3 s."""
    blocks = tuple(
        Block(
            samples=round(1000 * (1 + block_sd * (-1) ** (place // 5))),
            batches=1,
            seconds=0.2,
            data_wait_s=0.0,
        )
        for place in range(50)
    )
    trial = ran(number)
    assert trial.measurement is not None
    window = trial.measurement.window.model_copy(update={"blocks": blocks})
    measurement = trial.measurement.model_copy(update={"window": window})
    return with_first(trial, measurement=measurement)


def test_a_window_is_as_long_as_its_own_error_is_worth(make_budget: Any) -> None:
    steady, restless, pausing = (
        make_budget([noisy(0, sd)]).window().max_s for sd in (0.001, 0.05, 0.9)
    )
    assert steady == LIMITS.shortest_window_s
    assert steady < restless < pausing == 6.0


@pytest.mark.parametrize("elapsed_s", [0.0, 20.0, 50.0])
def test_a_window_shrinks_with_the_time_that_is_left(make_budget: Any, elapsed_s: float) -> None:
    budget = make_budget([noisy(0, 0.9), noisy(1, 0.9)], timeout_s=60.0, elapsed_s=elapsed_s)
    left_s = budget.left_for_trials_s
    assert budget.window().max_s == pytest.approx(
        max(LIMITS.shortest_window_s, min(6.0, left_s / 3 - OVERHEAD_S))
    )


@pytest.mark.parametrize(
    ("records", "has_something_to_decide"),
    [
        ([ran(0)], False),
        ([ran(0), ran(1, 0.5)], False),
        ([ran(0), ran(1, 2.0)], True),
        ([ran(0, feasible=False)], False),
        ([ran(0, feasible=False), ran(1, 2.0, feasible=False)], False),
        ([ran(0, feasible=False), ran(1, 0.5)], True),
    ],
)
def test_time_to_decide_is_kept_where_something_is_to_be_decided(
    make_budget: Any, records: list[TrialRecord], has_something_to_decide: bool
) -> None:
    budget = make_budget(records, timeout_s=60.0, elapsed_s=13.0)
    left_s = 0.75 * 60.0 - 13.0 if has_something_to_decide else 60.0 - 13.0 - 2 * SHORTEST_TRIAL_S
    assert budget.left_for_trials_s == pytest.approx(left_s)


@pytest.mark.parametrize(
    ("elapsed_s", "deadline_s"),
    [(4.0, 18.0), (24.0, 8.0), (36.0, 2.0), (39.5, 1.0), (50.0, 1.0)],
)
def test_the_guard_may_use_half_of_what_is_left_in_all(
    make_budget: Any, elapsed_s: float, deadline_s: float
) -> None:
    budget = make_budget([ran(0), ran(1, 2.0)], timeout_s=40.0, elapsed_s=elapsed_s)
    config = TrainingConfig(amp_dtype="bfloat16")
    assert budget.guard_deadline_s(config) == pytest.approx(deadline_s)


@pytest.mark.parametrize(
    ("elapsed_s", "has_room", "deadline_s"),
    [(20.0, True, 10.0), (26.0, False, 4.0), (29.5, False, 1.0)],
)
def test_a_trial_ends_where_deciding_begins(
    make_budget: Any, elapsed_s: float, has_room: bool, deadline_s: float
) -> None:
    budget = make_budget([ran(0), ran(1, 2.0)], timeout_s=40.0, elapsed_s=elapsed_s)
    assert budget.why_over == (None if has_room else no_time_for_a_trial(timeout_s=40.0))
    assert budget.deadline_s(TrialRecord(number=2, config=TrainingConfig())) == pytest.approx(
        deadline_s
    )


@pytest.mark.parametrize(
    ("timeout_s", "deadline_s"), [(10.0, 20.0), (100.0, 75.0), (2000.0, LIMITS.baseline_deadline_s)]
)
def test_the_baseline_always_gets_its_chance(
    make_budget: Any, timeout_s: float, deadline_s: float
) -> None:
    budget = make_budget([], timeout_s=timeout_s)
    assert budget.deadline_s(TrialRecord(number=0, config=TrainingConfig())) == pytest.approx(
        deadline_s
    )


def test_where_starts_are_slow_a_deadline_leaves_room_for_a_build(make_budget: Any) -> None:
    config = TrainingConfig(num_workers=1)
    quick, slow = make_budget([ran(0)]), make_budget([ran(0)])
    slow.build_s = 300.0
    assert slow.usual_deadline_s(config) == quick.usual_deadline_s(config) + 600.0
    assert slow.repeat_deadline_s(ran(1)) == quick.repeat_deadline_s(ran(1)) + 600.0


def test_a_brief_search_has_short_windows_and_a_time_for_its_trials(make_budget: Any) -> None:
    for elapsed_s, ends in ((120.0, False), (122.0, True)):
        budget = make_budget([ran(number) for number in range(3)], elapsed_s=elapsed_s)
        budget.build_s, budget.probe_s = 60.0, 1.0
        assert budget.is_short_search
        assert budget.window().max_s == 4.0
        assert (budget.why_short_search_is_over is not None) == ends
        if ends:
            assert budget.why_short_search_is_over == starts_are_slow(trials_s=120.0, build_s=60.0)


def test_a_brief_search_tries_something_however_long_its_baseline_took(make_budget: Any) -> None:
    for records in (
        [ran(0)],
        [ran(0), ran(1)],
        [ran(number, feasible=False) for number in range(9)],
    ):
        budget = make_budget(records, elapsed_s=1000.0)
        budget.build_s = 60.0
        assert budget.why_short_search_is_over is None


def test_a_brief_search_promises_what_it_may_take(make_budget: Any) -> None:
    budget = make_budget([ran(0)], elapsed_s=20.0)
    budget.build_s, budget.probe_s = 60.0, 10.0
    assert budget.remaining_s(has_model=True) <= 110.0 + 60.0 + 30.0


def test_a_time_out_keeps_the_builds_of_the_last_runs(make_budget: Any) -> None:
    quick, slow = (make_budget([ran(0)], timeout_s=600.0, elapsed_s=100.0) for _ in range(2))
    slow.build_s = 20.0
    assert quick.left_for_trials_s - slow.left_for_trials_s == 40.0


def test_a_search_that_visits_all_is_not_brief(make_budget: Any) -> None:
    budget = make_budget([ran(0)])
    budget.build_s, budget.study.method = 60.0, METHODS["grid"]
    assert not budget.is_short_search


@pytest.mark.parametrize("limit", [{"n_trials": 5}, {"timeout_s": 3600.0}, {}])
def test_a_search_with_a_limit_of_its_own_is_not_brief(
    make_budget: Any, limit: dict[str, Any]
) -> None:
    budget = make_budget([ran(0)], elapsed_s=1000.0, **limit)
    budget.build_s = 60.0 if limit else 9.9
    assert not budget.is_short_search
    assert budget.why_short_search_is_over is None
    assert [one.code for one in budget.notes(has_shared=True)] == ["trials_shared"]


def test_hours_of_training_that_nothing_can_use_are_told(make_budget: Any) -> None:
    budget = make_budget([ran(0)])
    budget.budget = Budget(n_trials=5, training_hours=8.0)
    assert list(budget.notes(has_shared=True)) == [training_hours_unused(training_hours=8.0)]


def test_a_trial_must_bring_more_of_the_training_to_come_than_it_takes(make_budget: Any) -> None:
    budget = make_budget([ran(0)])
    assert budget.budget.training_s == 24 * 3600
    assert budget.why_too_dear(0.01) is None
    budget.budget = Budget(training_hours=0.1)
    assert budget.why_too_dear(0.05) is None
    dear = budget.why_too_dear(0.01)
    assert dear == costs_more_than_it_saves(
        trial_s=WINDOW_S + OVERHEAD_S, gain_s=3.6, training_s=360.0
    )
