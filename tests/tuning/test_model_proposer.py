"""Searches that a model of the machine guides, over made-up machines: where they get to, what they leave out, and when
they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

import autotune
from autotune.analysis.rates import mean_rate
from autotune.launch.launcher import Exit, Launch
from autotune.note import note
from autotune.protocol.jobs import CurvesJob, Job, PrecisionJob, StressJob, TrialJob, read_job
from autotune.records.ceilings import device_key, loader_key
from autotune.records.run_summary import Progress
from autotune.records.trial import Failure, TrialResult
from autotune.settings.search_options import Method
from autotune.settings.training_config import TrainingConfig
from autotune.space.resolved_space import compose
from autotune.study.proposals import first_guesses
from autotune.study.study import Trial
from autotune.testing import CostModel, FakeLauncher, FakeTrial, analytic_cost
from autotune.tuning.loop import Search
from autotune.tuning.proposers import ModelProposer
from tests.factories.searches import GIB, FailingLauncher, confirmed, make_search

LIMIT = 14 * GIB
NEAR = 0.97
SMALL: dict[str, Any] = {
    "micro_batch_size": [16, 32, 64, 128],
    "num_workers": [0, 2, 4, 8],
    "amp_dtype": ["float32", "bfloat16"],
    "grad_accum_steps": 1,
    "prefetch_factor": 2,
    "persistent_workers": True,
    "pin_memory": False,
}
LOADERS: dict[str, Any] = {**SMALL, "amp_dtype": "float32", "micro_batch_size": 32}
"""A space whose configurations differ in their workers alone."""


def joined(config: TrainingConfig, *, loader: float, device: float, peak_bytes: int) -> FakeTrial:
    """What a loader and a device reach together."""
    rate = min(loader, device) if config.num_workers else 1 / (1 / loader + 1 / device)
    return FakeTrial(
        samples_per_s=rate,
        peak_memory_bytes=peak_bytes,
        busy_fraction=rate / device,
        loader_ceiling=loader,
        device_ceiling=device,
    )


def sides(config: TrainingConfig) -> tuple[float, float]:
    trial = analytic_cost(config)
    assert trial.loader_ceiling is not None
    assert trial.device_ceiling is not None
    return trial.loader_ceiling, trial.device_ceiling


def slow_loader(config: TrainingConfig) -> FakeTrial:
    """The device is at least ten times as fast as the loader, however many workers it has."""
    loader, device = sides(config)
    return joined(config, loader=loader / 10, device=device, peak_bytes=GIB)


def slow_device(config: TrainingConfig) -> FakeTrial:
    """Two workers are four times as fast as the device ever gets."""
    loader, device = sides(config)
    return joined(config, loader=loader, device=device / 100, peak_bytes=GIB)


def memory_cliff(config: TrainingConfig) -> FakeTrial:
    """The larger the batch, the faster, up to where the memory ends: at 176 samples, in half precision at 240."""
    loader, device = sides(config)
    sample_mib = 48 if config.amp_dtype in {"bfloat16", "float16"} else 64
    peak = 3 * GIB + config.micro_batch_size * sample_mib * 2**20
    return joined(config, loader=loader, device=device / 10 * config.micro_batch_size**0.2, peak_bytes=peak)


def fastest_of(search: Search, cost: CostModel) -> float:
    """The best rate of the whole space within the limit."""
    configs = {compose(params, search.space) for params in search.space.combinations()}
    trials = [cost(config) for config in configs if isinstance(config, TrainingConfig)]
    return max(one.samples_per_s for one in trials if one.peak_memory_bytes <= search.space.limit_bytes)


def guided(folder: Path, cost: CostModel, *, seed: int = 0, **arguments: Any) -> Search:
    """A guided search that has ended, by itself unless a number of trials is given."""
    search = make_search(folder, FakeLauncher(cost, seed=seed), **{"n_trials": None, "limit_bytes": LIMIT, **arguments})
    assert isinstance(search.proposer, ModelProposer)
    search.proposer.seed = seed
    search.run()
    return search


def until_near(search: Search, cost: CostModel) -> int:
    """How many trials it took to come within 3 % of the best of the space."""
    best = fastest_of(search, cost)
    rates = [cost(one.config).samples_per_s if one.is_feasible else 0.0 for one in search.study.records]
    assert max(rates) >= NEAR * best
    return 1 + next(place for place, rate in enumerate(rates) if rate >= NEAR * best)


def curves_of(search: Search) -> list[CurvesJob]:
    launcher = search.runner.launcher
    assert isinstance(launcher, FakeLauncher)
    return [job for job in launcher.jobs if job.kind == "curves"]


# Where a search gets to


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("space", [{}, SMALL], ids=["default space", "small space"])
@pytest.mark.parametrize("cost", [analytic_cost, slow_loader, slow_device, memory_cliff])
def test_a_few_trials_lead_near_the_best_of_the_space(
    tmp_path: Path, cost: CostModel, space: dict[str, Any], seed: int
) -> None:
    search = guided(tmp_path, cost, seed=seed, **space)
    assert until_near(search, cost) <= 4
    assert len(search.study.records) < 40


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("batches", [[16, 32, 64, 128, 256], {"low": 8, "high": 512}])
def test_where_the_memory_ends_within_the_space_no_trial_runs_out_of_it(
    tmp_path: Path, batches: object, seed: int
) -> None:
    search = guided(tmp_path, memory_cliff, seed=seed, **{**SMALL, "micro_batch_size": batches})
    assert any(memory_cliff(one).peak_memory_bytes > LIMIT for one in _composed(search))
    assert {one.outcome for one in search.study.records} <= {"ok", "pruned"}
    assert until_near(search, memory_cliff) <= 6


def _composed(search: Search) -> list[TrainingConfig]:
    configs = [compose(params, search.space) for params in search.space.combinations()]
    return [one for one in configs if isinstance(one, TrainingConfig)]


def a_gibibyte_a_sample(config: TrainingConfig) -> FakeTrial:
    """The larger the batch, the faster."""
    rate, peak = 100.0 * config.micro_batch_size, config.micro_batch_size * GIB
    return joined(config, loader=1e6, device=rate, peak_bytes=peak)


def test_a_batch_that_a_look_has_just_fitted_in_is_tried(tmp_path: Path) -> None:
    search = guided(tmp_path, a_gibibyte_a_sample, limit_bytes=64 * GIB, n_trials=6)
    assert search.best is not None
    assert search.best.config.micro_batch_size == 64
    assert not any(one.config.micro_batch_size > 64 for one in search.study.records)


def test_where_the_baseline_does_not_fit_the_fastest_that_a_look_could_run_comes_next(tmp_path: Path) -> None:
    search = guided(tmp_path, a_gibibyte_a_sample, limit_bytes=16 * GIB, n_trials=2)
    baseline, second = search.study.records
    assert (baseline.outcome, second.outcome, second.config.micro_batch_size) == ("over_memory", "ok", 16)


def test_where_nothing_fits_the_search_gives_up_after_ten_trials(tmp_path: Path) -> None:
    space: dict[str, Any] = {"micro_batch_size": list(range(32, 64)), "num_workers": [0, 2, 4], "amp_dtype": "float32"}
    search = guided(tmp_path, a_gibibyte_a_sample, limit_bytes=GIB, **space)
    assert {one.outcome for one in search.study.records} == {"over_memory"}
    assert len(search.study.records) == 10
    assert search.ended_because == note("no_recent_gain", trials=6, is_promising=False)


# What it leaves out


def test_where_the_loader_is_the_limit_by_far_no_loader_is_tried_with_a_second_device(tmp_path: Path) -> None:
    search = guided(tmp_path, slow_loader, **{**SMALL, "micro_batch_size": 32, "amp_dtype": ["float32", "bfloat16"]})
    tried = [loader_key(one.config) for one in search.study.records if one.config.num_workers]
    assert len(tried) >= 1
    assert len(tried) == len(set(tried))


def test_where_the_device_is_the_limit_by_far_no_device_is_tried_with_a_second_loader(tmp_path: Path) -> None:
    search = guided(tmp_path, slow_device, **SMALL)
    tried = [device_key(one.config) for one in search.study.records if one.config.num_workers]
    assert len(tried) >= 2
    assert len(tried) == len(set(tried))


PINNING: dict[str, Any] = {**SMALL, "pin_memory": [False, True]}


def copying(share: float, pinned_factor: float = 3.0, loader_factor: float = 1.0) -> CostModel:
    """The device is the limit, and copies from pageable memory take a share of its step; from pinned memory they are so
    many times as fast. Nothing hides them."""
    plain_s = 1 / slow_device(TrainingConfig()).samples_per_s

    def cost(config: TrainingConfig) -> FakeTrial:
        loader, device = sides(config)
        copy_s = share / (1 - share) * plain_s / (pinned_factor if config.pin_memory else 1.0)
        training = 1 / (100 / device + copy_s)
        trial = joined(config, loader=loader_factor * loader, device=training, peak_bytes=GIB)
        return replace(trial, device_ceiling=device / 100, copy_ceiling=1 / copy_s)

    return cost


@pytest.mark.parametrize("seed", range(2))
def test_where_copies_take_a_third_of_a_step_pinned_ones_are_tried_soon_and_recommended(
    tmp_path: Path, seed: int
) -> None:
    cost = copying(1 / 3)
    search = guided(tmp_path, cost, seed=seed, **PINNING)
    assert any(one.config.pin_memory for one in search.study.records[:4])
    assert until_near(search, cost) <= 4
    _, found = confirmed(search)
    assert found.config.pin_memory


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("loader_factor", [1.0, 1e-3], ids=["slow device", "slow loader"])
def test_where_copies_take_a_five_hundredth_of_a_step_no_trial_is_spent_on_pinning(
    tmp_path: Path, loader_factor: float, seed: int
) -> None:
    cost = copying(0.002, loader_factor=loader_factor)
    search = guided(tmp_path, cost, seed=seed, **PINNING)
    assert not any(one.config.pin_memory for one in search.study.records)
    _, found = confirmed(search)
    assert not found.config.pin_memory


@pytest.mark.parametrize(("share", "skipped"), [(0.002, {True}), (1 / 3, {False})], ids=["short", "long"])
def test_a_sample_that_pins_memory_is_skipped_where_copies_can_not_matter(
    tmp_path: Path, share: float, skipped: set[bool]
) -> None:
    search = guided(tmp_path, copying(share), n_trials=2, **PINNING)
    assert isinstance(search.proposer, ModelProposer)
    assert search.proposer.outlook(search.best) is not None
    tried = {device_key(one.config) for one in search.study.ended}
    samples = [one for one in _composed(search) if one.pin_memory and device_key(one) not in tried]
    assert {search.proposer.skip(one) is not None for one in samples} == skipped


def test_memory_that_the_space_has_pinned_is_pinned_however_short_copies_are(tmp_path: Path) -> None:
    search = guided(tmp_path, copying(0.002), **{**PINNING, "pin_memory": True})
    assert len(search.study.records) > 2
    assert all(one.config.pin_memory for one in search.study.records[1:])


# When it ends


def with_shortfall(cost: CostModel) -> CostModel:
    """Together both sides stay a quarter below what either would reach."""
    return lambda config: replace(cost(config), samples_per_s=0.75 * cost(config).samples_per_s)


@pytest.mark.parametrize(
    ("cost", "space", "reason"),
    [
        (slow_device, SMALL, "near_ceiling"),
        (with_shortfall(analytic_cost), SMALL, "little_expected"),
        (with_shortfall(slow_loader), LOADERS | {"num_workers": [0, 4]}, "space_exhausted"),
        (
            with_shortfall(slow_loader),
            LOADERS | {"num_workers": [2, 4], "amp_dtype": ["float32", "bfloat16"]},
            "nothing_left_to_learn",
        ),
    ],
)
def test_a_search_ends_by_itself_and_says_by_which_rule(
    tmp_path: Path, cost: CostModel, space: dict[str, Any], reason: str
) -> None:
    search = guided(tmp_path, cost, **space)
    assert search.ended_because is not None
    assert search.ended_because.code == reason
    assert len(search.study.records) <= 10


@pytest.mark.parametrize("n_trials", [1, 2, 30])
def test_a_number_of_trials_that_is_given_is_run_however_little_is_left_to_win(tmp_path: Path, n_trials: int) -> None:
    search = guided(tmp_path, slow_device, n_trials=n_trials)
    assert len(search.study.records) == n_trials
    assert search.ended_because == note("trials_asked_for", trials=n_trials)


def test_a_small_space_is_run_to_its_end_where_more_trials_are_asked_for(tmp_path: Path) -> None:
    search = guided(tmp_path, analytic_cost, n_trials=50, **SMALL)
    assert search.study.is_exhausted
    assert {one.config for one in search.study.records} == set(_composed(search))
    assert search.ended_because == note("space_exhausted")


def test_the_best_at_the_users_own_batch_is_known_before_it_ends(tmp_path: Path) -> None:
    search = guided(tmp_path, memory_cliff, **SMALL)
    own = [one for one in search.study.records if one.is_feasible and one.config.global_batch_size == 32]
    assert max(memory_cliff(one.config).samples_per_s for one in own) == pytest.approx(
        max(memory_cliff(one).samples_per_s for one in _composed(search) if one.global_batch_size == 32), rel=0.03
    )


# One look


def test_one_look_at_either_side_alone_comes_right_after_the_baseline(tmp_path: Path) -> None:
    search = guided(tmp_path, analytic_cost, **SMALL)
    launcher = search.runner.launcher
    assert isinstance(launcher, FakeLauncher)
    assert [job.kind for job in launcher.jobs[:3]] == ["trial", "curves", "trial"]
    (look,) = curves_of(search)
    assert look.config == search.space.baseline
    assert {one.micro_batch_size for one in look.variations} == {16, 32, 64, 128}
    assert {one.num_workers for one in look.variations} == {0, 2, 4, 8}


@pytest.mark.parametrize(("device", "is_looked_at"), [(100.0, True), (1.0, False)])
def test_a_loader_that_no_step_could_keep_up_with_is_not_looked_at(
    tmp_path: Path, device: float, is_looked_at: bool
) -> None:
    """Batches may grow four times, and precision give eight times: 32 times the device's rate is within reach."""

    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(samples_per_s=device, peak_memory_bytes=GIB, loader_ceiling=1000.0, device_ceiling=device)

    (look,) = curves_of(guided(tmp_path, cost, **SMALL))
    assert ({one.num_workers for one in look.variations} != {0}) == is_looked_at
    assert {one.micro_batch_size for one in look.variations} == {16, 32, 64, 128}


