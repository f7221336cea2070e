"""The contract of a launcher for groups: whatever one rank does, the trial has one outcome that names it, and ends.

Two gloo ranks on the CPU throughout, over the fork server. The two cases that each launcher must pass are in
test_launchers.py; which rank is named is tested on recorded answers, in test_group_reports.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autotune.launch.local import LocalLauncher
from autotune.policy import WindowRules
from autotune.protocol.messages import Extras
from autotune.records.measurement import Block, uneven_ranks
from autotune.records.trial import TrialResult
from tests.launch.conftest import GENEROUS_S, TWO_RANKS, Rig, in_user_ranks, rig_over
from tests.launch.user_ranks import PAUSE_S, STANDSTILL_S
from tests.processes import marked

pytestmark = pytest.mark.slow
HANG_S = 7.0
"""A deadline that two forked ranks have long begun to train by."""
ENDLESS = WindowRules(max_s=600.0, precision=1e-9, block_s=0.02)
LONG = WindowRules(max_s=1.5, precision=1e-9, block_s=0.02)
GROWTH_INTERVAL = 2000
"""Good steps after which a GradScaler tries a larger scale, and may skip one."""
FAR_OFF_S = 120.0
"""A deadline that is not to be met, for the ranks are seen to stand still."""


def says_go(after: int) -> Callable[[tuple[Block, ...]], None]:
    """Lets the ranks' model act once so many blocks of the window have come."""

    def see(blocks: tuple[Block, ...]) -> None:
        in_window = [block for block in blocks if not block.is_warm_up]
        if len(in_window) >= after and not Path("went").exists():
            Path("went").touch()
            Path("go").touch()

    return see


def assert_over(rig: Rig) -> None:
    """That nothing of the group is left, and that the server's next trial is not affected by it."""
    assert not rig.left_over()
    rig.assert_next_trial_works()


@pytest.mark.parametrize(
    ("model", "rank"), [("raising_in_1", 1), ("raising_in_0_while_1_hangs_deaf", 0)]
)
def test_an_exception_in_one_rank_is_the_groups_with_that_ranks_traceback(
    rig: Rig, model: str, rank: int
) -> None:
    result = rig.with_ending(follow_within_s=0.5).run_group(model)
    assert result.outcome == "crashed"
    assert result.reason.startswith(f"rank {rank}: ValueError: ")
    assert result.failure is not None
    assert "in _raise" in result.failure.traceback
    assert "/autotune/worker/" not in result.failure.traceback
    assert_over(rig)


def test_a_rank_that_is_killed_while_others_wait_for_it_is_named(rig: Rig) -> None:
    result = rig.with_ending(follow_within_s=0.5).run_group("killing_itself_in_1", num_workers=1)
    assert result.outcome == "crashed"
    assert result.reason.startswith("rank 1: ")
    assert "SIGKILL" in result.reason
    assert_over(rig)


def test_of_a_group_that_hangs_the_rank_is_told_that_the_others_wait_for(rig: Rig) -> None:
    result = rig.run_group("hanging_in_1", deadline_s=HANG_S)
    assert result.outcome == "timeout"
    assert result.reason.startswith("rank 1: "), result.reason
    assert result.failure is not None
    assert "in hang" in result.failure.traceback
    assert "user_ranks.py" in result.failure.signature
    assert "site-packages" not in result.failure.traceback, "the user's frames alone"
    assert_over(rig)


@pytest.mark.parametrize(
    ("model", "place"),
    [("hanging_in_1_at_last", "in hang"), ("calling_the_others_alone_in_1", "in <lambda>")],
)
def test_a_group_that_stands_still_in_its_window_is_ended_long_before_its_deadline(
    rig: Rig, model: str, place: str
) -> None:
    result = rig.run_group(model, deadline_s=FAR_OFF_S, window=ENDLESS, should_end=says_go(after=3))
    assert result.outcome == "timeout"
    assert result.reason.startswith("rank 1: "), result.reason
    assert result.failure is not None
    assert place in result.failure.traceback
    assert "user_ranks.py" in result.failure.signature
    assert_over(rig)


def test_a_pause_as_long_as_one_before_is_no_standstill(rig: Rig) -> None:
    result = rig.with_ending(stacks_within_s=0.0).run_group(
        "pausing_in_1", window=LONG, should_end=says_go(after=3)
    )
    assert (result.outcome, result.reason) == ("ok", "")
    assert result.measurement is not None
    assert max(block.seconds for block in result.measurement.blocks) > PAUSE_S
    assert_over(rig)


def test_a_group_that_goes_on_after_all_is_not_ended(rig: Rig) -> None:
    """Its ranks have written where they stand, half a second before the pause is over. The window is longer than the
    parent's patience, and the items take time but no core."""
    patient = rig.with_ending(stacks_within_s=3.0)
    window = WindowRules(max_s=5.0, precision=1e-9, block_s=0.02)
    result = patient.run_group(
        "pausing_once_in_1", dataset="SlowInRank1", window=window, should_end=says_go(after=3)
    )
    assert (result.outcome, result.reason) == ("ok", "")
    assert_over(rig)


