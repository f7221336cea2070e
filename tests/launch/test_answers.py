"""The outcome of a single process: its recorded exit and its report in, one result out. No process is started here."""

from __future__ import annotations

import faulthandler
import signal
import sys
import sysconfig
import traceback
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import autotune
from autotune.launch.answers import (
    BlockedIn,
    Frame,
    blocked_in,
    read_answer,
    read_stack,
    users_part,
)
from autotune.launch.launcher import Exit, Launch
from autotune.protocol.disk import TrialFolder, write_model
from autotune.protocol.messages import REPORT_UNWRITTEN, RankReport
from autotune.records.measurement import MemoryLimits
from autotune.records.result import Curves
from autotune.records.trial import Outcome, TrialResult

MIB = 2**20
KILLED = -signal.SIGKILL
LATE: dict[str, Any] = {"code": None, "ended_for": "deadline"}


def answer_of(folder: Path, limits: MemoryLimits | None = None, **end: Any) -> RankReport:
    """Read the answer of a process that ended so; its deadline was 9 s."""
    launch = Launch(folder=TrialFolder(folder), log=folder / "log", deadline_s=9.0)
    return read_answer(launch, Exit(wall_s=1.0, **end), limits or MemoryLimits())


@pytest.mark.parametrize(
    ("end", "outcome", "named"),
    [
        ({"code": 0}, "crashed", "0"),
        ({"code": 3}, "crashed", "3"),
        ({"code": KILLED}, "crashed", "SIGKILL"),
        ({"code": -signal.SIGSEGV}, "crashed", "SIGSEGV"),
        ({"code": -signal.SIGABRT}, "crashed", "SIGABRT"),
        ({"code": -signal.SIGBUS}, "crashed", "SIGBUS"),
        ({"code": -63}, "crashed", "63"),
        ({"code": REPORT_UNWRITTEN}, "crashed", "log"),
        ({"code": KILLED, "was_oom_killed": True}, "host_oom", ""),
        ({"code": -signal.SIGSEGV, "was_oom_killed": True}, "crashed", "SIGSEGV"),
        (LATE, "timeout", "9 s"),
        ({"code": None, "ended_for": "memory", "memory_bytes": 900 * MIB}, "host_oom", "900 MiB"),
        ({"code": None, "ended_for": "cancelled"}, "pruned", ""),
    ],
)
def test_an_end_without_a_report_is_an_outcome_with_a_reason(
    tmp_path: Path, end: dict[str, Any], outcome: Outcome, named: str
) -> None:
    result = answer_of(tmp_path, **end).result
    assert result.outcome == outcome
    assert result.reason
    assert named in result.reason
    assert (result.measurement, result.failure) == (None, None)


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        ("ok", {"code": -signal.SIGSEGV}),
        ("ok", {"code": None, "ended_for": "cancelled"}),
        ("oom", LATE),
        ("diverged", {"code": 0}),
    ],
)
def test_a_report_that_was_written_counts_however_its_process_ended(
    tmp_path: Path, outcome: Outcome, end: dict[str, Any]
) -> None:
    written = RankReport(result=TrialResult(outcome=outcome, reason="as written"))
    write_model(TrialFolder(tmp_path).report, written)
    assert answer_of(tmp_path, **end) == written


@pytest.mark.parametrize("code", [0, REPORT_UNWRITTEN, KILLED])
@pytest.mark.parametrize("kind", ["garbage", "folder", "of another version"])
def test_what_lies_in_a_reports_place_is_a_crash(tmp_path: Path, kind: str, code: int) -> None:
    report = TrialFolder(tmp_path).report
    if kind == "folder":
        report.mkdir()
    else:
        report.write_bytes(b"\xff{]garbage" if kind == "garbage" else b"{}")
    assert answer_of(tmp_path, code=code).result.outcome == "crashed"


def test_the_violation_is_the_share_by_which_the_limit_was_passed(tmp_path: Path) -> None:
    limits = MemoryLimits(limit_bytes=600 * MIB, ram_bytes=2**36, limit_is_ram=True)
    end: dict[str, Any] = {"code": None, "ended_for": "memory"}
    assert answer_of(
        tmp_path, limits, memory_bytes=900 * MIB, **end
    ).result.violation == pytest.approx(0.5)
    assert answer_of(
        tmp_path, limits, memory_bytes=500 * MIB, **end
    ).result.violation == pytest.approx(0.01)
    assert answer_of(tmp_path, limits, code=KILLED, was_oom_killed=True).result.violation is None


@pytest.mark.parametrize(
    ("is_cut", "end", "outcome", "named"),
    [
        (True, LATE, "timeout", "9 s"),
        (True, {"code": -signal.SIGSEGV}, "crashed", "SIGSEGV"),
        (True, {"code": 0}, "ok", ""),
        (False, {"code": -signal.SIGSEGV}, "ok", ""),
        (False, LATE, "ok", ""),
    ],
)
def test_curves_that_are_cut_are_those_of_a_process_that_ended_as_it_did(
    tmp_path: Path, is_cut: bool, end: dict[str, Any], outcome: Outcome, named: str
) -> None:
    curves = Curves(threads=3, is_cut=is_cut)
    write_model(
        TrialFolder(tmp_path).report, RankReport(result=TrialResult(outcome="ok"), curves=curves)
    )
    answer = answer_of(tmp_path, **end)
    assert (answer.result.outcome, answer.curves) == (outcome, curves)
    assert named in answer.result.reason


