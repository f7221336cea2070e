"""A trial is ended once its blocks say so, as far as they have come."""

from __future__ import annotations

from math import inf, nan

import pytest

from autotune.launch.processes import _blocks_in
from autotune.launch.runner import Race
from autotune.records.measurement import Block


def block(batches: int, *, seconds: float = 0.5) -> Block:
    return Block(samples=4 * batches, batches=batches, seconds=seconds, data_wait_s=0.0)


@pytest.fixture
def race() -> Race:
    """It ends a trial at its third block."""
    return Race(ranks=1, should_end=lambda blocks: "enough" if len(blocks) >= 3 else None)


def test_nobody_is_asked_without_a_new_block(race: Race) -> None:
    own = race.should_end
    race.should_end = lambda blocks: pytest.fail("asked without a block")
    assert not race.is_lost()
    race.blocks.append(block(1))
    race.should_end = own
    assert not race.is_lost()
    race.should_end = lambda blocks: pytest.fail("asked without a new block")
    assert not race.is_lost()


def test_a_reason_stays(race: Race) -> None:
    race.blocks += [block(1), block(2), block(3)]
    assert race.is_lost()
    race.should_end = lambda blocks: pytest.fail("asked again")
    race.blocks.clear()
    assert race.is_lost()


def test_rank_0_stands_for_all(race: Race) -> None:
    race.ranks = 4
    race.blocks += [block(2)] * 3
    assert race.is_lost()
    result = race.result()
    assert (result.outcome, result.reason) == ("pruned", "enough")
    assert result.blocks == 3 * (block(2).model_copy(update={"samples": 4 * 4 * 2}),)


@pytest.mark.parametrize(
    "sent",
    [
        None,
        "block",
        {},
        {"samples": "many"},
        *(block(1).model_dump() | {"seconds": seconds} for seconds in (0.0, -1.0, nan, inf)),
        block(1).model_dump() | {"samples": 0},
    ],
)
def test_what_is_no_block_is_none(sent: object) -> None:
    assert _blocks_in(sent) == []
    assert _blocks_in(block(1).model_dump()) == [block(1)]