def test_what_follows_the_window_is_no_standstill(rig: Rig) -> None:
    result = rig.with_ending(stacks_within_s=0.0).run_group(
        "impatient", extras=Extras(loader_ceiling=True, device_ceiling=True, stretch_s=0.7)
    )
    assert (result.outcome, result.reason) == ("ok", "")
    assert result.measurement is not None
    assert result.measurement.after_s > STANDSTILL_S
    assert result.measurement.notes == ()
    assert_over(rig)


def test_what_follows_the_window_is_measured_of_each_rank_and_of_all(rig: Rig) -> None:
    extras = Extras(loader_ceiling=True, device_ceiling=True, stretch_s=0.1)
    result = rig.run_group("speaking", num_workers=1, extras=extras)
    assert (result.outcome, result.reason) == ("ok", "")
    measured = result.measurement
    assert measured is not None
    assert measured.notes == ()
    talk = measured.communication
    assert talk is not None
    assert (talk.bytes_exchanged, talk.exchange_s > 0, talk.step_s > 0) == (4 * 10, True, True), (
        "of 4 * 2 + 2 weights"
    )
    for what in ("loader_ceiling", "device_ceiling"):
        own = [getattr(one, what) for one in measured.ranks]
        assert None not in own, "each rank's"
        assert own[0] != own[1]
        assert getattr(measured, what) == pytest.approx(2 * min(own)), (
            "all at the pace of the slowest"
        )
    assert_over(rig)


def test_a_rank_whose_loader_is_slower_is_named(rig: Rig) -> None:
    result = rig.with_ending(stacks_within_s=0.0).run_group(
        "impatient", dataset="SlowInRank1", extras=Extras(loader_ceiling=True, stretch_s=0.1)
    )
    assert (result.outcome, result.reason) == ("ok", "")
    assert result.measurement is not None
    (named,) = uneven_ranks(result.measurement.ranks).items()
    assert (named[0], named[1].side) == (1, "loader")


def test_an_iterable_dataset_that_repeats_itself_in_each_rank_is_refused(rig: Rig) -> None:
    result = rig.run_group("speaking", dataset="Repeating")
    assert result.outcome == "invalid"
    assert result.measurement is None
    assert_over(rig)


def test_an_iterable_dataset_that_shares_its_items_out_is_measured(rig: Rig) -> None:
    result = rig.run_group("speaking", dataset="Sharing")
    assert (result.outcome, result.reason) == ("ok", "")
    assert result.measurement is not None
    assert result.measurement.samples_per_s > 0


def test_ranks_hold_equal_weights_and_exchange_gradients_in_a_steps_last_batch_alone(
    rig: Rig,
) -> None:
    result = rig.run_group("Comparing", grad_accum_steps=2)
    assert (result.outcome, result.reason) == ("ok", "")


@pytest.mark.parametrize("hook", [None, "fp16"])
def test_steps_that_the_fp16_hook_makes_the_scaler_skip_are_none_of_the_windows(
    rig: Rig, hook: str | None
) -> None:
    """The hook rounds before it divides: what float32 holds becomes infinite on its way, until the scale has fallen."""
    result = rig.run_group("Steep", amp_dtype="float16", ddp={"comm_hook": hook})
    assert (result.outcome, result.reason) == ("ok", "")
    assert result.measurement is not None
    assert (result.measurement.skipped_steps > 0) == (hook is not None)
    timed = sum(block.batches for block in result.measurement.blocks)
    for rank in range(2):
        steps = rig.note(f"steps-{rank}")
        assert ("0" in steps[:-timed]) == (hook is not None)
        assert steps[-timed:].count("0") <= len(steps) // GROWTH_INTERVAL


def test_gradients_that_the_fp16_hook_makes_infinite_end_the_trial_where_nothing_scales_them(
    rig: Rig,
) -> None:
    result = rig.run_group("precipitous", ddp={"comm_hook": "fp16"})
    assert result.outcome == "diverged"
    assert rig.run_group("precipitous", lr=1e-12).outcome == "ok", "float32 holds them"
    assert_over(rig)


def test_what_the_ranks_of_a_group_hold_together_is_held_against_the_limit(rig: Rig) -> None:
    result = rig.run_limited(1000 * 2**20, settings=TWO_RANKS, model=in_user_ranks("holding"))
    assert result.outcome == "host_oom"
    assert result.violation is not None
    assert_over(rig)


def test_a_group_whose_server_is_killed_is_a_crash(rig: Rig) -> None:
    result = rig.run_group("killing_the_server_in_1")
    assert result.outcome == "crashed"
    assert "SIGKILL" in result.reason
    assert_over(rig)


def test_groups_that_run_at_the_same_time_do_not_meet(rig: Rig, tmp_path: Path) -> None:
    other = rig_over(LocalLauncher(tmp_path / "server.log"), tmp_path / "other")
    try:
        assert other.runner().describe(deadline_s=GENEROUS_S).environment is not None, (
            "both servers must be there"
        )
        with ThreadPoolExecutor() as threads:
            results = list(threads.map(run_meeting, (rig, other)))
    finally:
        other.launcher.close()
    assert [(one.outcome, one.reason) for one in results] == [("ok", "")] * 2
    assert [one.measurement and len(one.measurement.ranks) for one in results] == [2, 2]
    assert not marked(other.launcher._token)
    assert not rig.left_over()


def run_meeting(rig: Rig) -> TrialResult:
    """A group whose ranks compare whose they are."""
    return rig.run_group("meeting_its_own_alone")
