"""What counts as an observation of the machine, and how sure each is."""

from __future__ import annotations

import pytest

from autotune.analysis.observations import (
    ConfiguredPoint,
    changed,
    configured_points,
    observed_rate,
    peak_observations,
    rate_observations,
)
from autotune.analysis.rate_model import Observation
from autotune.records.ceilings import Ceiling
from autotune.records.diagnosis import CurvePoint, Curves
from autotune.records.measurement import Block, Ceilings
from autotune.records.trial import TrialRecord, TrialResult
from autotune.settings.training_config import TrainingConfig
from tests.factories import FOUR_DEVICES, make_measurement, make_point, make_record, make_space

LIMIT = 1_000
FOUR = TrainingConfig(num_workers=4, prefetch_factor=2)


def blocks(*rates: float) -> tuple[Block, ...]:
    return tuple(Block(samples=round(rate), batches=4, seconds=1.0, data_wait_s=0.0) for rate in rates)


def runs_of(*records: TrialRecord) -> list[Observation]:
    return list(rate_observations([], records, "cuda"))


def test_a_trial_is_as_sure_as_its_interval() -> None:
    result = TrialResult(outcome="ok", measurement=make_measurement(200.0, 0.1))
    (run,) = runs_of(make_record(config=FOUR, result=result))
    assert (run.kind, run.config, run.samples_per_s) == ("run", FOUR, 200.0)
    assert run.relative_sd == pytest.approx(0.1 / 1.96, rel=1e-4)


def test_a_trial_shows_a_rate_whether_it_was_stopped_early_or_not() -> None:
    assert (
        observed_rate(make_record(result=TrialResult(outcome="ok", measurement=make_measurement(200.0, 0.1)))) == 200.0
    )
    assert observed_rate(make_record(result=TrialResult(outcome="pruned", blocks=blocks(90, 110)))) == 100.0
    assert observed_rate(make_record(result=TrialResult(outcome="timeout"))) is None


def test_no_trial_is_surer_than_one_percent() -> None:
    result = TrialResult(outcome="ok", measurement=make_measurement(200.0, 0.0001))
    assert runs_of(make_record(result=result))[0].relative_sd == 0.01


def test_a_trial_that_looked_at_its_own_sides_is_an_observation_of_each() -> None:
    loader, device = (Ceiling(samples_per_s=rate, samples=100, seconds=1.0, batches=4) for rate in (300.0, 500.0))
    measured = make_measurement(200.0, 0.1).model_copy(update={"ceilings": Ceilings(loader=loader, device=device)})
    seen = runs_of(make_record(config=FOUR, result=TrialResult(outcome="ok", measurement=measured)))
    assert [(one.kind, one.samples_per_s) for one in seen] == [("run", 200.0), ("loader", 300.0), ("device", 500.0)]
    assert {one.config for one in seen} == {FOUR}
    only = measured.model_copy(update={"ceilings": Ceilings(loader=loader)})
    assert len(runs_of(make_record(config=FOUR, result=TrialResult(outcome="ok", measurement=only)))) == 2


def test_a_trial_that_was_stopped_early_counts_by_its_blocks_and_less_surely() -> None:
    result = TrialResult(outcome="pruned", reason="stopped early", blocks=blocks(90, 100, 110))
    (run,) = runs_of(make_record(config=FOUR, result=result, score=None))
    assert (run.config, run.samples_per_s) == (FOUR, 100.0)
    assert run.relative_sd == pytest.approx(0.05 + 4.303 * 10 / 3**0.5 / 100 / 1.96, rel=1e-3)


def test_one_that_was_stopped_early_is_less_sure_than_one_that_ended() -> None:
    steady = blocks(*[100] * 10)
    ended = make_record(result=TrialResult(outcome="ok", measurement=make_measurement(100.0, 0.0)))
    stopped = make_record(result=TrialResult(outcome="pruned", blocks=steady))
    assert runs_of(stopped)[0].relative_sd >= 2 * runs_of(ended)[0].relative_sd


@pytest.mark.parametrize("outcome", ["crashed", "oom", "host_oom", "timeout", "invalid", "diverged", "pruned"])
def test_a_trial_that_failed_tells_no_rate(outcome: str) -> None:
    assert runs_of(make_record(result=TrialResult.model_validate({"outcome": outcome}), score=None)) == []


def test_a_refused_precision_tells_its_rate_all_the_same() -> None:
    result = TrialResult(outcome="diverged", reason="loss", measurement=make_measurement(200.0))
    assert [run.samples_per_s for run in runs_of(make_record(result=result, score=None))] == [200.0]


