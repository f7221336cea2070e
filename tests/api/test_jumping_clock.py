"""A search whose clock jumps while it runs: an hour ahead, as after a machine that hung, or an hour back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest

import autotune
from autotune.launch.launcher import Exit, Launch
from autotune.protocol import disk
from autotune.testing import FakeLauncher
from tests.factories.searches import fake_search


@dataclass(slots=True)
class JumpingLauncher(FakeLauncher):
    """Moves the clock of the whole process with its fourth trial."""

    jump_s: float = 0.0
    offset_s: float = 0.0

    def launch(self, launch: Launch) -> Exit:
        if "trial-003" in str(launch.log):
            self.offset_s = self.jump_s
        return FakeLauncher.launch(self, launch)

    def read(self) -> float:
        return monotonic() + self.offset_s


def search(
    tmp_path: Path, launcher: JumpingLauncher, monkeypatch: pytest.MonkeyPatch
) -> autotune.SearchResult:
    monkeypatch.setattr(disk, "_read", launcher.read)
    return fake_search(tmp_path, launcher=launcher, timeout_s=600.0, n_trials=6, method="random")


def test_an_hour_ahead_ends_a_search_by_its_time_out_with_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = search(tmp_path, JumpingLauncher(jump_s=3600.0), monkeypatch)
    assert [trial.outcome for trial in result.trials] == ["ok"] * 4
    assert autotune.load(result.run_dir / "recommended.yaml") == result.best
    assert result.summary.stopped_because.code == "no_time_for_a_trial"


def test_an_hour_back_costs_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = search(tmp_path, JumpingLauncher(jump_s=-3600.0), monkeypatch)
    assert [trial.outcome for trial in result.trials] == ["ok"] * 6
    assert all(trial.result.wall_s >= 0.0 for trial in result.trials)
