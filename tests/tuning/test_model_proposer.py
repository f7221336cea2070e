"""Searches that a model of the machine guides, over made-up machines: where they get to, what they leave out, and when
they end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.messages.search import no_recent_gain, space_exhausted, trials_asked_for
from autotune.records.ceilings import device_key, loader_key
from autotune.testing import CostModel, FakeLauncher, FakeTrial, analytic_cost
from tests.factories.machines import FOUR_DEVICES
from tests.factories.searches import GIB, NARROW, confirmed, make_search
from tests.tuning.guided import (
    LIMIT,
    LOADERS,
    PINNING,
    SMALL,
    composed,
    guided,
    joined,
    memory_cliff,
    sides,
    slow_device,
    slow_loader,
    until_near,
)

# Where a search gets to


@pytest.mark.parametrize(
    ("space", "seed"),
    [
        ({}, 0),
        pytest.param(SMALL, 0, marks=pytest.mark.slow),
        pytest.param(SMALL, 1, marks=pytest.mark.slow),
    ],
    ids=["default space", "small space", "another seed"],
)
@pytest.mark.parametrize(
    "cost",
    [
        slow_loader,
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (memory_cliff, analytic_cost, slow_device)
        ),
    ],
)
def test_a_few_trials_lead_near_the_best_of_the_space(
    tmp_path: Path, cost: CostModel, space: dict[str, Any], seed: int
) -> None:
    search = guided(tmp_path, cost, seed=seed, **space)
    assert until_near(search, cost) <= 4
    assert len(search.study.records) < 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "seed"), [([16, 32, 64, 128, 256], 0), ({"low": 8, "high": 512}, 1)]
)
def test_where_the_memory_ends_within_the_space_no_trial_runs_out_of_it(
    tmp_path: Path, batches: object, seed: int
) -> None:
    search = guided(tmp_path, memory_cliff, seed=seed, **{**SMALL, "micro_batch_size": batches})
    assert any(memory_cliff(one).peak_memory_bytes > LIMIT for one in composed(search))
    assert {one.outcome for one in search.study.records} <= {"ok", "pruned"}
    assert until_near(search, memory_cliff) <= 6


def a_gibibyte_a_sample(config: TrainingConfig) -> FakeTrial:
    """The larger the batch, the faster."""
    rate, peak = 100.0 * config.micro_batch_size, config.micro_batch_size * GIB
    return joined(config, loader=1e6, device=rate, peak_bytes=peak)


def test_a_batch_that_a_look_has_just_fitted_in_is_tried(tmp_path: Path) -> None:
    search = guided(tmp_path, a_gibibyte_a_sample, limit_bytes=64 * GIB, n_trials=6, **NARROW)
    assert search.best is not None
    assert search.best.config.micro_batch_size == 64
    assert not any(one.config.micro_batch_size > 64 for one in search.study.records)


def test_baseline_that_does_not_fit(
    tmp_path: Path,
) -> None:
    search = guided(tmp_path, a_gibibyte_a_sample, limit_bytes=16 * GIB, n_trials=2, **NARROW)
    baseline, second = search.study.records
    assert (baseline.outcome, second.outcome, second.config.micro_batch_size) == (
        "over_memory",
        "ok",
        16,
    )


def test_where_nothing_fits_the_search_gives_up(tmp_path: Path) -> None:
    space: dict[str, Any] = {
        "micro_batch_size": list(range(32, 64)),
        "num_workers": [0, 2, 4],
        "amp_dtype": "float32",
    }
    search = guided(tmp_path, a_gibibyte_a_sample, limit_bytes=GIB, **space)
    assert {one.outcome for one in search.study.records} == {"over_memory"}
    assert len(search.study.records) <= 16
    assert search.ended_because == no_recent_gain(trials=12, is_promising=False)


@pytest.mark.parametrize("seed", range(2))
def test_ddp_is_tried_before_dataparallel(tmp_path: Path, seed: int) -> None:
    gains = {"single": 1.0, "dp": 0.8, "ddp": 3.6}  # as where launching holds the loop

    def launch_bound(config: TrainingConfig) -> FakeTrial:
        loader, device = sides(config.model_copy(update={"strategy": "single", "world_size": 1}))
        return joined(
            config, loader=10 * loader, device=device / 100 * gains[config.strategy], peak_bytes=GIB
        )

    launcher = FakeLauncher(launch_bound, seed=seed, environment=FOUR_DEVICES)
    search = make_search(
        tmp_path, launcher, n_trials=8, limit_bytes=LIMIT, **SMALL, world_size=[1, 4]
    )
    search.run()
    _, first, *_ = (tried := [one.config.strategy for one in search.study.records])
    assert first == "ddp"
    assert tried.count("dp") <= 1


# What it leaves out


def test_loader_bound_search_varies_loaders(
    tmp_path: Path,
) -> None:
    search = guided(
        tmp_path,
        slow_loader,
        **{**SMALL, "micro_batch_size": 32, "amp_dtype": ["float32", "bfloat16"]},
    )
    tried = [loader_key(one.config) for one in search.study.records if one.config.num_workers]
    assert len(tried) >= 1
    assert len(tried) <= len(set(tried)) + 1, "the last one, beside the best at the own batch"


def test_device_bound_search_varies_devices(
    tmp_path: Path,
) -> None:
    search = guided(tmp_path, slow_device, **SMALL)
    tried = [device_key(one.config) for one in search.study.records if one.config.num_workers]
    assert len(tried) >= 2
    assert len(tried) <= len(set(tried)) + 1, "the last one, beside the best at the own batch"


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
def test_pinning_of_long_copies(tmp_path: Path, seed: int) -> None:
    cost = copying(1 / 3)
    search = guided(tmp_path, cost, seed=seed, **PINNING)
    assert any(one.config.pin_memory for one in search.study.records[:4])
    assert until_near(search, cost) <= 4
    _, found = confirmed(search)
    assert found.config.pin_memory


@pytest.mark.parametrize(
    ("loader_factor", "seed"), [(1.0, 0), (1e-3, 1)], ids=["slow device", "slow loader"]
)
def test_no_pinning_of_short_copies(tmp_path: Path, loader_factor: float, seed: int) -> None:
    cost = copying(0.002, loader_factor=loader_factor)
    search = guided(tmp_path, cost, seed=seed, **PINNING)
    assert not any(one.config.pin_memory for one in search.study.records)
    _, found = confirmed(search)
    assert not found.config.pin_memory


@pytest.mark.parametrize(
    ("share", "skipped"), [(0.002, {True}), (1 / 3, {False})], ids=["short", "long"]
)
def test_a_sample_that_pins_memory_is_skipped_where_copies_can_not_matter(
    tmp_path: Path, share: float, skipped: set[bool]
) -> None:
    search = guided(tmp_path, copying(share), n_trials=2, **PINNING)
    assert search.proposer.outlook(search.best) is not None
    tried = {device_key(one.config) for one in search.study.ended}
    samples = [one for one in composed(search) if one.pin_memory and device_key(one) not in tried]
    assert {search.proposer.skip(one) is not None for one in samples} == skipped


def test_memory_that_the_space_has_pinned_is_pinned_however_short_copies_are(
    tmp_path: Path,
) -> None:
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
        (with_shortfall(analytic_cost), SMALL, "little_gain_expected"),
        (with_shortfall(slow_loader), LOADERS | {"num_workers": [0, 4]}, "space_exhausted"),
        (
            with_shortfall(slow_loader),
            LOADERS | {"num_workers": [2, 4], "amp_dtype": ["float32", "bfloat16"]},
            "no_informative_candidate",
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


@pytest.mark.parametrize("n_trials", [1, 2, 16])
def test_given_number_of_trials_is_run(tmp_path: Path, n_trials: int) -> None:
    search = guided(tmp_path, slow_device, n_trials=n_trials, **PINNING)
    assert len(search.study.records) == n_trials
    assert search.ended_because == trials_asked_for(trials=n_trials)


def test_a_small_space_is_run_to_its_end_where_more_trials_are_asked_for(tmp_path: Path) -> None:
    space = {**SMALL, "micro_batch_size": [16, 32], "num_workers": [0, 4]}
    search = guided(tmp_path, analytic_cost, n_trials=50, **space)
    assert search.study.is_exhausted
    assert {one.config for one in search.study.records} == set(composed(search))
    assert search.ended_because == space_exhausted()


def test_the_best_at_the_users_own_batch_is_known_before_it_ends(tmp_path: Path) -> None:
    search = guided(tmp_path, memory_cliff, **SMALL)
    own = [
        one
        for one in search.study.records
        if one.is_feasible and one.config.global_batch_size == 32
    ]
    assert max(memory_cliff(one.config).samples_per_s for one in own) == pytest.approx(
        max(
            memory_cliff(one).samples_per_s
            for one in composed(search)
            if one.global_batch_size == 32
        ),
        rel=0.03,
    )
