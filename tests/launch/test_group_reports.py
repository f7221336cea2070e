"""Of what the ranks of a group answer, one report is made: their measurement, or the outcome that explains the others.

No process is started here.
"""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

from autotune.launch.answers import one_report
from autotune.launch.launcher import Exit
from autotune.protocol.messages import RankReport
from autotune.records.measurement import RankFigures
from autotune.records.trial import Failure, Outcome, TrialResult
from tests.factories import make_measurement

MAIN = "Thread 0x01 (most recent call first):\n"
BACKWARD = f'{MAIN}  File "/x/torch/autograd/graph.py", line 9 in _engine_run_backward\n'
FORWARD = '  File "/home/me/net.py", line 12, in forward'
HANGING = f'{MAIN}  File "/home/me/net.py", line 12 in forward\n'
COLLECTIVE = (
    '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 7 in all_reduce\n'
)
CALLING = f"{MAIN}{COLLECTIVE}{HANGING.removeprefix(MAIN)}"


def measured(rank: int, blocks: int = 10) -> RankReport:
    measurement = make_measurement(100.0)
    window = measurement.window.model_copy(update={"blocks": measurement.blocks[:blocks]})
    own = RankFigures(
        rank=rank,
        device="cpu",
        samples_per_s=100.0,
        data_wait_fraction=0.1,
        busy_fraction=0.5,
        peak_memory_bytes=2**30,
    )
    part = measurement.model_copy(update={"ranks": (own,), "window": window})
    return RankReport(result=TrialResult(outcome="ok", measurement=part))


def failed(outcome: Outcome, reason: str = "why", *, is_collateral: bool = False) -> RankReport:
    failure = Failure(signature=f"{reason} at net.py:1", traceback=reason)
    return RankReport(
        result=TrialResult(outcome=outcome, reason=reason, failure=failure),
        is_collateral=is_collateral,
    )


CLOSED = failed("crashed", "RuntimeError: Connection closed by peer", is_collateral=True)


def joined(
    *reports: RankReport | None,
    codes: tuple[int | None, ...] | None = None,
    stacks: list[str] | None = None,
    over_memory: TrialResult | None = None,
    **ending: Any,
) -> RankReport:
    """One report of a group. Ranks that answered have ended in their order, the others not, unless it is said."""
    ended = codes if codes is not None else tuple(None if one is None else 0 for one in reports)
    first = next((rank for rank, code in enumerate(ended) if code is not None), None)
    values: dict[str, Any] = {"code": ended[0], "codes": ended, "first": first, "wall_s": 1.0}
    exit_ = Exit(**(values | ending))
    stacks = stacks or [""] * len(reports)
    return one_report(reports, exit_, stacks=stacks, deadline_s=8.0, over_memory=over_memory)


def told(report: RankReport) -> tuple[str, int | None]:
    """Return the outcome, and the rank that its reason names."""
    named = re.match(r"rank (\d+): ", report.result.reason)
    return report.result.outcome, None if named is None else int(named[1])


def test_ranks_that_have_all_measured_are_one_measurement() -> None:
    report = joined(measured(0), measured(1))
    assert (report.result.outcome, report.result.reason) == ("ok", "")
    assert report.result.measurement is not None
    assert [one.rank for one in report.result.measurement.ranks] == [0, 1]
    assert report.result.measurement.samples_per_s == pytest.approx(200.0)


def test_a_measurement_that_was_kept_counts_whatever_became_of_its_process() -> None:
    assert joined(measured(0), measured(1), codes=(0, -signal.SIGKILL)).result.outcome == "ok"
    assert (
        joined(measured(0), measured(1), codes=(0, None), ended_for="straggling").result.outcome
        == "ok"
    )


def test_measurements_that_do_not_match_are_an_outcome() -> None:
    report = joined(measured(0), measured(1, blocks=9))
    assert told(report) == ("crashed", None)
    assert report.result.measurement is None


def test_a_failure_of_a_ranks_own_explains_those_of_the_others() -> None:
    report = joined(CLOSED, failed("crashed", "ValueError: broken"))
    assert told(report) == ("crashed", 1)
    assert report.result.failure is not None
    assert report.result.failure.traceback == "ValueError: broken"
    assert not report.is_collateral


@pytest.mark.parametrize(
    ("outcomes", "rank"),
    [
        (("crashed", "oom"), 1),
        (("crashed", "host_oom"), 1),
        (("oom", "host_oom"), 0),
        (("diverged", "crashed"), 1),
        (("crashed", "crashed"), 0),
        (("invalid", "diverged"), 0),
        (("diverged", "crashed", "oom"), 2),
    ],
)
def test_of_several_failures_memory_goes_before_crashes_and_these_before_others(
    outcomes: tuple[Outcome, ...], rank: int
) -> None:
    report = joined(*(failed(outcome) for outcome in outcomes))
    assert told(report) == (outcomes[rank], rank)


