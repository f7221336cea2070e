"""What a trial's ranks have answered, or what it means that they have not: a Launch and its Exit in, one report out."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from autotune.launch.group_report import one_report
from autotune.launch.launcher import Exit, Launch
from autotune.launch.local.exit_codes import end_of
from autotune.launch.memory_limits import MemoryLimits
from autotune.protocol.disk import read_model
from autotune.protocol.reports import RankReport
from autotune.records.trial import TrialResult

__all__ = ["read_answer"]


def read_answer(launch: Launch, exit_: Exit, limits: MemoryLimits) -> RankReport:
    """The report of a trial that has ended; of a group, that of all ranks together."""
    folder, is_cancelled = launch.folder, exit_.ended_for == "cancelled"
    codes = exit_.codes if len(exit_.codes) > 1 else (exit_.code,)
    answers = [_answer(folder.report_of(rank), code) for rank, code in enumerate(codes)]
    if len(answers) == 1 or (is_cancelled and None in answers):
        answer = answers[0] if len(answers) == 1 else None
        return answer or RankReport(result=_unanswered(exit_, launch.deadline_s, limits))
    return one_report(
        answers,
        exit_,
        stacks=[_text_of(folder.stack_of(rank)) for rank in range(launch.ranks)],
        deadline_s=launch.deadline_s,
        over_memory=limits.exceeded_by(exit_.memory_bytes or 0) if exit_.ended_for == "memory" else None,
    )


def _unanswered(exit_: Exit, deadline_s: float, limits: MemoryLimits) -> TrialResult:
    """What the end of a process means that has left no report."""
    if exit_.ended_for == "deadline":
        return TrialResult(outcome="timeout", reason=f"the trial did not end within {deadline_s:.0f} s")
    if exit_.ended_for == "cancelled":
        return TrialResult(outcome="pruned", reason="the trial was cancelled")
    if exit_.ended_for == "memory":
        return limits.exceeded_by(exit_.memory_bytes or 0)
    return end_of(exit_.code or 0, was_oom_killed=exit_.was_oom_killed)


def _answer(report: Path, code: int | None) -> RankReport | None:
    """A rank's report; a report that was written counts, whatever became of the process afterwards."""
    try:
        return read_model(report, RankReport)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = f"the trial's report can't be read ({type(error).__name__}); its process ended with {code}"
        return RankReport(result=TrialResult(outcome="crashed", reason=reason))


def _text_of(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
