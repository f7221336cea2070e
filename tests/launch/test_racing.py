"""The contract of a launcher for trials that may be stopped early: their blocks come while they run, and a reason ends
them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.launch.launcher import Exit, Launch, Launcher
from autotune.launch.local import LocalLauncher
from autotune.launch.runner import ShouldEnd
from autotune.policy import WindowRules
from autotune.records.measurement import Block
from autotune.records.trial import TrialResult
from tests.launch.conftest import (
    GENEROUS_S,
    SHORT,
    TWO_RANKS,
    Rig,
    forked_first,
    in_user_ranks,
    rig_over,
)

ENDLESS = WindowRules(max_s=600.0, precision=1e-9, block_s=0.02)
"""A window that only a reason or the deadline ends."""
LONG = WindowRules(max_s=1.5, precision=1e-9, block_s=0.01)
"""Dozens of blocks, for someone who looks twenty times a second."""
REASON = "it can't win"


@dataclass(slots=True)
class Judge:
    """Has a trial ended at its second look or later, once it has shown so many blocks; keeps what it was shown."""

    after: int
    shown: list[tuple[Block, ...]] = field(default_factory=list)
    reasons: int = 0

    def __call__(self, blocks: tuple[Block, ...]) -> str | None:
        self.shown.append(blocks)
        if len(self.shown) == 1 or len(blocks) < self.after:
            return None
        self.reasons += 1
        return REASON


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A trial that a judge has ended, and what was there afterwards."""

    rig: Rig
    judge: Judge
    result: TrialResult
    left_over: list[str]
    files: list[str]


def run(rig: Rig, should_end: ShouldEnd | None, window: WindowRules, **parts: Any) -> TrialResult:
    """A trial of batches of four; `settings`: of its configuration."""
    config = TrainingConfig(**({"micro_batch_size": 4} | parts.pop("settings", {})))
    return rig.runner(**parts).run(
        config, name="trial", deadline_s=GENEROUS_S, window=window, should_end=should_end
    )


def counted(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """The blocks of the window, or of the warm-up if there are no others."""
    return tuple(block for block in blocks if not block.is_warm_up) or blocks


@pytest.fixture(scope="module")
def ended(any_launcher: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """One for all rules that such a trial can be held against: to start an interpreter takes seconds."""
    folder = tmp_path_factory.mktemp("trial")
    rig, judge = rig_over(any_launcher, folder), Judge(after=4)
    result = run(rig, judge, ENDLESS, settings={"num_workers": 1, "persistent_workers": True})
    files = sorted(one.name for one in folder.iterdir())
    return Ended(rig=rig, judge=judge, result=result, left_over=rig.left_over(), files=files)


@forked_first
def test_blocks_come_one_after_the_other_while_the_trial_runs(ended: Ended) -> None:
    shown = ended.judge.shown
    assert len(shown) > 1
    for before, after in pairwise(shown):
        assert len(after) > len(before)
        assert after[: len(before)] == before
    assert all(block.samples == 4 * block.batches and block.seconds > 0 for block in shown[-1])


@forked_first
def test_a_reason_ends_the_trial_within_its_window_and_is_told_with_the_blocks(
    ended: Ended,
) -> None:
    result = ended.result
    assert (result.outcome, result.reason) == ("pruned", REASON)
    assert result.blocks == counted(ended.judge.shown[-1])
    assert result.measurement is None
    assert result.log == f"{ended.rig.folder.name}/trial.log"
    assert result.wall_s > 0


@forked_first
def test_nobody_is_asked_again_once_there_is_a_reason(ended: Ended) -> None:
    assert ended.judge.reasons == 1


@forked_first
def test_nothing_is_left_of_a_trial_that_was_stopped_and_the_next_one_works(ended: Ended) -> None:
    assert not ended.left_over
    assert ended.files == ["payload", "trial.log"]
    if ended.rig.server_pid is not None:  # a fresh interpreter knows nothing of the trial before
        ended.rig.assert_next_trial_works()


@pytest.mark.slow
def test_a_trial_that_nobody_stops_is_measured_as_any_other(rig: Rig) -> None:
    judge = Judge(after=10**6)
    result = run(rig, judge, LONG)
    assert (result.outcome, result.reason, result.blocks) == ("ok", "", ())
    assert result.measurement is not None
    assert judge.shown
    in_window = counted(judge.shown[-1])
    assert in_window == result.measurement.blocks[: len(in_window)]
    assert not rig.left_over()


@dataclass(frozen=True, slots=True)
class Counting:
    """A launcher that notes how many blocks came of each trial."""

    launcher: Launcher
    counts: list[int]

    def launch(self, launch: Launch) -> Exit:
        done = self.launcher.launch(launch)
        self.counts.append(len(launch.blocks))
        return done

    def close(self) -> None:
        """It is not this one's."""


@pytest.mark.slow
def test_no_block_comes_unless_asked_for(rig: Rig) -> None:
    counting = Counting(rig.launcher, [])
    watched = Rig(launcher=counting, folder=rig.folder)  # type: ignore[arg-type] # its token and server are not asked for
    run(watched, None, SHORT)
    run(watched, Judge(after=10**6), SHORT)
    assert counting.counts[0] == 0
    assert counting.counts[1] > 0


@pytest.mark.slow
def test_of_a_group_the_blocks_of_rank_0_stand_for_all_ranks(rig: Rig) -> None:
    judge = Judge(after=5)
    result = run(rig, judge, ENDLESS, settings=TWO_RANKS, model=in_user_ranks("speaking"))
    assert (result.outcome, result.reason) == ("pruned", REASON)
    assert result.blocks == counted(judge.shown[-1])
    assert {block.samples / block.batches for block in result.blocks} == {2 * 4}
    assert not rig.left_over()
    rig.assert_next_trial_works()


@dataclass(frozen=True, slots=True)
class BeginningAnew:
    """A launcher whose first host is lost with some blocks written; another one begins the trial anew."""

    lost: tuple[Block, ...]
    anew: tuple[Block, ...]

    def launch(self, launch: Launch) -> Exit:
        assert launch.should_end is not None
        launch.blocks.extend(self.lost)
        assert not launch.should_end()
        launch.blocks.clear()
        assert not launch.should_end()
        launch.blocks.extend(self.anew)
        assert launch.should_end()
        return Exit(code=None, ended_for="cancelled", wall_s=1.0)

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("count", [1, 2, 3])
def test_blocks_of_a_lost_host_do_not_count(tmp_path: Path, count: int) -> None:
    lost = tuple(Block(samples=4, batches=1, seconds=1.0, data_wait_s=0.0) for _ in range(count))
    anew = tuple(
        Block(samples=8, batches=2, seconds=0.123456789, data_wait_s=0.0) for _ in range(4)
    )
    judge = Judge(after=4)
    rig = Rig(launcher=BeginningAnew(lost, anew), folder=tmp_path)  # type: ignore[arg-type] # as above
    result = run(rig, judge, SHORT)
    assert result.blocks == judge.shown[-1] == anew