@pytest.mark.parametrize(
    ("reports", "ending", "outcome", "rank", "named"),
    [
        # a failure of its own next to a success, or to a process that died
        ((measured(0), failed("diverged")), {}, "diverged", 1, "why"),
        ((None, failed("oom")), {"codes": (-signal.SIGABRT, 0)}, "oom", 1, "why"),
        # a rank that died without a word explains what the others saw
        ((CLOSED, None), {"codes": (0, -signal.SIGKILL)}, "crashed", 1, "SIGKILL"),
        ((None, CLOSED), {"codes": (3, 0)}, "crashed", 0, "3"),
        # of several, the one that the kernel ended, else the first
        (
            (None, None),
            {"codes": (-signal.SIGABRT, -signal.SIGKILL), "was_oom_killed": True},
            "host_oom",
            1,
            "",
        ),
        (
            (None, None),
            {"codes": (-signal.SIGABRT, -signal.SIGSEGV), "first": 1},
            "crashed",
            1,
            "SIGSEGV",
        ),
        # one that went on after another is told by both
        ((CLOSED, None), {"ended_for": "straggling"}, "timeout", 1, "rank 0"),
    ],
)
def test_one_rank_explains_the_others(
    reports: tuple[RankReport | None, ...],
    ending: dict[str, Any],
    outcome: Outcome,
    rank: int,
    named: str,
) -> None:
    report = joined(*reports, **ending)
    assert told(report) == (outcome, rank)
    assert named in report.result.reason


def test_a_group_that_was_ended_for_its_memory_is_out_of_it() -> None:
    over = TrialResult(outcome="host_oom", reason="too much", violation=0.5)
    report = joined(None, None, ended_for="memory", over_memory=over)
    assert report.result == over
    assert (
        told(joined(None, failed("oom"), codes=(None, 0), ended_for="memory", over_memory=over))[0]
        == "oom"
    )


def test_the_one_rank_that_has_not_answered_is_the_one_that_was_waited_for() -> None:
    report = joined(CLOSED, None, ended_for="deadline", stacks=["", BACKWARD])
    assert told(report) == ("timeout", 1)
    assert "8 s" in report.result.reason
    assert report.result.failure is not None
    assert "in _engine_run_backward" in report.result.failure.traceback


@pytest.mark.parametrize("stuck", [0, 1])
def test_where_no_rank_answers_the_one_outside_of_a_collective_is_named(stuck: int) -> None:
    stacks = [HANGING if rank == stuck else BACKWARD for rank in range(2)]
    report = joined(None, None, ended_for="deadline", stacks=stacks)
    assert told(report) == ("timeout", stuck)
    assert report.result.failure is not None
    assert report.result.failure.signature == "time-out at net.py:12"
    head, frame = report.result.failure.traceback.splitlines()
    assert f"rank {stuck}" in head
    assert frame == FORWARD


@pytest.mark.parametrize("stack", [HANGING, CALLING])
def test_of_a_group_that_stands_still_the_rank_is_named_that_hangs_or_calls_the_others_alone(
    stack: str,
) -> None:
    report = joined(None, None, ended_for="standstill", stacks=[BACKWARD, stack])
    assert told(report) == ("timeout", 1)
    assert report.result.failure is not None
    assert report.result.failure.signature == "time-out at net.py:12"


def test_a_rank_that_sees_the_end_of_others_after_it_has_told_where_it_stood_is_still_named() -> (
    None
):
    report = joined(
        None, CLOSED, codes=(None, 0), ended_for="standstill", stacks=[BACKWARD, CALLING]
    )
    assert told(report) == ("timeout", 1)
    assert told(joined(CLOSED, CLOSED, ended_for="standstill", stacks=[BACKWARD, HANGING])) == (
        "timeout",
        1,
    )


def test_a_rank_that_wrote_no_stack_goes_before_those_that_wait() -> None:
    report = joined(None, None, None, ended_for="deadline", stacks=[BACKWARD, "", BACKWARD])
    assert told(report) == ("timeout", 1)
    assert re.findall(r"\d+", report.result.reason.rpartition("ranks ")[2]) == ["0", "1", "2"], (
        "who did not answer"
    )
    assert report.result.failure is None


@pytest.mark.parametrize(
    ("stack", "place"), [(BACKWARD, "graph.py:9"), (HANGING, "net.py:12"), ("", None)]
)
def test_ranks_that_stand_alike_are_not_told_apart(stack: str, place: str | None) -> None:
    report = joined(None, None, ended_for="deadline", stacks=[stack, stack])
    assert told(report) == ("timeout", None)
    failure = report.result.failure
    assert (failure and failure.signature) == (place and f"time-out at {place}")


def test_where_each_rank_blames_another_the_first_to_end_speaks() -> None:
    late = failed("crashed", "RuntimeError: Timed out", is_collateral=True)
    assert told(joined(late, CLOSED, first=1)) == ("crashed", 1)
    assert told(joined(measured(0), CLOSED)) == ("crashed", 1)