def test_each_point_of_a_curve_is_a_look_at_its_side() -> None:
    space = make_space()
    loader = make_point(500.0, 0.002, num_workers=2)
    device = make_point(900.0, None, micro_batch_size=64)
    looks = configured_points(Curves(loader=(loader,), device=(device,)), space)
    seen = list(rate_observations(looks, [], "cuda"))
    assert [(one.kind, one.samples_per_s, one.cpu_s_per_sample) for one in seen] == [
        ("loader", 500.0, 0.002),
        ("device", 900.0, None),
    ]
    assert [one.config.num_workers for one in seen] == [2, 0]
    assert [one.config.micro_batch_size for one in seen] == [32, 64]


def test_looks_are_less_sure_where_both_sides_share_the_cores() -> None:
    looks = configured_points(Curves(loader=(make_point(500.0),)), make_space())
    on_cpu, on_cuda = (next(rate_observations(looks, [], kind)).relative_sd for kind in ("cpu", "cuda"))
    assert on_cpu > on_cuda


def test_a_point_that_was_not_reached_tells_no_rate() -> None:
    looks = configured_points(Curves(device=(make_point(None, micro_batch_size=64),)), make_space())
    assert list(rate_observations(looks, [], "cuda")) == []


def test_a_change_is_made_to_the_baseline_on_one_device() -> None:
    group = TrainingConfig(strategy="ddp", world_size=4, num_workers=2, prefetch_factor=4)
    space = make_space(baseline=group, environment=FOUR_DEVICES)
    assert changed(space, {"micro_batch_size": 64}) == TrainingConfig(
        micro_batch_size=64, num_workers=2, prefetch_factor=4
    )


def test_a_change_leaves_out_what_has_no_effect() -> None:
    space = make_space(baseline=TrainingConfig(num_workers=2, prefetch_factor=4, persistent_workers=True))
    assert changed(space, {"num_workers": 0}) == TrainingConfig()


def peaks(looks: list[ConfiguredPoint], *records: TrialRecord, limit_is_ram: bool = False) -> list[tuple[int, int]]:
    """Micro batch and peak of each."""
    seen = peak_observations(looks, records, LIMIT, limit_is_ram=limit_is_ram)
    return [(config.micro_batch_size, peak) for config, peak in seen]


def test_peaks_are_those_of_looks_and_of_trials() -> None:
    point = CurvePoint(changes={"micro_batch_size": 64}, ceiling=None, peak_memory_bytes=300)
    looks = configured_points(Curves(device=(point,), loader=(make_point(500.0),)), make_space())
    result = TrialResult(outcome="ok", measurement=make_measurement(peak_memory_bytes=200))
    assert peaks(looks, make_record(result=result)) == [(64, 300), (32, 200)]


@pytest.mark.parametrize(
    ("outcome", "limit_is_ram", "violation", "peak"),
    [("oom", False, 0.5, 1_500), ("oom", False, None, 1_250), ("host_oom", True, 0.5, 1_500)],
)
def test_out_of_memory_counts_by_how_much_it_passed_the_limit(
    outcome: str, limit_is_ram: bool, violation: float | None, peak: int
) -> None:
    result = TrialResult.model_validate({"outcome": outcome, "violation": violation})
    record = make_record(config=TrainingConfig(micro_batch_size=256), result=result, score=None)
    assert peaks([], record, limit_is_ram=limit_is_ram) == [(256, peak)]


def test_what_thrashed_has_not_shown_what_it_would_have_taken() -> None:
    measured = make_measurement(peak_memory_bytes=LIMIT)
    memory = measured.memory.model_copy(update={"alloc_retries": 2})
    result = TrialResult(outcome="ok", measurement=measured.model_copy(update={"memory": memory}))
    record = make_record(config=TrainingConfig(micro_batch_size=256), result=result)
    assert peaks([], record) == [(256, 1_250)], "as one that ran out of memory"


@pytest.mark.parametrize(("limit_is_ram", "violation"), [(False, 0.5), (False, None), (True, None)])
def test_what_ran_out_of_something_else_than_the_limit_is_on_tells_no_peak(
    limit_is_ram: bool, violation: float | None
) -> None:
    result = TrialResult(outcome="host_oom", violation=violation)
    assert peaks([], make_record(result=result, score=None), limit_is_ram=limit_is_ram) == []


def test_a_look_at_the_device_has_no_workers() -> None:
    baseline = TrainingConfig(num_workers=4, prefetch_factor=2, persistent_workers=True)
    point = CurvePoint(changes={}, ceiling=None, peak_memory_bytes=300)
    looks = configured_points(Curves(device=(point,)), make_space(baseline=baseline))
    assert peak_observations(looks, [], LIMIT, limit_is_ram=True) == [(TrainingConfig(), 300)]


@pytest.mark.parametrize("outcome", ["crashed", "timeout", "invalid"])
def test_other_failures_tell_no_peak(outcome: str) -> None:
    assert peaks([], make_record(result=TrialResult.model_validate({"outcome": outcome}), score=None)) == []


def test_a_trial_that_was_stopped_early_tells_no_peak() -> None:
    assert peaks([], make_record(result=TrialResult(outcome="pruned", blocks=blocks(90, 100)), score=None)) == []
