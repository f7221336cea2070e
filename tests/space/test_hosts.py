"""Resolve a space over several hosts: ranks, workers, notes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from autotune.config.environment import Environment
from autotune.config.plan import WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.messages.space import spread_without_effect, world_size_capped
from autotune.note import Note
from autotune.space import constraints as rules
from autotune.space.space import ResolvedSpace, compose
from tests.factories import CPU, FOUR_DEVICES, make_environment, make_facts, make_space

LONG: dict[str, Any] = {"dataset_length": 10**6}


def over(environment: Environment, hosts: int, *, is_spread: bool = False) -> Environment:
    return environment.model_copy(update={"hosts": hosts, "is_spread": is_spread})


def ranks_of(space: ResolvedSpace) -> tuple[list[Any], list[Any]]:
    return list(space.domains["world_size"]), list(space.domains["strategy"])


def obstacle(config: dict[str, Any], facts: WorkloadFacts, environment: Environment) -> str | None:
    return rules.obstacle(TrainingConfig.model_validate(config), facts, environment, drop_last=True)


# The machine


def test_fingerprint_ignores_hosts() -> None:
    assert over(FOUR_DEVICES, 3, is_spread=True).fingerprint == FOUR_DEVICES.fingerprint


def test_an_environment_of_before_is_one_host() -> None:
    settings = FOUR_DEVICES.model_dump(exclude={"hosts", "is_spread"})
    assert Environment.model_validate(settings).hosts == 1
    with pytest.raises(ValidationError):
        Environment.model_validate({**settings, "hosts": 0})


# Rules


def test_all_hosts_together_have_room_for_ranks() -> None:
    for environment in (FOUR_DEVICES, CPU):
        three = over(environment, 3)
        assert rules.most_ranks(three) == 12
        assert obstacle({"strategy": "ddp", "world_size": 12}, make_facts(), three) is None
        refused = obstacle({"strategy": "ddp", "world_size": 13}, make_facts(), three)
        assert re.search(r"^world_size.* 12, .*world_size=13", str(refused))


def test_data_parallel_stays_on_one_host() -> None:
    three = over(FOUR_DEVICES, 3)
    assert obstacle({"strategy": "dp", "world_size": 4}, make_facts(), three) is None
    refused = obstacle({"strategy": "dp", "world_size": 8}, make_facts(), three)
    assert re.search(r"^world_size.* 4, .*'dp'", str(refused))


def test_named_device_on_a_lone_host() -> None:
    named = make_environment(device="cuda:1", device_count=4)
    assert (rules.most_ranks(named), rules.most_ranks(over(named, 2))) == (3, 8)


@pytest.mark.parametrize(
    ("ranks", "packed", "spread"),
    [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 2), (6, 3, 2), (12, 4, 4), (15, 5, 5)],
)
def test_ranks_on_host(ranks: int, packed: int, spread: int) -> None:
    found = [
        rules.ranks_on_host(ranks, over(FOUR_DEVICES, 3, is_spread=is_spread))
        for is_spread in (False, True)
    ]
    assert found == [packed, spread]
    assert rules.ranks_on_host(ranks, FOUR_DEVICES) == ranks


# Default ranges


@pytest.mark.parametrize(
    ("devices", "hosts", "sizes"),
    [
        (1, 3, [1, 2, 3]),
        (1, 6, [1, 2, 4, 6]),
        (4, 1, [1, 2, 3, 4]),
        (4, 3, [1, 2, 3, 4, 8, 12]),
        (8, 8, [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64]),
        (8, 128, [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256]),
    ],
)
def test_whole_hosts_are_tried(devices: int, hosts: int, sizes: list[int]) -> None:
    space = make_space(environment=over(make_environment(device_count=devices), hosts), **LONG)
    strategies = ["single", "dp", "ddp"] if devices > 1 else ["single", "ddp"]
    assert ranks_of(space) == (sizes, strategies)


def test_each_rank_has_a_sample() -> None:
    environment = over(FOUR_DEVICES, 32)
    kept = make_space(environment=environment, global_batch="keep", **LONG)
    small = make_space(
        environment=environment, max_batch_scale=1, baseline=TrainingConfig(micro_batch_size=2)
    )
    listed = make_space(
        {"micro_batch_size": [64]}, environment=environment, max_batch_scale=1, **LONG
    )
    assert [max(ranks_of(space)[0]) for space in (kept, small, listed)] == [32, 4, 128]
    for space in (kept, small):
        config = compose(
            {"strategy": "ddp", "world_size": max(space.group_sizes), "micro_batch_size": 1}, space
        )
        assert isinstance(config, TrainingConfig) == (space is kept)


@pytest.mark.parametrize(
    ("environment", "given_space", "ranks"),
    [
        (CPU, {}, ([1], ["single"])),
        (CPU, {"strategy": "ddp"}, ([2, 4, 8], ["ddp"])),
        (FOUR_DEVICES, {"strategy": "dp"}, ([2, 3, 4], ["dp"])),
        (FOUR_DEVICES, {"world_size": [1, 8]}, ([1, 8], ["single", "ddp"])),
    ],
)
def test_ranks_over_three_hosts(
    environment: Environment, given_space: dict[str, Any], ranks: tuple[list[Any], list[Any]]
) -> None:
    assert ranks_of(make_space(given_space, environment=over(environment, 3))) == ranks


def test_baselines_group_over_hosts() -> None:
    baseline = TrainingConfig(strategy="ddp", world_size=6)
    space = make_space(environment=over(FOUR_DEVICES, 3), baseline=baseline)
    assert ranks_of(space)[0] == [1, 2, 3, 4, 6, 8, 12]


# Workers


@pytest.mark.parametrize(
    ("ranks", "packed", "spread"), [(4, 8, 16), (8, 8, 10), (12, 8, 8)]
)  # of 32 workers that the ranks on a host share
def test_workers_are_divided_among_ranks(ranks: int, packed: int, spread: int) -> None:
    params: dict[str, Any] = {"strategy": "ddp", "world_size": ranks, "num_workers": 32}
    found = []
    for is_spread in (False, True):
        config = compose(
            params, make_space(environment=over(FOUR_DEVICES, 3, is_spread=is_spread), **LONG)
        )
        assert isinstance(config, TrainingConfig)
        found.append(config.num_workers)
    assert found == [packed, spread]


def test_baselines_workers_count_on_one_host() -> None:
    baseline = TrainingConfig(strategy="ddp", world_size=8, num_workers=16)
    caps = [
        make_space(environment=over(FOUR_DEVICES, hosts), baseline=baseline).workers_cap
        for hosts in (2, 4)
    ]
    assert caps == [64, 64]
    spread = make_space(environment=over(FOUR_DEVICES, 4, is_spread=True), baseline=baseline)
    assert spread.workers_cap == 32


# What is said


@pytest.mark.parametrize(
    ("hosts", "is_spread", "given_space", "notes"),
    [
        (3, False, {}, ()),
        (3, True, {}, ()),
        (1, True, {}, (spread_without_effect(hosts=1),)),
        (3, True, {"world_size": 1}, (spread_without_effect(hosts=3),)),
        (256, False, {}, (world_size_capped(most=256, devices=1024, hosts=256),)),
        (256, False, {"world_size": [1, 4]}, ()),
    ],
)
def test_notes_on_hosts(
    hosts: int, is_spread: bool, given_space: dict[str, Any], notes: tuple[Note, ...]
) -> None:
    environment = over(FOUR_DEVICES, hosts, is_spread=is_spread)
    assert make_space(given_space, environment=environment, **LONG).notes == notes
