"""The runner tells a launcher how many ranks a trial has and where they meet; all else runs in one process.

Over the fake launcher: no process is started here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.launch.launcher import Exit, Launch
from autotune.launch.runner import TrialRunner
from autotune.policy import WindowRules
from autotune.protocol.disk import LONGEST_DEADLINE
from autotune.protocol.messages import NO_EXTRAS, CurvesJob, Extras, TrialJob
from autotune.records.measurement import Block
from autotune.records.trial import Failure
from autotune.testing import FakeLauncher, FakeTrial, fake_facts
from tests.factories.scripts import make_script
from tests.protocol.journals import write_journal

GROUP = TrainingConfig(strategy="ddp", world_size=2, ddp=DdpConfig(bucket_cap_mb=50))
ALONE = TrainingConfig()


@dataclass(slots=True)
class KeepingLauncher(FakeLauncher):
    """Keeps what it was asked for."""

    launches: list[Launch] = field(default_factory=list)

    def launch(self, launch: Launch) -> Exit:
        self.launches.append(launch)
        return FakeLauncher.launch(self, launch)

    @property
    def trial_jobs(self) -> list[TrialJob]:
        return [job for job in self.jobs if isinstance(job, TrialJob)]


@pytest.fixture
def launcher() -> KeepingLauncher:
    return KeepingLauncher()


@pytest.fixture
def runner(launcher: KeepingLauncher, tmp_path: Path) -> TrialRunner:
    return TrialRunner(
        launcher=launcher,
        payload=tmp_path,
        scratch=tmp_path,
        logs=tmp_path,
        device="cuda:0",
        seed=0,
    )


def test_a_group_meets_at_a_file_in_its_trials_folder(
    runner: TrialRunner, launcher: KeepingLauncher
) -> None:
    result = runner.run(GROUP, name="trial", deadline_s=60.0, window=WindowRules())
    assert result.outcome == "ok", result.reason
    (launch,), (job,) = launcher.launches, launcher.trial_jobs
    assert launch.ranks == 2
    assert job.rendezvous == f"file://{launch.folder.rendezvous}"
    assert launch.folder.rendezvous.is_absolute()
    assert job.config == GROUP


def test_a_single_rank_of_ddp_has_a_place_to_meet_too(
    runner: TrialRunner, launcher: KeepingLauncher
) -> None:
    runner.run(TrainingConfig(strategy="ddp"), name="trial", deadline_s=60.0, window=WindowRules())
    assert launcher.launches[0].ranks == 1
    assert launcher.trial_jobs[0].rendezvous is not None


@pytest.mark.parametrize("config", [ALONE, TrainingConfig(strategy="dp", world_size=2)])
def test_a_single_process_meets_nobody(
    config: TrainingConfig, runner: TrialRunner, launcher: KeepingLauncher
) -> None:
    runner.run(config, name="trial", deadline_s=60.0, window=WindowRules())
    assert launcher.launches[0].ranks == 1
    (job,) = launcher.trial_jobs
    assert (job.rendezvous, job.config) == (None, config)


def test_what_is_looked_at_beside_the_trials_runs_in_one_process(
    runner: TrialRunner, launcher: KeepingLauncher
) -> None:
    runner.guard(GROUP, name="guard", deadline_s=60.0)
    runner.stress(GROUP, name="stress", deadline_s=60.0, train_s=1.0)
    runner.curves(GROUP, [GROUP], deadline_s=60.0, stretch_s=0.5)
    runner.probe(GROUP, deadline_s=60.0)
    assert [launch.ranks for launch in launcher.launches] == [1, 1, 1, 1]
    assert [(job.kind, job.config) for job in launcher.jobs] == [
        ("guard", ALONE),
        ("stress", ALONE),
        ("curves", ALONE),
    ]
    assert isinstance(launcher.jobs[2], CurvesJob)
    assert launcher.jobs[2].variations == (ALONE,)


@pytest.mark.parametrize(("took_s", "runs"), [(10.0, 2), (20.0, 2), (40.0, 1)])
def test_a_failure_without_a_place_is_run_again_within_the_deadline_where_that_leaves_as_much_time(
    took_s: float, runs: int, tmp_path: Path
) -> None:
    failure = Failure(signature="RuntimeError at net.py:3", traceback="", is_asynchronous=True)
    bad = FakeTrial(outcome="crashed", reason="illegal", failure=failure, startup_s=took_s)
    launcher = KeepingLauncher(lambda _: bad)
    runner = TrialRunner(
        launcher=launcher,
        payload=tmp_path,
        scratch=tmp_path,
        logs=tmp_path,
        device="cuda:0",
        seed=0,
    )
    asked = Extras(breakdown=True)
    result = runner.run(
        ALONE,
        name="trial",
        deadline_s=60.0,
        window=WindowRules(),
        extras=asked,
        should_end=lambda _: None,
    )
    assert [job.extras for job in launcher.trial_jobs] == [asked, NO_EXTRAS][:runs]
    assert [job.process.blocks_launches for job in launcher.trial_jobs] == [False, True][:runs]
    assert sum(launch.deadline_s for launch in launcher.launches[1:]) < 60.0 - took_s
    assert result.wall_s >= runs * took_s
    assert all(launch.should_end is None for launch in launcher.launches[1:]), (
        "its measurement is worth nothing"
    )
    assert result.failure == failure
    assert result.reason.startswith("illegal")


def test_a_trial_that_is_over_before_its_reason_is_known_keeps_its_measurement(
    tmp_path: Path,
) -> None:
    class Deaf(FakeLauncher):
        """Its trials end by themselves, whoever wants them to end before."""

        def launch(self, launch: Launch) -> Exit:
            return FakeLauncher.launch(self, replace(launch, should_end=None))

    runner = TrialRunner(
        launcher=Deaf(), payload=tmp_path, scratch=tmp_path, logs=tmp_path, device="cuda:0", seed=0
    )
    result = runner.run(
        ALONE, name="trial", deadline_s=60.0, window=WindowRules(), should_end=lambda _: "too slow"
    )
    assert (result.outcome, result.blocks) == ("ok", ())
    assert result.measurement is not None


def test_a_fake_trial_is_stopped_as_a_real_one_is(
    runner: TrialRunner, launcher: KeepingLauncher
) -> None:
    def should_end(blocks: tuple[Block, ...]) -> str | None:
        return "too slow" if len(blocks) == 4 else None

    result = runner.run(
        GROUP, name="trial", deadline_s=60.0, window=WindowRules(), should_end=should_end
    )
    assert (result.outcome, result.reason, len(result.blocks)) == ("pruned", "too slow", 4)
    rate = sum(one.samples for one in result.blocks) / sum(one.seconds for one in result.blocks)
    assert rate == pytest.approx(launcher.cost(GROUP).samples_per_s, rel=0.05), "of both ranks"


def test_a_test_may_shorten_every_deadline(
    runner: TrialRunner, launcher: KeepingLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LONGEST_DEADLINE, "5")
    runner.run(ALONE, name="trial", deadline_s=60.0, window=WindowRules())
    runner.guard(ALONE, name="guard", deadline_s=4.0)
    assert [launch.deadline_s for launch in launcher.launches] == [5.0, 4.0]


@dataclass(slots=True)
class MakingLauncher(FakeLauncher):
    """Has each trial make a folder of the user's, in which another program makes one as well."""

    made: Path = Path()

    def launch(self, launch: Launch) -> Exit:
        (self.made / "theirs").mkdir(parents=True)
        write_journal(launch.folder.overlay, self.made)
        return FakeLauncher.launch(self, launch)


def test_of_what_a_script_has_made_the_probe_tells_what_stays(
    runner: TrialRunner, tmp_path: Path
) -> None:
    facts = fake_facts().model_copy(update={"script": make_script()})
    launcher = MakingLauncher(made=tmp_path / "out", facts=facts)
    report = replace(runner, launcher=launcher).probe(ALONE, deadline_s=60.0)
    assert report.facts is not None
    assert report.facts.script is not None
    assert report.facts.script.new_files == (str(tmp_path / "out/theirs"),)
