"""The course of a search that a model of the machine guides: its look, trials stopped early or run at once,
and that it goes on; and what other methods do instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any, get_args

import pytest

import autotune
from autotune.config.plan import Method
from autotune.config.training_config import TrainingConfig
from autotune.messages.search import (
    one_side_not_measured,
    sides_not_measured,
    would_add_nothing,
)
from autotune.models.evidence import luck_of
from autotune.models.statistics import mean_rate
from autotune.policy import POLICY
from autotune.protocol.messages import Job, WorkloadJob
from autotune.records.ceilings import device_key
from autotune.records.result import Progress
from autotune.records.trial import Failure, TrialRecord, TrialResult
from autotune.space.space import compose
from autotune.testing import CostModel, FakeLauncher, FakeTrial, analytic_cost
from autotune.tuning.proposals import first_guesses
from autotune.tuning.proposer import tried_in
from tests.factories.searches import GIB, FailingLauncher, Interrupting, fake_search, make_search
from tests.tuning.guided import (
    LIMIT,
    SMALL,
    composed,
    curves_of,
    guided,
    joined,
    memory_cliff,
    sides,
    slow_device,
    until_near,
)

# One look


def test_one_look_at_either_side_alone_comes_right_after_the_baseline(tmp_path: Path) -> None:
    search = guided(tmp_path, analytic_cost, **SMALL)
    launcher = search.runner.launcher
    assert isinstance(launcher, FakeLauncher)
    assert [job.kind for job in launcher.jobs[:3]] == ["trial", "curves", "trial"]
    (look,) = curves_of(search)
    assert look.config == search.space.baseline
    assert {one.micro_batch_size for one in look.variations} == {16, 32, 128}, (
        "the ends: eight workers are too slow"
    )
    assert {one.num_workers for one in look.variations} == {0, 2, 4, 8}


@pytest.mark.parametrize(("device", "is_looked_at"), [(100.0, True), (1.0, False)])
def test_a_loader_that_no_step_could_keep_up_with_is_not_looked_at(
    tmp_path: Path, device: float, is_looked_at: bool
) -> None:
    """Batches may grow four times, and precision give eight times: 32 times the device's rate is within reach."""

    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(
            samples_per_s=device,
            peak_memory_bytes=GIB,
            loader_ceiling=1000.0,
            device_ceiling=device,
        )

    (look,) = curves_of(guided(tmp_path, cost, **SMALL))
    assert ({one.num_workers for one in look.variations} != {0}) == is_looked_at
    assert {one.micro_batch_size for one in look.variations} == {16, 32, 64, 128}


def test_a_look_begins_with_what_costs_no_more_than_the_own_batch(tmp_path: Path) -> None:
    (look,) = curves_of(guided(tmp_path, analytic_cost, **SMALL))
    own = [one.micro_batch_size for one in look.variations if one.num_workers == 0]
    assert own == sorted(own, key=lambda batch: (batch < 32, abs(batch - 32)))


def test_a_look_that_fails_is_noted_and_an_experts_guesses_are_tried_instead(
    tmp_path: Path,
) -> None:
    launcher = FailingLauncher(
        failures={"curves": TrialResult(outcome="timeout", reason="too long")}
    )
    search = make_search(tmp_path, launcher, n_trials=10)
    search.run()
    assert search.notes[0] == sides_not_measured(reason="too long")
    guesses = [compose(guess, search.space) for guess in first_guesses(search.space)]
    assert [one.config for one in search.study.records[1 : 1 + len(guesses)]] == guesses
    assert len(curves_of(search)) == 1
    assert len(search.study.records) == 10