def test_a_look_begins_with_what_costs_no_more_than_the_own_batch(tmp_path: Path) -> None:
    (look,) = curves_of(guided(tmp_path, analytic_cost, **SMALL))
    own = [one.micro_batch_size for one in look.variations if one.num_workers == 0]
    assert own == sorted(own, key=lambda batch: (batch < 32, abs(batch - 32)))


def test_a_look_that_fails_is_noted_and_an_experts_guesses_are_tried_instead(tmp_path: Path) -> None:
    launcher = FailingLauncher(failures={"curves": TrialResult(outcome="timeout", reason="it took too long")})
    search = make_search(tmp_path, launcher, n_trials=10)
    search.run()
    assert search.notes == [note("sides_not_measured", reason="it took too long")]
    guesses = [compose(guess, search.space) for guess in first_guesses(search.space)]
    assert [one.config for one in search.study.records[1 : 1 + len(guesses)]] == guesses
    assert len(curves_of(search)) == 1
    assert len(search.study.records) == 10


def test_a_look_that_shows_nothing_is_noted_with_what_kept_it(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(samples_per_s=100.0 + config.num_workers, peak_memory_bytes=GIB)

    search = make_search(tmp_path, FakeLauncher(cost), n_trials=12)
    search.run()
    assert search.notes == [note("sides_not_measured", reason="the cost model does not say")]
    assert search.best is not None
    assert search.best.config.num_workers == 8


def test_a_side_that_was_measured_in_no_setting_is_noted_and_the_model_goes_on(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return replace(analytic_cost(config), device_ceiling=None, busy_fraction=1.0)

    search = make_search(tmp_path, FakeLauncher(cost), n_trials=4, **SMALL)
    search.run()
    reason = "the cost model does not say"
    assert search.notes == [note("one_side_not_measured", side="device", reason=reason)]
    assert search.proposer.has_model
    assert len(search.study.records) == 4


def test_a_look_takes_no_more_than_its_share_of_the_time(tmp_path: Path) -> None:
    timed = make_search(tmp_path / "timed", FakeLauncher(), timeout_s=100.0)
    free = make_search(tmp_path / "free", FakeLauncher())
    for search in (timed, free):
        search.run()
    assert [job.process.deadline_s for job in curves_of(timed)] == [pytest.approx(0.15 * 70.0)]
    assert [job.process.deadline_s for job in curves_of(free)] == [60.0]


def test_what_was_left_out_promises_no_gain(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        is_plain = config.amp_dtype == "float32"
        device = sides(config)[1] * (1 if is_plain else 100)
        return replace(joined(config, loader=1e6, device=device, peak_bytes=GIB), passes_guard=is_plain)

    shown: list[Progress] = []
    search = make_search(tmp_path, FakeLauncher(cost), n_trials=8, **SMALL)
    search.show = shown.append
    search.run()
    told = next(one for one in shown if one.last is not None and one.last.outcome == "diverged")
    plain = max(cost(config).samples_per_s for config in _composed(search) if config.amp_dtype == "float32")
    assert told.can_win is not None
    assert told.best is not None
    assert 1 + told.can_win < 2 * plain / cost(told.best.config).samples_per_s


# What was not expected


def trapped(rate: float) -> CostModel:
    """Eight workers should be the fastest, as either side alone shows, but reach this rate together."""

    def cost(config: TrainingConfig) -> FakeTrial:
        trial = analytic_cost(config)
        return replace(trial, samples_per_s=rate) if config.num_workers == 8 else trial

    return cost


@pytest.mark.parametrize(("rate", "outcome"), [(300.0, "pruned"), (1200.0, "ok")])
def test_a_model_that_is_surprised_leaves_the_next_trial_to_the_sampler(
    tmp_path: Path, rate: float, outcome: str
) -> None:
    search = guided(tmp_path, trapped(rate), n_trials=2, **SMALL)
    assert isinstance(search.proposer, ModelProposer)
    last = search.study.ended[-1]
    assert (last.config.num_workers, last.outcome) == (8, outcome)
    assert search.proposer.propose(search.best) is None
    assert not search.study.has_waiting


def test_a_model_that_is_not_surprised_proposes_the_next_trial(tmp_path: Path) -> None:
    search = guided(tmp_path, analytic_cost, n_trials=2, **SMALL)
    assert isinstance(search.proposer, ModelProposer)
    assert search.proposer.propose(search.best) is not None
    assert not search.study.has_waiting, "the loop proposes, not the model"


def test_what_the_sampler_finds_is_taken_for_too_large_where_the_memory_ends(tmp_path: Path) -> None:
    search = guided(tmp_path, memory_cliff, **{**SMALL, "micro_batch_size": [16, 32, 64, 128, 256]})
    assert isinstance(search.proposer, ModelProposer)
    for config in _composed(search):
        fits = memory_cliff(config).peak_memory_bytes <= LIMIT
        reason = search.proposer.skip(config)
        assert (reason is not None and reason.code == "would_not_fit") == (not fits)


def test_what_the_sampler_finds_and_differs_only_on_a_side_that_holds_nothing_is_not_tried(tmp_path: Path) -> None:
    search = guided(tmp_path, slow_device, n_trials=6, **SMALL)
    assert isinstance(search.proposer, ModelProposer)
    assert search.proposer.outlook(search.best) is not None
    tried = {one.config for one in search.study.ended if one.measurement is not None and one.config.num_workers}
    seen = {device_key(config) for config in tried}
    open_ones = [one for one in _composed(search) if one.num_workers and search.study.is_open(one)]
    reasons = {device_key(one) in seen: search.proposer.skip(one) for one in open_ones}
    assert reasons == {True: note("would_tell_nothing"), False: None}


def test_what_fails_is_not_tried_again_with_a_setting_that_has_nothing_to_do_with_it(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        trial = analytic_cost(config)
        is_bad = config.micro_batch_size > 32 and config.num_workers > 4
        failure = Failure(signature=f"ValueError at net.py:{config.micro_batch_size}", traceback="ValueError")
        return FakeTrial(outcome="crashed", reason="ValueError", failure=failure) if is_bad else trial

    search = guided(tmp_path, cost, n_trials=8)
    failed = [one.config for one in search.study.records if one.outcome == "crashed"]
    assert len(failed) >= 1
    assert len({(one.micro_batch_size, one.num_workers) for one in failed}) >= len(failed) - 1
    assert until_near(search, lambda config: replace(cost(config), peak_memory_bytes=GIB)) <= 8


# Trials that are stopped early


def test_a_trial_that_is_stopped_early_is_told_to_optuna_with_the_rate_it_had(tmp_path: Path) -> None:
    search = guided(tmp_path, trapped(300.0), n_trials=4, **SMALL)
    stopped = [one for one in search.study.records if one.outcome == "pruned"]
    assert stopped
    baseline = search.study.records[0].measurement
    assert baseline is not None
    for record in stopped:
        trial = search.study.optuna_study.trials[record.number]
        blocks, relative = (
            record.result.blocks,
            mean_rate(record.result.blocks)[0] / baseline.samples_per_s,
        )
        assert trial.state.name == "PRUNED"
        assert trial.intermediate_values == {len(blocks): pytest.approx(relative)}
        assert 3 <= len(blocks) < 10
        assert record.reason == "stopped_early"
        assert record.score is None


def test_the_baseline_and_the_confirmation_are_measured_to_their_end(tmp_path: Path) -> None:
    launcher = FakeLauncher(trapped(300.0))
    result = autotune.search(
        object, list, progress=False, launcher=launcher, run_dir=tmp_path / "run", n_trials=5, space=SMALL
    )
    jobs = [job for job in launcher.jobs if job.kind == "trial"]
    assert len(jobs) > len(result.trials)
    assert [job.streams_blocks for job in jobs] == [False, *[True] * 4, *[False] * (len(jobs) - 5)]


@pytest.mark.parametrize(("micro_batch_size", "bar"), [(32, 2), (64, 1), (128, 1)])
def test_at_the_users_own_batch_a_trial_races_against_those_at_it_alone(
    tmp_path: Path, micro_batch_size: int, bar: int
) -> None:
    rates = {(32, 0): 100.0, (64, 2): 900.0, (32, 4): 500.0}

    def cost(config: TrainingConfig) -> FakeTrial:
        rate = rates.get((config.micro_batch_size, config.num_workers), 1.0)
        return FakeTrial(samples_per_s=rate, peak_memory_bytes=GIB)

    search = make_search(tmp_path, FakeLauncher(cost, noise=1e-6), n_trials=3, **{**SMALL, "amp_dtype": "float32"})
    for micro, workers in [(64, 2), (32, 4)]:
        search.study.propose({"micro_batch_size": micro, "num_workers": workers})
    search.run()
    assert isinstance(search.proposer, ModelProposer)
    asked = Trial(9, TrainingConfig(micro_batch_size=micro_batch_size, num_workers=8))
    found = search.proposer.pruning_threshold(asked)
    assert found is not None
    assert found.number == bar
    assert found.low_samples_per_s == pytest.approx([900.0, 500.0][bar - 1], rel=0.05)


# Several at once, and a search that goes on


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("n_trials", [12, None])
def test_three_trials_at_once_are_guided_as_one_is(tmp_path: Path, n_trials: int | None, seed: int) -> None:
    search = make_search(tmp_path, FakeLauncher(memory_cliff, slots=3, seed=seed), n_trials=n_trials, **SMALL)
    search.time.slots = lambda: 3
    search.run()
    records = search.study.records
    assert len({one.config for one in records}) == len(records)
    assert len(records) == n_trials or (n_trials is None and len(records) < 20)
    assert {one.outcome for one in records} <= {"ok", "pruned"}
    assert len(curves_of(search)) == 1
    assert until_near(search, memory_cliff) <= 8


class Interrupting(FakeLauncher):
    """Is interrupted at the first job for which `at` says so."""

    at: Callable[[Job, int], bool] = staticmethod(lambda job, launched: False)

    def launch(self, launch: Launch) -> Exit:
        if self.at(read_job(launch.folder.job), len(self.launched)):
            raise KeyboardInterrupt
        return FakeLauncher.launch(self, launch)


def resumed(
    folder: Path, at: Callable[[Job, int], bool], **arguments: Any
) -> tuple[autotune.SearchResult, list[TrialJob | PrecisionJob | CurvesJob | StressJob]]:
    """A search that was interrupted and called again: its result, and the jobs of the second call."""
    interrupting, launcher = Interrupting(memory_cliff), FakeLauncher(memory_cliff, seed=1)
    interrupting.at = at
    arguments = {"progress": False, "run_dir": folder / "run", "space": SMALL, "memory_limit": LIMIT, **arguments}
    with pytest.raises(KeyboardInterrupt):
        autotune.search(object, list, launcher=interrupting, **arguments)
    return autotune.search(object, list, launcher=launcher, **arguments), launcher.jobs


@pytest.mark.parametrize("n_trials", [9, None])
def test_an_interrupted_search_goes_on_with_what_its_look_has_shown(tmp_path: Path, n_trials: int | None) -> None:
    result, jobs = resumed(tmp_path, lambda job, launched: job.kind == "trial" and launched == 2, n_trials=n_trials)
    assert "curves" not in {job.kind for job in jobs}
    assert jobs[0].config == result.trials[2].config, "what was interrupted is run first"
    assert len({one.config for one in result.trials}) == len(result.trials)
    assert len(result.trials) == n_trials or n_trials is None
    assert {one.outcome for one in result.trials} <= {"ok", "pruned"}
    assert any(job.kind == "trial" and job.streams_blocks for job in jobs)
    assert result.best.micro_batch_size == 128


def test_a_look_that_was_interrupted_is_taken_by_the_next_call(tmp_path: Path) -> None:
    result, jobs = resumed(tmp_path, lambda job, launched: job.kind == "curves", n_trials=4)
    assert jobs[0].kind == "curves"
    assert len(result.trials) == 4


# The other methods


@pytest.mark.parametrize("method", sorted({*get_args(Method)} - {"model"}))
def test_with_a_sampler_of_optunas_nothing_is_looked_at_or_stopped_early(tmp_path: Path, method: Method) -> None:
    launcher = FakeLauncher()
    result = autotune.search(
        object,
        list,
        progress=False,
        launcher=launcher,
        run_dir=tmp_path / "run",
        n_trials=12,
        space=SMALL,
        method=method,
    )
    assert len(result.trials) == 12
    assert {one.outcome for one in result.trials} == {"ok"}
    assert not any(job.kind == "curves" or (job.kind == "trial" and job.streams_blocks) for job in launcher.jobs)
    assert result.speedup is not None
    assert result.speedup > 3


def test_a_grid_is_measured_whole(tmp_path: Path) -> None:
    space = {**SMALL, "amp_dtype": "float32", "micro_batch_size": [32, 64]}
    launcher = FakeLauncher()
    result = autotune.search(
        object,
        list,
        progress=False,
        launcher=launcher,
        run_dir=tmp_path / "run",
        n_trials=40,
        space=space,
        method="grid",
    )
    assert len(result.trials) == 2 * 4
    assert result.summary.stopped_because == note("space_exhausted")
