"""Searches with little time: many short trials instead of few long ones, and nothing of the time is left unused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.launch.launcher import Exit, Launch
from autotune.messages.search import no_time_for_a_trial
from autotune.models.time_estimate import first_batches_s
from autotune.policy import POLICY
from autotune.testing import FakeLauncher, FakeTrial, analytic_cost
from tests.factories.searches import GIB, make_search


@dataclass(slots=True)
class TickingLauncher(FakeLauncher):
    """Moves a clock on by what its trials take."""

    now_s: float = 0.0

    def launch(self, launch: Launch) -> Exit:
        """Answer, and let the time pass."""
        exit_ = FakeLauncher.launch(self, launch)
        self.now_s += exit_.wall_s
        return exit_


@pytest.mark.parametrize("best_is_found", [False, True])
def test_the_time_to_decide_is_for_trials_while_there_is_nothing_to_decide(
    tmp_path: Path, best_is_found: bool
) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        rate = 100.0 if config == TrainingConfig() else 200.0 if best_is_found else 50.0
        return FakeTrial(samples_per_s=rate, peak_memory_bytes=GIB, startup_s=3.0)

    launcher = TickingLauncher(cost)
    search = make_search(
        tmp_path,
        launcher,
        n_trials=None,
        timeout_s=60.0,
        now=lambda: launcher.now_s,
        method="random",
    )
    search.run()
    assert search.ended_because == no_time_for_a_trial(timeout_s=60.0)
    (trial_s,) = {round(record.result.wall_s, 6) for record in search.study.records}
    last_s = max(record.result.at_s for record in search.study.records)
    for_trials_s = 0.75 * 60.0 if best_is_found else 60.0
    assert for_trials_s - 2 * trial_s <= last_s <= for_trials_s
    assert launcher.now_s <= 60.0


@pytest.mark.slow
def test_what_takes_long_to_measure_is_not_proposed_where_time_is_short(tmp_path: Path) -> None:
    """Eight workers are the fastest, but making their first batches takes more than the time-out has."""

    def slow(config: TrainingConfig) -> FakeTrial:
        trial = analytic_cost(config)
        sides = {
            name: side / 50.0
            for name in ("samples_per_s", "loader_ceiling", "device_ceiling")
            if (side := getattr(trial, name)) is not None
        }
        return replace(trial, **sides)

    def longest_wait_s(timeout_s: float | None) -> float:
        launcher = TickingLauncher(slow)
        folder = tmp_path / f"{timeout_s}"
        search = make_search(
            folder, launcher, n_trials=12, timeout_s=timeout_s, now=lambda: launcher.now_s
        )
        search.run()
        proposed = [
            record.config for record in search.study.records[1:3]
        ]  # the last ones are no longer the model's
        assert proposed
        return max(
            first_batches_s(one, slow(one).samples_per_s, None, POLICY.estimates)
            for one in proposed
        )

    assert longest_wait_s(30.0) < 7.0, (
        "of the 22 s for trials one may need 0.3, as far as the model tells"
    )