def test_a_look_that_shows_nothing_is_noted_with_what_kept_it(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(samples_per_s=100.0 + config.num_workers, peak_memory_bytes=GIB)

    search = make_search(tmp_path, FakeLauncher(cost), n_trials=12)
    search.run()
    assert search.notes[0].code == "sides_not_measured"
    assert search.notes[0].figures["reason"]
    assert search.best is not None
    assert search.best.config.num_workers == 8


def test_side_not_measured_is_noted(
    tmp_path: Path,
) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return replace(analytic_cost(config), device_ceiling=None, busy_fraction=1.0)

    search = make_search(tmp_path, FakeLauncher(cost), n_trials=4, **SMALL)
    search.run()
    reason = "the cost model does not say"
    assert search.notes[0] == one_side_not_measured(side="device", reason=reason)
    assert search.proposer.has_model
    assert len(search.study.records) == 4


def test_a_look_takes_no_more_than_its_share_of_the_time(tmp_path: Path) -> None:
    timed = make_search(tmp_path / "timed", FakeLauncher(), timeout_s=100.0, n_trials=2, **SMALL)
    free = make_search(tmp_path / "free", FakeLauncher(), n_trials=2, **SMALL)
    for search in (timed, free):
        search.run()
    assert [job.process.deadline_s for job in curves_of(timed)] == [pytest.approx(0.15 * 75.0)]
    assert [job.process.deadline_s for job in curves_of(free)] == [12.0]


def test_what_was_left_out_promises_no_gain(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        is_plain = config.amp_dtype == "float32"
        device = sides(config)[1] * (1 if is_plain else 100)
        return replace(
            joined(config, loader=1e6, device=device, peak_bytes=GIB), passes_guard=is_plain
        )

    shown: list[Progress] = []
    search = make_search(tmp_path, FakeLauncher(cost), n_trials=8, **SMALL)
    search.show = shown.append
    search.run()
    assert any(record.outcome == "diverged" for record in search.study.records)
    told = shown[-1]
    plain = max(
        cost(config).samples_per_s for config in composed(search) if config.amp_dtype == "float32"
    )
    assert told.can_win is not None
    assert told.best is not None
    assert 1 + told.can_win < 2 * plain / cost(told.best.config).samples_per_s


# What was not expected


def trapped(rate: float) -> CostModel:
    """Eight workers should be the fastest, as either side alone shows, but reach this rate together."""

    def cost(config: TrainingConfig) -> FakeTrial:
        trial = analytic_cost(config)
        return replace(trial, samples_per_s=rate) if config.num_workers == 8 else trial

    return cost


@pytest.mark.parametrize(("rate", "outcome"), [(300.0, "pruned"), (1200.0, "ok")])
def test_unexpected_trial_is_followed_by_a_proposal(
    tmp_path: Path, rate: float, outcome: str
) -> None:
    search = guided(tmp_path, trapped(rate), n_trials=2, **SMALL)
    last = search.study.ended[-1]
    assert (last.config.num_workers, last.outcome) == (8, outcome)
    search.proposer.propose(search.best)
    assert search.study.has_waiting


def test_what_the_sampler_finds_is_taken_for_too_large_where_the_memory_ends(
    tmp_path: Path,
) -> None:
    search = guided(tmp_path, memory_cliff, **{**SMALL, "micro_batch_size": [16, 32, 64, 128, 256]})
    for config in composed(search):
        fits = memory_cliff(config).peak_memory_bytes <= LIMIT
        reason = search.proposer.skip(config)
        assert (reason is not None and reason.code == "would_not_fit") == (not fits)


def test_redundant_sample_is_skipped(
    tmp_path: Path,
) -> None:
    search = guided(tmp_path, slow_device, n_trials=6, **SMALL)
    assert search.proposer.outlook(search.best) is not None
    seen = {device_key(config) for config in tried_in(search.study) if config.num_workers}
    open_ones = [one for one in composed(search) if one.num_workers and search.study.is_open(one)]
    reasons = [(device_key(one) in seen, search.proposer.skip(one)) for one in open_ones]
    assert {is_seen for is_seen, _ in reasons} == {True, False}
    assert all(reason == (would_add_nothing() if is_seen else None) for is_seen, reason in reasons)


def test_failure_is_not_tried_again(
    tmp_path: Path,
) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        trial = analytic_cost(config)
        is_bad = config.micro_batch_size > 32 and config.num_workers > 4
        failure = Failure(
            signature=f"ValueError at net.py:{config.micro_batch_size}", traceback="ValueError"
        )
        return (
            FakeTrial(outcome="crashed", reason="ValueError", failure=failure) if is_bad else trial
        )

    search = guided(tmp_path, cost, n_trials=8)
    failed = [one.config for one in search.study.records if one.outcome == "crashed"]
    assert len(failed) >= 1
    assert len({(one.micro_batch_size, one.num_workers) for one in failed}) >= len(failed) - 1
    assert until_near(search, lambda config: replace(cost(config), peak_memory_bytes=GIB)) <= 8


# Trials that are stopped early


def test_stopped_trial_in_optuna(
    tmp_path: Path,
) -> None:
    search = guided(tmp_path, trapped(300.0), n_trials=4, **SMALL)
    stopped = [one for one in search.study.records if one.outcome == "pruned"]
    assert stopped
    baseline = search.study.records[0].measurement
    assert baseline is not None
    for record in stopped:
        trial = search.study.optuna_study.trials[record.number]
        blocks, relative = (
            record.result.blocks,
            mean_rate(record.result.blocks)[0] / baseline.samples_per_s,
        )
        assert trial.state.name == "PRUNED"
        assert trial.intermediate_values == {len(blocks): pytest.approx(relative)}
        assert 2 <= len(blocks) < 10, "two of the warm-up, or three of the window"
        assert record.reason.startswith("stopped early:")
        assert record.score is None


def test_the_baseline_and_the_confirmation_are_measured_to_their_end(tmp_path: Path) -> None:
    launcher = FakeLauncher(trapped(300.0))
    result = fake_search(tmp_path, launcher=launcher, n_trials=5, space=SMALL)
    jobs = [job for job in launcher.jobs if job.kind == "trial"]
    assert len(jobs) > len(result.trials)
    assert [job.streams_blocks for job in jobs] == [False, *[True] * 4, *[False] * (len(jobs) - 5)]


@pytest.mark.parametrize(("micro_batch_size", "bar"), [(32, 2), (64, 1), (128, 1)])
def test_at_the_users_own_batch_a_trial_races_against_those_at_it_alone(
    tmp_path: Path, micro_batch_size: int, bar: int
) -> None:
    rates = {(32, 0): 100.0, (64, 2): 900.0, (32, 4): 500.0}

    def cost(config: TrainingConfig) -> FakeTrial:
        rate = rates.get((config.micro_batch_size, config.num_workers), 1.0)
        return FakeTrial(samples_per_s=rate, peak_memory_bytes=GIB)

    search = make_search(
        tmp_path, FakeLauncher(cost, noise=1e-6), n_trials=3, **{**SMALL, "amp_dtype": "float32"}
    )
    for micro, workers in [(64, 2), (32, 4)]:
        search.study.propose({"micro_batch_size": micro, "num_workers": workers})
    search.run()
    asked = TrialRecord(
        number=9, config=TrainingConfig(micro_batch_size=micro_batch_size, num_workers=8)
    )
    found = search.proposer.pruning_threshold(asked)
    assert found is not None
    assert found.number == bar
    spread = search.study.spread
    rate, luck = (
        [900.0, 500.0][bar - 1],
        luck_of(spread.of([True]), spread, POLICY.stopping),
    )  # the made-up device is always busy
    assert found.low_samples_per_s == pytest.approx(rate * exp(-luck), rel=0.05)


# Several at once, and a search that goes on


@pytest.mark.parametrize(("n_trials", "seed"), [(12, 0), (None, 1)])
def test_three_trials_at_once_are_guided_as_one_is(
    tmp_path: Path, n_trials: int | None, seed: int
) -> None:
    search = make_search(
        tmp_path, FakeLauncher(memory_cliff, slots=3, seed=seed), n_trials=n_trials, **SMALL
    )
    search.time.slots = lambda: 3
    search.run()
    records = search.study.records
    assert len({one.config for one in records}) == len(records)
    assert len(records) == n_trials or (n_trials is None and len(records) < 20)
    assert {one.outcome for one in records} <= {"ok", "pruned"}
    assert len(curves_of(search)) == 1
    assert until_near(search, memory_cliff) <= 8


def resumed(
    folder: Path, at: Callable[[Job, int], bool], **arguments: Any
) -> tuple[autotune.SearchResult, Sequence[WorkloadJob]]:
    """A search that was interrupted and called again: its result, and the jobs of the second call."""
    interrupting, launcher = (
        Interrupting(memory_cliff, at=at),
        FakeLauncher(memory_cliff, seed=1),
    )
    arguments = {
        "progress": False,
        "run_dir": folder / "run",
        "space": SMALL,
        "memory_limit": LIMIT,
        **arguments,
    }
    with pytest.raises(KeyboardInterrupt):
        autotune.search(object, list, launcher=interrupting, **arguments)
    return autotune.search(object, list, launcher=launcher, **arguments), launcher.jobs


@pytest.mark.slow
@pytest.mark.parametrize("n_trials", [9, None])
def test_an_interrupted_search_goes_on_with_what_its_look_has_shown(
    tmp_path: Path, n_trials: int | None
) -> None:
    result, jobs = resumed(
        tmp_path, lambda job, launched: job.kind == "trial" and launched == 2, n_trials=n_trials
    )
    assert "curves" not in {job.kind for job in jobs}
    assert jobs[0].config == result.trials[2].config, "what was interrupted is run first"
    assert len({one.config for one in result.trials}) == len(result.trials)
    assert len(result.trials) == n_trials or n_trials is None
    assert {one.outcome for one in result.trials} <= {"ok", "pruned"}
    assert any(job.kind == "trial" and job.streams_blocks for job in jobs)
    assert result.best.micro_batch_size == 128


def test_a_look_that_was_interrupted_is_taken_by_the_next_call(tmp_path: Path) -> None:
    result, jobs = resumed(tmp_path, lambda job, launched: job.kind == "curves", n_trials=4)
    assert jobs[0].kind == "curves"
    assert len(result.trials) == 4


# The other methods


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted({*get_args(Method)} - {"model"}))
def test_with_a_sampler_of_optunas_nothing_is_looked_at_or_stopped_early(
    tmp_path: Path, method: Method
) -> None:
    launcher = FakeLauncher()
    result = fake_search(tmp_path, launcher=launcher, n_trials=6, space=SMALL, method=method)
    assert len(result.trials) == 6
    assert {one.outcome for one in result.trials} == {"ok"}
    assert not any(
        job.kind == "curves" or (job.kind == "trial" and job.streams_blocks)
        for job in launcher.jobs
    )
    assert result.speedup is not None
    assert result.speedup > 3
