from __future__ import annotations

import pytest

from autotune.tune import Clock


def test_without_a_time_out_no_time_runs_out() -> None:
    clock = Clock(None)
    assert clock.left_s is None
    assert clock.left_for_trials_s is None


def test_the_last_part_of_the_time_belongs_to_the_confirmation() -> None:
    clock = Clock(100.0, started=1000.0)
    clock.now = lambda: 1020.0
    assert clock.left_s == pytest.approx(80)
    assert clock.left_for_trials_s == pytest.approx(50)
    clock.now = lambda: 1200.0
    assert clock.left_s == clock.left_for_trials_s == 0
