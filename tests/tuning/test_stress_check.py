"""How long the winner is run on the largest samples, and how what one process took is judged for a group of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.protocol.jobs import StressJob, WindowRules
from autotune.records.trial import TrialRecord, TrialResult
from autotune.settings.training_config import DdpConfig, TrainingConfig
from autotune.testing import FakeLauncher, FakeTrial, fake_environment, fake_facts
from autotune.tuning.loop import Tuning
from autotune.tuning.stress_check import reserve_s, say_stressed, stress
from tests.evidence import make_measurement
from tests.tuning.tunings import GIB, make_tuning

GROUP = TrainingConfig(strategy="ddp", world_size=2)
VIEWS = GROUP.model_copy(update={"ddp": DdpConfig(gradient_as_bucket_view=True)})
ALONE = TrainingConfig()


def record_of(config: TrainingConfig, overhead_s: float = 2.0) -> TrialRecord:
    """Trial 7, whose window took 10 s."""
    measurement = make_measurement(100.0)
    window_s = sum(block.seconds for block in measurement.blocks)
    result = TrialResult(outcome="ok", measurement=measurement, wall_s=window_s + overhead_s)
    return TrialRecord(number=7, config=config, result=result)


def stressed(folder: Path, config: TrainingConfig, peak_gib: float, kind: str = "cuda", **more: Any) -> Tuning:
    """After a stress run of a process that took so much, under a limit of 14 GiB; gradients take 1 GiB."""
    launcher = FakeLauncher(lambda _: FakeTrial(samples_per_s=100.0, stress_peak_bytes=int(peak_gib * GIB)))
    launcher.facts = fake_facts().model_copy(update={"gradient_bytes": GIB})
    named = {"device_kind": kind, "device": "cpu" if kind == "cpu" else f"{kind}:0"}
    launcher.environment = fake_environment(device_count=2).model_copy(update=named)
    tuning = make_tuning(folder, launcher, **more)
    stress(tuning, record_of(config))
    return tuning


def job_of(tuning: Tuning) -> StressJob:
    launcher = tuning.runner.launcher
    assert isinstance(launcher, FakeLauncher)
    (job,) = launcher.jobs
    assert isinstance(job, StressJob)
    return job


@pytest.mark.parametrize(
    ("config", "kind", "peak_gib", "said"),
    [
        (ALONE, "cpu", 13.9, "more on the largest of 100 samples seen: peak 14,234 MiB of 14,336 MiB."),
        (VIEWS, "cuda", 13.9, "more in one process on the largest of 100 samples seen: peak 14,234 MiB of 14,336 MiB."),
        (GROUP, "cuda", 12.9, "up to 14,234 MiB of 14,336 MiB for a rank with 1,024 MiB of gradient buckets."),
        (GROUP, "cpu", 5.9, "up to 14,131 MiB of 14,336 MiB for 2 ranks with 1,024 MiB of gradient buckets each."),
        (VIEWS, "cpu", 6.9, "peak 7,066 MiB, that is up to 14,131 MiB of 14,336 MiB for 2 ranks."),
        (VIEWS, "cpu", 7.1, "peak 7,270 MiB, that is up to 14,541 MiB of 14,336 MiB for 2 ranks."),
    ],
)
def test_what_stays_within_the_limit_for_all_its_ranks_passes(
    tmp_path: Path, config: TrainingConfig, kind: str, peak_gib: float, said: str
) -> None:
    tuning = stressed(tmp_path, config, peak_gib, kind)
    assert not tuning.overloaded
    assert say_stressed(tuning, config, tuning.stresses[7]).endswith(said)
    assert job_of(tuning).config.process_count == 1


@pytest.mark.parametrize(("peak_gib", "is_noted"), [(6.9, False), (7.1, True)])
def test_what_ranks_may_take_together_is_noted_and_refutes_nothing(
    tmp_path: Path, peak_gib: float, is_noted: bool
) -> None:
    """Each counts what they share once more: the group's own trial has stayed within the limit."""
    tuning = stressed(tmp_path, VIEWS, peak_gib, "cpu")
    assert 7 in tuning.stresses
    note = "Trial 7 may take up to 14,541 MiB of 14,336 MiB on the largest samples, less where its 2 ranks share memory"
    assert any(one.startswith(note) for one in tuning.notes) == is_noted


@pytest.mark.parametrize(
    ("config", "kind", "peak_gib", "said"),
    [
        (ALONE, "cuda", 14.1, "but was 14,438 MiB in 10 steps"),
        (GROUP, "cuda", 13.1, "process, that is up to 14,438 MiB for a rank with 1,024 MiB of gradient buckets,"),
        (GROUP, "cpu", 13.5, "process, that is up to 29,696 MiB for 2 ranks with 1,024 MiB of gradient buckets each,"),
    ],
)
def test_what_fits_once_but_not_with_all_that_a_group_adds_is_refuted(
    tmp_path: Path, config: TrainingConfig, kind: str, peak_gib: float, said: str
) -> None:
    tuning = stressed(tmp_path, config, peak_gib, kind)
    assert tuning.stresses == {}
    assert said in tuning.overloaded[7]
    assert tuning.overloaded[7] in tuning.notes[-1]


@pytest.mark.parametrize("retries", [None, 0, 1, 3])
def test_what_fits_the_largest_samples_by_giving_memory_back_is_noted(tmp_path: Path, retries: int | None) -> None:
    launcher = FakeLauncher(lambda _: FakeTrial(samples_per_s=100.0, peak_memory_bytes=GIB, alloc_retries=retries))
    tuning = make_tuning(tmp_path, launcher)
    stress(tuning, record_of(ALONE))
    assert not tuning.overloaded
    said = "Trial 7 fits on the largest samples, but not with ease: the allocator had to give back what it held 3 times"
    assert [note.startswith(said) for note in tuning.notes] == ([True] if retries == 3 else [])


def test_without_a_time_out_it_is_longer_than_a_window(tmp_path: Path) -> None:
    job = job_of(stressed(tmp_path, ALONE, 1.0))
    assert job.train_s == 12.0 > WindowRules().max_s
    assert job.process.deadline_s > 30.0


@pytest.mark.parametrize(("timeout_s", "window_s"), [(100.0, 12.0), (10.0, 6.0), (4.0, 1.2)])
def test_with_one_it_takes_what_the_start_and_the_look_leave(tmp_path: Path, timeout_s: float, window_s: float) -> None:
    """The start takes 2 s, the look at samples a fifth of what is left, 4 s at the most."""
    job = job_of(stressed(tmp_path, ALONE, 1.0, timeout_s=timeout_s))
    assert job.train_s == pytest.approx(window_s)
    assert job.process.deadline_s <= timeout_s


def test_the_confirmation_leaves_it_a_quarter_of_the_time_at_the_most() -> None:
    reserves = [reserve_s(record_of(ALONE), left_s) for left_s in (20.0, 40.0, 1000.0)]
    assert reserves == pytest.approx([5.0, 10.0, 12.0 + 2.0 + 4.0])