# What faulthandler wrote of a rank is read back: the main thread, what it was at, and the user's part.

OURS = f"{Path(autotune.__file__).parent}/worker/step.py"
LIBRARY = f"{sysconfig.get_path('stdlib')}/threading.py"
TORCH = "/venv/lib/python3.11/site-packages/torch"
DUMP = f"""Timeout (0:00:04)!
Thread 0x00007f0000000002 (most recent call first):
  File "{LIBRARY}", line 331 in wait

Thread 0x00007f0000000001 [python] (most recent call first):
  File "/home/me/my net.py", line 12 in forward
  File "{TORCH}/nn/modules/module.py", line 1751 in _call_impl
  File "{OURS}", line 90 in train
  File "<frozen runpy>", line 88 in _run_code
"""


def frame(file: str, name: str = "f", line: int = 1) -> Frame:
    return Frame(file=file, line=line, name=name)


def test_the_main_thread_is_the_last_and_its_innermost_frame_comes_last() -> None:
    stack = read_stack(DUMP)
    assert [one.name for one in stack] == ["_run_code", "train", "_call_impl", "forward"]
    assert stack[-1] == frame("/home/me/my net.py", "forward", 12)
    place = traceback.FrameSummary("/home/me/my net.py", 12, "forward", line="")
    assert str(stack[-1]) == traceback.StackSummary.from_list([place]).format()[0].rstrip("\n"), (
        "as Python writes it"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Timeout (0:00:04)!\n",
        "Thread 0x01 (most recent call first):\n  <no Python frame>\n",
        "garbage",
    ],
)
def test_where_nothing_was_written_there_is_no_stack(text: str) -> None:
    assert read_stack(text) == ()


def test_what_faulthandler_writes_is_understood(tmp_path: Path) -> None:
    done, waits = Event(), Event()

    def wait() -> None:
        waits.set()
        done.wait()

    thread = Thread(target=wait)
    thread.start()
    waits.wait()
    with (tmp_path / "stack").open("w") as file:
        faulthandler.dump_traceback(file)
    done.set()
    thread.join()
    here = sys._getframe()
    stack = read_stack((tmp_path / "stack").read_text())
    assert (stack[-1].file, stack[-1].name) == (here.f_code.co_filename, here.f_code.co_name)


@pytest.mark.parametrize(
    ("innermost", "expected"),
    [
        (frame("/home/me/net.py"), "user_code"),
        (frame(f"{TORCH}/nn/functional.py", "linear"), "user_code"),
        (frame(LIBRARY, "wait"), "user_code"),
        (frame(OURS), "autotune"),
        (frame(f"{TORCH}/autograd/graph.py", "_engine_run_backward"), "collective"),
        (frame(f"{TORCH}/distributed/distributed_c10d.py", "all_reduce"), "user_collective"),
        (frame(f"{TORCH}/nn/parallel/distributed.py", "_pre_forward"), "collective"),
        (frame(f"{TORCH}/cuda/__init__.py", "synchronize"), "collective"),
        (frame(f"{TORCH}/accelerator/__init__.py", "synchronize"), "collective"),
        (
            frame(f"{TORCH}/cuda/streams.py", "synchronize"),
            "collective",
        ),  # an event of a window's edge
        (frame(f"{TORCH}/cuda/__init__.py", "_lazy_init"), "user_code"),
    ],
    ids=str,
)
def test_a_rank_is_judged_by_its_innermost_frame(innermost: Frame, expected: BlockedIn) -> None:
    assert blocked_in((frame("/home/me/train.py"), innermost)) == expected


@pytest.mark.parametrize(
    ("caller", "expected"),
    [
        (frame("/home/me/net.py", "forward"), "user_collective"),
        (frame("/venv/lib/python3.11/site-packages/lib/metrics.py"), "user_collective"),
        (frame(OURS, "most"), "collective"),
        (frame(f"{TORCH}/nn/modules/batchnorm.py", "forward"), "collective"),
        (frame(f"{TORCH}/nn/parallel/distributed.py", "_sync_buffers"), "collective"),
    ],
    ids=str,
)
def test_a_wait_that_the_users_code_asked_for_is_told_from_those_that_all_ranks_come_to(
    caller: Frame, expected: BlockedIn
) -> None:
    place = f"{TORCH}/distributed/distributed_c10d.py"
    stack = (
        frame("/home/me/train.py"),
        caller,
        frame(f"{TORCH}/distributed/c10d_logger.py"),
        frame(place),
    )
    assert blocked_in(stack) == expected


def test_of_a_rank_without_frames_nothing_is_known() -> None:
    assert blocked_in(()) == "unknown"


def test_the_users_frames_are_those_of_no_library_and_not_ours() -> None:
    assert users_part(read_stack(DUMP)) == (frame("/home/me/my net.py", "forward", 12),)


def test_without_frames_of_the_users_those_of_libraries_remain_and_else_our_own() -> None:
    torch, ours = frame(f"{TORCH}/utils/data/dataloader.py"), frame(OURS)
    assert users_part((ours, torch)) == (torch,)
    assert users_part((ours,)) == (ours,)
    assert users_part(()) == ()
