"""How long the winner is run on the largest samples, and how what one process took is judged for a group of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.policy import WindowRules
from autotune.protocol.messages import StressJob
from autotune.records.trial import TrialRecord, TrialResult, load_of
from autotune.testing import FakeLauncher, FakeTrial, fake_environment, fake_facts
from autotune.tuning.checks import StressCheck, check_under_stress, may_overload
from autotune.tuning.loop import Search
from tests.factories import make_measurement, with_first
from tests.factories.searches import GIB, figures_of, make_search

GROUP = TrainingConfig(strategy="ddp", world_size=2)
VIEWS = GROUP.model_copy(update={"ddp": DdpConfig(gradient_as_bucket_view=True)})
ALONE = TrainingConfig()


def record_of(config: TrainingConfig, overhead_s: float = 2.0) -> TrialRecord:
    """Trial 7, whose window took 10 s."""
    measurement = make_measurement(100.0)
    window_s = sum(block.seconds for block in measurement.blocks)
    result = TrialResult(outcome="ok", measurement=measurement, wall_s=window_s + overhead_s)
    return TrialRecord(number=7, config=config, results=(result,))


def stressed(
    folder: Path, config: TrainingConfig, peak_gib: float, kind: str = "cuda", **more: Any
) -> tuple[Search, StressCheck]:
    """A stress run of a process that took so much, under a limit of 14 GiB; gradients take 1 GiB."""
    launcher = FakeLauncher(
        lambda _: FakeTrial(samples_per_s=100.0, stress_peak_bytes=int(peak_gib * GIB))
    )
    launcher.facts = fake_facts().model_copy(update={"gradient_bytes": GIB})
    named = {"device_kind": kind, "device": "cpu" if kind == "cpu" else f"{kind}:0"}
    launcher.environment = fake_environment(device_count=2).model_copy(update=named)
    search = make_search(folder, launcher, **more)
    return search, check_under_stress(record_of(config), search.time, search.runner)


def job_of(search: Search) -> StressJob:
    launcher = search.runner.launcher
    assert isinstance(launcher, FakeLauncher)
    (job,) = launcher.jobs
    assert isinstance(job, StressJob)
    return job


@pytest.mark.parametrize(
    ("config", "kind", "peak_gib", "whole_gib", "ranks", "buckets_gib"),
    [
        (ALONE, "cpu", 13.9, 13.9, 1, 0),
        (VIEWS, "cuda", 13.9, 13.9, 1, 0),
        (GROUP, "cuda", 12.9, 13.9, 1, 1),
        (GROUP, "cpu", 5.9, 13.8, 2, 1),
        (VIEWS, "cpu", 6.9, 13.8, 2, 0),
        (VIEWS, "cpu", 7.1, 14.2, 2, 0),
    ],
)
def test_what_stays_within_the_limit_for_all_its_ranks_passes(
    tmp_path: Path,
    config: TrainingConfig,
    kind: str,
    peak_gib: float,
    whole_gib: float,
    ranks: int,
    buckets_gib: int,
) -> None:
    search, check = stressed(tmp_path, config, peak_gib, kind)
    assert check.figures is not None
    assert not check.is_refuted
    load = load_of(check.figures, config, search.space.environment, search.space.facts)
    assert load.own_bytes == pytest.approx(peak_gib * GIB)
    assert load.peak_bytes == pytest.approx(whole_gib * GIB)
    assert (load.ranks, load.bucket_bytes) == (ranks, buckets_gib * GIB)
    assert job_of(search).config.process_count == 1


@pytest.mark.parametrize(("peak_gib", "is_noted"), [(6.9, False), (7.1, True)])
def test_what_ranks_may_take_together_is_noted_and_refutes_nothing(
    tmp_path: Path, peak_gib: float, is_noted: bool
) -> None:
    """Each counts what they share once more: the group's own trial has stayed within the limit."""
    _, check = stressed(tmp_path, VIEWS, peak_gib, "cpu")
    assert check.figures is not None
    noted = figures_of(check.notes, "stress_near_limit")
    assert [one["ranks"] for one in noted] == [2] * is_noted
    assert [one["peak_bytes"] for one in noted] == [pytest.approx(2 * peak_gib * GIB)] * is_noted


@pytest.mark.parametrize(
    ("config", "kind", "peak_gib", "whole_gib", "ranks"),
    [(ALONE, "cuda", 14.1, 14.1, 1), (GROUP, "cuda", 13.1, 14.1, 1), (GROUP, "cpu", 13.5, 29.0, 2)],
)
def test_what_fits_once_but_not_with_all_that_a_group_adds_is_refuted(
    tmp_path: Path, config: TrainingConfig, kind: str, peak_gib: float, whole_gib: float, ranks: int
) -> None:
    _, check = stressed(tmp_path, config, peak_gib, kind)
    assert (check.is_refuted, check.figures) == (True, None)
    (figures,) = figures_of(check.notes, "stress_over_limit")
    assert (figures["trial"], figures["steps"], figures["ranks"]) == (7, 10, ranks)
    assert figures["own_bytes"] == pytest.approx(peak_gib * GIB)
    assert figures["peak_bytes"] == pytest.approx(whole_gib * GIB)


@pytest.mark.parametrize("retries", [None, 0, 1, 3])
def test_what_fits_the_largest_samples_by_giving_memory_back_is_noted(
    tmp_path: Path, retries: int | None
) -> None:
    launcher = FakeLauncher(
        lambda _: FakeTrial(samples_per_s=100.0, peak_memory_bytes=GIB, alloc_retries=retries)
    )
    search = make_search(tmp_path, launcher)
    check = check_under_stress(record_of(ALONE), search.time, search.runner)
    assert not check.is_refuted
    noted = [one["alloc_retries"] for one in figures_of(check.notes, "stress_thrashing")]
    assert noted == ([3] if retries == 3 else [])
    assert len(check.notes) == len(noted)


def test_without_a_time_out_it_is_longer_than_a_window(tmp_path: Path) -> None:
    job = job_of(stressed(tmp_path, ALONE, 1.0)[0])
    assert job.train_s == 12.0 > WindowRules().max_s
    assert job.process.deadline_s > 30.0


@pytest.mark.parametrize(("timeout_s", "window_s"), [(100.0, 12.0), (10.0, 6.0), (4.0, 1.2)])
def test_with_one_it_takes_what_the_start_and_the_look_leave(
    tmp_path: Path, timeout_s: float, window_s: float
) -> None:
    """The start takes 2 s, the look at samples a fifth of what is left, 4 s at the most."""
    job = job_of(stressed(tmp_path, ALONE, 1.0, timeout_s=timeout_s)[0])
    assert job.train_s == pytest.approx(window_s)
    assert job.process.deadline_s <= timeout_s


@pytest.mark.parametrize(
    ("config", "kind", "gib", "is_run"),
    [
        (ALONE, "cuda", 3.4, False),
        (ALONE, "cuda", 3.6, True),
        (GROUP, "cuda", 3.4, False),
        (GROUP, "cpu", 1.6, False),
        (GROUP, "cpu", 1.8, True),
    ],
)
def test_it_is_run_where_four_times_the_peak_would_not_fit(
    tmp_path: Path, config: TrainingConfig, kind: str, gib: float, is_run: bool
) -> None:
    """Under 14 GiB; ranks on a CPU share its memory."""
    search, _ = stressed(tmp_path, ALONE, 1.0, kind)
    record = record_of(config)
    assert record.measurement is not None
    measurement = record.measurement.model_copy(update={"peak_memory_bytes": int(gib * GIB)})
    record = with_first(record, measurement=measurement)
    assert may_overload(record, search.space) == is_run
