"""The blocks of a trial under way, as the parent reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from autotune.launch.runner import BlockStream
from autotune.records.measurement import Block


def block(batches: int) -> Block:
    return Block(samples=4 * batches, batches=batches, seconds=0.5, data_wait_s=0.0)


@pytest.fixture
def stream(tmp_path: Path) -> BlockStream:
    """It ends a trial at its third block."""
    return BlockStream(
        path=tmp_path / "blocks",
        ranks=1,
        should_end=lambda blocks: "enough" if len(blocks) >= 3 else None,
    )


def test_before_a_window_begins_there_are_no_blocks(stream: BlockStream) -> None:
    assert not stream.is_lost()
    assert stream.blocks == []


def test_a_line_that_is_not_whole_yet_is_left_until_it_is(stream: BlockStream) -> None:
    first, second = (f"{block(batches).model_dump_json()}\n" for batches in (1, 2))
    stream.path.write_text(first + second[:20])
    assert not stream.is_lost()
    assert stream.blocks == [block(1)]
    stream.path.write_text(first + second)
    assert not stream.is_lost()
    assert stream.blocks == [block(1), block(2)]


def test_a_file_that_was_begun_anew_is_read_from_its_start(stream: BlockStream) -> None:
    stream.path.write_text("".join(f"{block(batches).model_dump_json()}\n" for batches in (1, 2)))
    assert not stream.is_lost()
    stream.path.unlink()
    assert not stream.is_lost()
    assert stream.blocks == []
    stream.path.write_text(f"{block(7).model_dump_json()}\n")
    assert not stream.is_lost()
    assert stream.blocks == [block(7)]


def test_a_line_that_was_cut_off_is_passed_over_and_what_follows_is_read(
    stream: BlockStream,
) -> None:
    lines = [f"{block(batches).model_dump_json()}\n" for batches in range(1, 5)]
    stream.path.write_text(lines[0] + lines[1][:20] + lines[1] + lines[2] + lines[3])
    assert stream.is_lost()
    assert stream.blocks == [block(1), block(3), block(4)]


def test_once_there_is_a_reason_it_stays_and_nobody_is_asked_again(stream: BlockStream) -> None:
    stream.path.write_text(
        "".join(f"{block(batches).model_dump_json()}\n" for batches in (1, 2, 3))
    )
    assert stream.is_lost()
    stream.should_end = lambda blocks: pytest.fail("asked again")
    stream.path.unlink()
    assert stream.is_lost()
    stopped = stream.stopped()
    assert (stopped.outcome, stopped.reason, stopped.blocks) == (
        "pruned",
        "enough",
        (block(1), block(2), block(3)),
    )


def test_nobody_is_asked_without_news(stream: BlockStream) -> None:
    stream.path.write_text(f"{block(1).model_dump_json()}\n")
    assert not stream.is_lost()
    stream.should_end = lambda blocks: pytest.fail("asked without a new block")
    assert not stream.is_lost()


def test_what_rank_0_has_seen_is_taken_for_all_ranks(stream: BlockStream) -> None:
    stream.ranks = 4
    stream.path.write_text(f"{block(2).model_dump_json()}\n")
    assert not stream.is_lost()
    assert stream.blocks == [block(2).model_copy(update={"samples": 4 * 4 * 2})]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_no_block_and_leaves_no_descriptor(
    stream: BlockStream, make: Callable[[Path], None]
) -> None:
    make(stream.path)
    before = psutil.Process().num_fds()
    assert not any(stream.is_lost() for _ in range(5))
    assert psutil.Process().num_fds() == before
