"""The runner tells a launcher how many ranks a trial has and where they meet; all else runs in one process.

Over the fake launcher: no process is started here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autotune.core.training_config import DdpConfig, TrainingConfig
from autotune.launch.launcher import Exit, Launch
from autotune.launch.runner import TrialRunner
from autotune.protocol import NO_EXTRAS, TrialFolder, WindowRules
from autotune.testing import FakeLauncher

GROUP = TrainingConfig(strategy="ddp", world_size=2, ddp=DdpConfig(bucket_cap_mb=50))
ALONE = TrainingConfig()


@dataclass(slots=True)
class KeepingLauncher(FakeLauncher):
    """Keeps what it was asked for."""

    launches: list[Launch] = field(default_factory=list)

    def launch(self, launch: Launch) -> Exit:
        self.launches.append(launch)
        return FakeLauncher.launch(self, launch)


@pytest.fixture
def launcher() -> KeepingLauncher:
    return KeepingLauncher()


@pytest.fixture
def runner(launcher: KeepingLauncher, tmp_path: Path) -> TrialRunner:
    return TrialRunner(launcher=launcher, payload=tmp_path, scratch=tmp_path, logs=tmp_path, device="cuda:0", seed=0)


def test_a_group_meets_at_a_file_in_its_trials_folder(runner: TrialRunner, launcher: KeepingLauncher) -> None:
    result = runner.run(GROUP, name="trial", deadline_s=60.0, window=WindowRules())
    assert result.outcome == "ok", result.reason
    (launch,), (job,) = launcher.launches, launcher.jobs
    assert launch.ranks == 2
    assert job.rendezvous == f"file://{launch.folder.rendezvous}"
    assert launch.folder.rendezvous.is_absolute()
    assert job.config == GROUP


def test_a_single_rank_of_ddp_has_a_place_to_meet_too(runner: TrialRunner, launcher: KeepingLauncher) -> None:
    runner.run(TrainingConfig(strategy="ddp"), name="trial", deadline_s=60.0, window=WindowRules())
    assert launcher.launches[0].ranks == 1
    assert launcher.jobs[0].rendezvous is not None


@pytest.mark.parametrize("config", [ALONE, TrainingConfig(strategy="dp", world_size=2)])
def test_a_single_process_meets_nobody(config: TrainingConfig, runner: TrialRunner, launcher: KeepingLauncher) -> None:
    runner.run(config, name="trial", deadline_s=60.0, window=WindowRules())
    assert launcher.launches[0].ranks == 1
    assert (launcher.jobs[0].rendezvous, launcher.jobs[0].config) == (None, config)


def test_what_is_looked_at_beside_the_trials_runs_in_one_process(
    runner: TrialRunner, launcher: KeepingLauncher
) -> None:
    runner.guard(GROUP, name="guard", deadline_s=60.0)
    runner.stress(GROUP, name="stress", deadline_s=60.0, window=WindowRules())
    runner.curves(GROUP, [GROUP], deadline_s=60.0, extras=NO_EXTRAS)
    runner.probe(GROUP, deadline_s=60.0)
    assert [launch.ranks for launch in launcher.launches] == [1, 1, 1, 1]
    assert [(job.kind, job.config, job.rendezvous) for job in launcher.jobs] == [
        ("guard", ALONE, None),
        ("stress", ALONE, None),
        ("curves", ALONE, None),
    ]
    assert launcher.jobs[2].variations == (ALONE,)


def test_each_rank_has_files_of_its_own(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    assert folder.report_of(0) == folder.report
    names = {one.name for rank in range(3) for one in (folder.report_of(rank), folder.stack_of(rank))}
    assert len(names) == 6
    assert folder.stack_of(0).name == "stack-0.txt"
    assert folder.report_of(1).name == "report-1.json"
