"""No configuration of a cheaper precision wins without a comparison to float32, made once for each precision."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.records.trial import Outcome, TrialResult, guard_key, needs_guard
from autotune.testing import FakeLauncher, FakeTrial, analytic_cost
from autotune.tuning.checks import PrecisionGuard
from autotune.tuning.loop import Search
from tests.factories import with_first
from tests.factories.searches import (
    FIXED,
    GIB,
    NARROW,
    FailingLauncher,
    codes_of,
    confirmed,
    fake_search,
    figures_of,
    make_search,
)


def breaking(*dtypes: str) -> Any:
    """The analytic machine, on which the loss becomes infinite in some precisions, which are by far the fastest."""

    def cost(config: TrainingConfig) -> FakeTrial:
        if config.amp_dtype not in dtypes:
            return analytic_cost(config)
        return FakeTrial(samples_per_s=5e4, peak_memory_bytes=GIB, passes_guard=False)

    return cost


def guards(launcher: FakeLauncher) -> list[TrainingConfig]:
    return [job.config for job in launcher.jobs if job.kind == "guard"]


def searched(folder: Path, launcher: FakeLauncher, **arguments: Any) -> Search:
    """A search by random draws, which compares precisions as any other does, and thinks for no time."""
    search = make_search(folder, launcher, **{**NARROW, "method": "random", **arguments})
    search.run()
    return search


def test_a_precision_that_breaks_is_told_as_diverged_with_its_figures(tmp_path: Path) -> None:
    search = searched(tmp_path, FakeLauncher(breaking("bfloat16")), n_trials=16)
    refused = [record for record in search.study.records if record.is_refused]
    assert [(one.outcome, one.config.amp_dtype) for one in refused] == [("diverged", "bfloat16")]
    (one,) = refused
    assert one.result.guard is not None
    assert one.reason.startswith("precision guard:")
    assert one.measurement is not None, "what was measured stays"
    assert one.score is None
    assert not one.is_feasible


def test_a_refused_precision_is_not_tried_again_and_said_so_once(tmp_path: Path) -> None:
    search = searched(tmp_path, FakeLauncher(breaking("bfloat16", "float16", "tf32")), n_trials=24)
    tried = Counter(record.config.amp_dtype for record in search.study.records)
    assert {tried[dtype] for dtype in ("bfloat16", "float16", "tf32")} == {1}
    assert len(search.study.records) == 24
    left_out = [one["amp_dtype"] for one in figures_of(search.notes, "precision_left_out")]
    assert sorted(left_out) == ["bfloat16", "float16", "tf32"]


def test_a_precision_is_compared_once_at_the_users_batch_without_workers(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    searched(
        tmp_path,
        launcher,
        n_trials=30,
        compile=[False, True],
        baseline=TrainingConfig(micro_batch_size=16),
    )
    compared = guards(launcher)
    assert compared
    assert max(Counter(guard_key(config) for config in compared).values()) == 1
    assert {(one.micro_batch_size, one.grad_accum_steps, one.num_workers) for one in compared} == {
        (16, 1, 0)
    }


def test_a_precision_that_never_leads_is_not_compared(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(
            samples_per_s=100 if config.amp_dtype == "float32" else 50, peak_memory_bytes=GIB
        )

    launcher = FakeLauncher(cost)
    search = searched(tmp_path, launcher, n_trials=10)
    assert len({record.config.amp_dtype for record in search.study.records}) > 1
    assert guards(launcher) == []


@pytest.mark.parametrize("seed", range(2))
def test_what_is_recommended_was_compared_before(tmp_path: Path, seed: int) -> None:
    search = searched(
        tmp_path, FakeLauncher(breaking("float16"), seed=seed, noise=0.2), n_trials=14
    )
    passed = {
        guard_key(one.config)
        for one in search.study.records
        if one.result.guard and one.is_feasible
    }
    _, chosen = confirmed(search)
    assert (
        not needs_guard(chosen.config, search.space.baseline) or guard_key(chosen.config) in passed
    )


def test_what_the_user_runs_today_is_not_compared(tmp_path: Path) -> None:
    launcher = FakeLauncher(breaking("bfloat16"))
    search = searched(tmp_path, launcher, baseline=TrainingConfig(amp_dtype="bfloat16"), n_trials=8)
    assert "bfloat16" not in {config.amp_dtype for config in guards(launcher)}
    assert search.study.records[0].is_feasible


def test_a_trial_over_the_memory_limit_is_not_compared(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(
            samples_per_s=100, peak_memory_bytes=GIB if config.amp_dtype == "float32" else 99 * GIB
        )

    launcher = FakeLauncher(cost)
    searched(tmp_path, launcher)
    assert guards(launcher) == []


@pytest.mark.parametrize("outcome", ["timeout", "crashed", "oom"])
def test_a_guard_that_could_not_run_lets_nobody_win(tmp_path: Path, outcome: Outcome) -> None:
    failure = TrialResult(outcome=outcome, reason="it went wrong")
    search = searched(tmp_path, FailingLauncher(failures={"guard": failure}), n_trials=16)
    refused = [record for record in search.study.records if record.is_refused]
    assert {one.outcome for one in refused} == {outcome}
    assert all(one.reason.startswith("precision guard could not run:") for one in refused)
    assert {one.config.amp_dtype for one in search.study.records if one.is_feasible} == {"float32"}


def test_answers_survive_a_resume(tmp_path: Path) -> None:
    first = searched(tmp_path, FakeLauncher(breaking("bfloat16")), n_trials=12, is_kept=True)
    known = {guard_key(one.config) for one in first.study.records if one.result.guard}
    first.study.close()
    launcher = FakeLauncher(breaking("bfloat16"))
    search = searched(tmp_path, launcher, n_trials=20, is_kept=True)
    assert not {guard_key(config) for config in guards(launcher)} & known
    assert "bfloat16" not in {config.amp_dtype for config in launcher.launched}
    assert [one["amp_dtype"] for one in figures_of(search.notes, "precision_left_out")] == [
        "bfloat16"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["timeout", "oom"])
def test_a_comparison_that_could_not_run_is_made_up_for_after_a_resume(
    tmp_path: Path, outcome: Outcome
) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(
            samples_per_s=5e4 if config.amp_dtype == "bfloat16" else 1e4, peak_memory_bytes=GIB
        )

    failing = FailingLauncher(
        cost, failures={"guard": TrialResult(outcome=outcome, reason="it went wrong")}
    )
    how: dict[str, Any] = {"is_kept": True, "amp_dtype": ["float32", "bfloat16"], "method": "model"}
    first = searched(tmp_path, failing, n_trials=8, **how)
    refused = {one.number for one in first.study.records if one.is_refused}
    assert refused
    first.study.close()
    launcher = FakeLauncher(cost)
    search = searched(tmp_path, launcher, n_trials=12, **how)
    assert [config.amp_dtype for config in guards(launcher)] == ["bfloat16"]
    assert any(
        one.is_feasible and one.config.amp_dtype == "bfloat16" for one in search.study.records
    )
    assert {one.number for one in search.study.records if one.is_refused} == refused
    assert "precision_left_out" not in codes_of(search.notes)


def test_answers_recalled(tmp_path: Path) -> None:
    search = searched(tmp_path, FakeLauncher(breaking("bfloat16")), n_trials=12)
    (refused,) = (one for one in search.study.records if one.is_refused)
    guard = PrecisionGuard(make_search(tmp_path, FakeLauncher()).runner, TrainingConfig())
    guard.recall(with_first(refused, outcome="timeout"))
    half = TrainingConfig(amp_dtype="bfloat16", num_workers=3)
    assert guard.known(half) is None, "too few steps are no answer"
    guard.recall(refused)
    answer = guard.known(half)
    assert answer is not None
    assert answer.outcome == "diverged"


def test_an_exhausted_search_without_a_refused_precision_is_finished(tmp_path: Path) -> None:
    space = {**FIXED, "amp_dtype": ["float32", "bfloat16"], "num_workers": [0, 4]}
    first = fake_search(tmp_path, breaking("bfloat16"), space=space, n_trials=30)
    assert [trial.outcome for trial in first.trials].count("diverged") == 1
    assert len(first.trials) == 3
    launcher = FakeLauncher()
    again = fake_search(tmp_path, launcher=launcher, space=space, n_trials=30)
    assert again.summary == first.summary
    assert launcher.jobs == []


def test_the_guards_deadline_ends_before_the_time_out(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    searched(tmp_path, launcher, n_trials=10, timeout_s=40.0)
    deadlines = [job.process.deadline_s for job in launcher.jobs if job.kind == "guard"]
    assert deadlines
    assert max(deadlines) <= 40
