"""Searches of an ordinary job with a process for each trial and with a shared one, and what is told of both."""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import Any

import pytest

from autotune.launch.runner import TrialRunner
from autotune.policy import WindowRules
from benchmarks.replay.landscapes import LANDSCAPES
from benchmarks.replay.methods import METHODS, Course
from benchmarks.replay.shared_process import SlowGround, Straying
from benchmarks.shared_trials import strayings_in, told_of

GROUND = LANDSCAPES["cliff_and_limit, 1.5 %"]


def searched(*, shares: bool) -> Course:
    """A search where each process takes 5 s to build, and trials 0.5 s to start."""
    straying = Straying(bias=0.0, spread=0.0)
    return METHODS["autotune"](
        SlowGround(GROUND, lambda _: 0.5, 5.0, shares=shares, straying=straying), 0
    )


def regret_of(course: Course) -> float:
    rates = GROUND.truth.rates
    return 1 - rates[course.recommended] / rates[GROUND.truth.best]


def test_a_shared_process_spares_a_build_for_most_trials() -> None:
    own, shared = searched(shares=False), searched(shares=True)
    spared = own.spent_s["trial"] / own.trials - shared.spent_s["trial"] / shared.trials
    assert 2.0 < spared < 5.5, "all but those of repeats"
    assert shared.whole_s < own.whole_s
    assert regret_of(shared) < 0.05


def test_a_trial_after_others_takes_no_start_and_strays_by_what_belongs_to_its_settings(
    tmp_path: Path,
) -> None:
    straying = Straying(bias=-0.5, spread=0.0, memory=1.2)
    launcher = SlowGround(GROUND, lambda _: 0.5, 5.0, shares=True, straying=straying).launcher(0)
    folder: dict[str, Any] = dict.fromkeys(("payload", "scratch", "logs"), tmp_path)
    runner = TrialRunner(launcher=launcher, device="cpu", seed=0, **folder)
    first, second = (
        runner.run(GROUND.baseline, name="trial", deadline_s=600.0, window=WindowRules(max_s=2.0))
        for _ in range(2)
    )
    assert first.measurement is not None
    assert second.measurement is not None
    assert second.measurement.earlier_trials == 1
    assert second.measurement.samples_per_s / first.measurement.samples_per_s == pytest.approx(
        exp(-0.5), rel=0.1
    )
    assert second.measurement.peak_memory_bytes == int(1.2 * first.measurement.peak_memory_bytes)
    assert first.wall_s - second.wall_s == pytest.approx(5.5, abs=0.5)
    assert launcher.now() == pytest.approx(first.wall_s + second.wall_s)


def test_strayings_are_those_of_a_workload_and_for_others_the_mean() -> None:
    told = {
        "cnn": {
            "told": {
                "bias": -0.02,
                "bias_by_point": {"0": -0.03, "1": -0.01},
                "memory_ratio": [1.0, 1.1],
            }
        },
        "text": {
            "told": {
                "bias": 0.04,
                "bias_by_point": {"0": 0.03, "1": 0.05},
                "memory_ratio": [1.2, 1.3],
            }
        },
        "unknown": {"told": {"points": 1}},
    }
    strayings = strayings_in(told)
    assert set(strayings) == {"cnn", "text", ""}
    assert strayings["cnn"].bias == pytest.approx(-0.02)
    assert strayings["cnn"].memory == pytest.approx(1.05)
    assert strayings[""].bias == pytest.approx(0.01)
    assert strayings[""].spread == pytest.approx(0.0365, abs=1e-4)


def test_seconds_are_told_as_ratios_and_regret_as_differences() -> None:
    def ground(own_s: float, shared_s: float, regret: float) -> dict[str, object]:
        own = [{"seconds": own_s, "regret": 0.01}] * 3
        return {"build_s": 1.0, "own": own, "shared": [{"seconds": shared_s, "regret": regret}] * 3}

    told = told_of(
        {"a": ground(100, 80, 0.01), "b": ground(100, 90, 0.03), "c": ground(50, 50, 0.0)}
    )
    assert told == {
        1.0: {
            "seconds": pytest.approx(0.9),
            "slowest": pytest.approx(1.0),
            "regret": pytest.approx(0.0),
            "worst": pytest.approx(0.02),
        }
    }
