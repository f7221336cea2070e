"""Classify how a trial ended: reports of its ranks made into one, exit codes, memory kills, disturbances."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import starmap
from math import inf
from pathlib import Path, PurePath
from typing import Any, cast

from pydantic import ValidationError

from autotune.config.environment import DeviceKind
from autotune.launch.launcher import Exit, Launch
from autotune.launch.processes import Frame, Whereabouts, read_stack, users_part, whereabouts
from autotune.messages.trials import on_ranks, rerun_after_signal
from autotune.models.evidence import assumed_variation, with_run_variation
from autotune.models.statistics import LEAST_VIOLATION, window_rate
from autotune.note import Note
from autotune.protocol.disk import read_model
from autotune.protocol.messages import REPORT_UNWRITTEN, RankReport
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import (
    Block,
    Ceilings,
    DeviceConditions,
    HostLoad,
    Measurement,
    MemoryLimits,
    MemorySample,
    Window,
)
from autotune.records.trial import OUT_OF_MEMORY, Failure, TrialResult

# The measurement of a group, made of those of its ranks. Pure.
#
# Each rank measures the same blocks of the same number of batches. The group's rate is that of all
# samples over the time of the slowest rank; waits, busy fraction and memory are those of the worst
# rank.


_OF_THE_LONGEST_WAIT = ("data_wait_fraction", "breakdown", "loader_costs")
_OF_THE_LEAST_BUSY = ("busy_fraction", "busy_source", "busy_readings", "fullness")
_OF_THE_LARGEST = ("after_s", "startup_s", "build_s", "skipped_steps")
"""Fields of a group's Measurement that are those of one rank."""


def merged_measurement(parts: Sequence[Measurement]) -> Measurement:
    """One measurement of what all ranks have measured together; that of a single rank as it is.

    Args:
        parts: in the order of the ranks; each holds its own figures as its only `ranks` entry, and
            windows of equally many blocks.

    Raises:
        ValueError: there is none, or the windows differ in their blocks.
    """
    if not parts:
        raise ValueError("a group must have at least one rank, but got none")
    if len(parts) == 1:
        return parts[0]
    ranks = tuple(rank for part in parts for rank in part.ranks)
    kind = cast("DeviceKind", ranks[0].device.partition(":")[0]) if ranks else "cpu"
    window = _merged_window([part.window for part in parts])
    rate = with_run_variation(
        window_rate(window), assumed_variation(kind).of([window.is_held_by_device])
    )
    ceilings = _merged_ceilings(parts)
    memory = _merged_memory(parts, is_ram=kind == "cpu")
    waiting = max(parts, key=lambda part: part.data_wait_fraction or 0.0)
    hosts = [part.host_ceiling for part in parts if part.host_ceiling is not None]
    idle = min(parts, key=lambda part: 1.0 if part.busy_fraction is None else part.busy_fraction)
    return parts[0].model_copy(
        update={
            **{name: getattr(waiting, name) for name in _OF_THE_LONGEST_WAIT},
            **{name: getattr(idle, name) for name in _OF_THE_LEAST_BUSY},
            **{name: max(getattr(part, name) for part in parts) for name in _OF_THE_LARGEST},
            "samples_per_s": rate.value,
            "samples_per_s_ci": (rate.low, rate.high),
            "conditions": merged_conditions([part.conditions for part in parts]),
            "host_load": _merged_load(parts),
            "memory": memory,
            "peak_memory_bytes": memory.peak_bytes,
            "ceilings": ceilings,
            "loader_ceiling": ceilings and ceilings.loader and ceilings.loader.samples_per_s,
            "device_ceiling": ceilings and ceilings.device and ceilings.device.samples_per_s,
            "copy_ceiling": ceilings and ceilings.copy and ceilings.copy.samples_per_s,
            "host_ceiling": min(hosts) * len(hosts) if len(hosts) == len(parts) else None,
            "ranks": ranks,
            "notes": _merged_notes(parts),
            "window": window,
        }
    )


def merged_conditions(parts: Sequence[DeviceConditions | None]) -> DeviceConditions | None:
    """The conditions of several devices as one: power and energy summed, otherwise the worst of them.

    Clocks and temperatures are those of one device at both edges: of the one with the lowest clock,
    or the highest temperature, at either. Where a device reports no power, there is no sum.
    """
    known = list(filter(None, parts))
    if not known or len(parts) == 1:
        return known[0] if known else None

    def given(name: str) -> list[Any]:
        return [value for conditions in known if (value := getattr(conditions, name)) is not None]

    merged: dict[str, Any] = {
        name: min(given(name), default=None) for name in ("max_sm_clock_mhz", "persistence_mode")
    }
    merged |= {
        name: min(given(name), key=min, default=None)
        for name in ("sm_clock_mhz", "memory_clock_mhz")
    }
    merged |= {
        name: max(given(name), default=None)
        for name in ("others_memory_bytes", "others_busy_fraction")
    }
    merged["temperature_c"] = max(given("temperature_c"), key=max, default=None)
    for name in ("power_w", "energy_j"):
        merged[name] = sum(given(name)) if len(given(name)) == len(parts) else None
    for name in ("throttle_reasons", "tf32_overrides"):
        merged[name] = tuple(sorted({value for values in given(name) for value in values}))
    return DeviceConditions(**merged)


def _merged_window(windows: Sequence[Window]) -> Window:
    """The slowest rank's window, with the samples of all in its blocks."""
    counts = {len(window.blocks) for window in windows}
    if len(counts) != 1:
        raise ValueError(
            f"the ranks of a group must have measured equally many blocks, but got {sorted(counts)}"
        )
    slowest = max(windows, key=lambda window: sum(block.seconds for block in window.blocks))
    across = zip(*(window.blocks for window in windows), strict=True)
    blocks = _with_made(
        tuple(starmap(_merged_block, zip(slowest.blocks, across, strict=True))), windows
    )
    share = sum(block.samples for block in blocks) / max(
        1, sum(block.samples for block in slowest.blocks)
    )
    epochs = [window.epoch_samples for window in windows]
    ahead = [window.host_ahead_s for window in windows if window.host_ahead_s is not None]
    taking = [window.take_s for window in windows if window.take_s is not None]
    return slowest.model_copy(
        update={
            "blocks": blocks,
            "restarts": tuple(
                restart.model_copy(update={"samples": round(restart.samples * share)})
                for restart in slowest.restarts
            ),
            "host_ahead_s": min(ahead) if len(ahead) == len(windows) else None,
            "take_s": max(taking, default=None),
            "epoch_samples": None if None in epochs else sum(filter(None, epochs)),
            "is_drained": all(window.is_drained for window in windows),
            "is_steady": all(window.is_steady for window in windows),
        }
    )


def _with_made(blocks: tuple[Block, ...], windows: Sequence[Window]) -> tuple[Block, ...]:
    """Add what was made as if each rank had the loader that makes least, since it holds up all."""
    least = None
    lowest = inf
    for window in windows:
        if window.made is None:
            return blocks
        if window.made < lowest:
            least = window
            lowest = window.made
    assert least is not None  # noqa: S101 - there is a rank
    return tuple(
        block.model_copy(update={"made": len(windows) * (own.made or 0.0)})
        for block, own in zip(blocks, least.blocks, strict=True)
    )


def _merged_block(own: Block, across: Sequence[Block]) -> Block:
    """The slowest rank's block, with the samples of all ranks and the waits of the rank that waited longest."""
    update: dict[str, Any] = {"samples": sum(block.samples for block in across), "made": None}
    for name in ("data_wait_s", "starved_s"):
        known = [seconds for block in across if (seconds := getattr(block, name)) is not None]
        update[name] = min(own.seconds, max(known)) if known else None
    return own.model_copy(update=update)


def _merged_ceilings(parts: Sequence[Measurement]) -> Ceilings | None:
    """What the group would reach by one side alone: all ranks at the pace of the slowest."""
    ceilings = [part.ceilings for part in parts if part.ceilings is not None]
    if len(ceilings) < len(parts):
        return None
    merged: dict[str, Ceiling] = {}
    for side in Ceilings.model_fields:
        known: list[Ceiling] = [
            ceiling for each in ceilings if (ceiling := getattr(each, side)) is not None
        ]
        if len(known) == len(parts):
            slowest = min(known, key=lambda ceiling: ceiling.samples_per_s)
            times = {
                name: len(parts) * getattr(slowest, name) for name in ("samples_per_s", "samples")
            }
            merged[side] = slowest.model_copy(update=times)
    return Ceilings(**merged)


def _merged_memory(parts: Sequence[Measurement], *, is_ram: bool) -> MemorySample:
    """The worst rank's, each on a device of its own; where all on a host share its RAM, the worst host's sum."""
    samples = [part.memory for part in parts]
    if not is_ram:
        retries = [sample.alloc_retries for sample in samples if sample.alloc_retries is not None]
        worst = max(
            samples, key=lambda sample: sample.peak_bytes
        )  # ranks in step all wait for whichever has no room
        return worst.model_copy(update={"alloc_retries": max(retries, default=None)})
    by_host = [[part.memory.peak_bytes for part in ranks] for ranks in _by_host(parts)]
    host = max(by_host, key=sum)
    which = f"all {len(samples)} ranks" if len(by_host) == 1 else f"{len(host)} ranks of one host"
    return MemorySample(peak_bytes=sum(host), source=f"{samples[0].source}, {which}")


def _merged_load(parts: Sequence[Measurement]) -> HostLoad | None:
    """That of the host which others loaded most, where all ranks count as the trial's own; None where unknown."""
    hosts = []
    for ranks in _by_host(parts):
        loads = [part.host_load for part in ranks if part.host_load is not None]
        if len(loads) < len(ranks):
            return None
        longest = max(loads, key=lambda load: load.seconds)
        shares = [
            load.own_s / load.seconds for load in loads
        ]  # the ranks' readings lie a moment apart
        hosts.append(longest.model_copy(update={"own_s": sum(shares) * longest.seconds}))
    return max(hosts, key=lambda load: load.others_cores)


def _by_host(parts: Sequence[Measurement]) -> list[list[Measurement]]:
    """The ranks on each host."""
    found: dict[int, list[Measurement]] = {}
    for part in parts:
        found.setdefault(part.ranks[0].host if part.ranks else 0, []).append(part)
    return list(found.values())


def _merged_notes(parts: Sequence[Measurement]) -> tuple[Note, ...]:
    """Each remark once, with its ranks where not all have it."""
    found: dict[Note, list[int]] = {}
    for rank, part in enumerate(parts):
        for note in part.notes:
            found.setdefault(note, []).append(rank)
    return tuple(
        note if len(ranks) == len(parts) else on_ranks(note, ranks) for note, ranks in found.items()
    )


# Whether somebody else has killed or stopped a trial's processes, by how they ended and what they
# report.
#
# What was disturbed says nothing of the configuration: the runner tries it anew, once, in what is
# left of the deadline.


_LOST_WORKER = "is killed by signal: Killed"
"""Source: torch/csrc/DataLoader.cpp (_error_if_any_worker_fails)."""
_UNSEEN_END = re.compile(r"DataLoader worker \(pid\(s\) [^)]*\) exited unexpectedly$")
"""Of a worker that its loader finds gone before the signal SIGCHLD has told how it ended.

Source: torch/utils/data/dataloader.py (_try_get_data).
"""
_KNOWN_END = "exited unexpectedly with exit code"
_LOST_CONNECTION = re.compile(
    r"(Connection\w+Error|EOFError|BrokenPipeError|FileNotFoundError) at "
)
_BATCH_RECEIVED = "torch/multiprocessing/reductions.py"
"""A batch's descriptors come through a socket, whose sender may be gone before the system tells it:
a failure's signature, and what its traceback goes through."""


def disturbance_of(report: RankReport, exit_: Exit) -> Note | None:
    """What has disturbed a trial; None where nothing has, as far as can be seen.

    A SIGKILL that neither autotune (a rank that it ends has no code) nor the kernel's out-of-memory
    killer has sent is somebody else's, or the code's own: that shows when it happens again.
    """
    result = report.result
    codes = exit_.codes or (exit_.code,)
    is_killed = result.outcome == "crashed" and -signal.SIGKILL in codes
    has_lost_worker = result.outcome == "host_oom" and _LOST_WORKER in (result.reason or "")
    is_lost = (
        is_killed or has_lost_worker or _has_lost_sender(result.failure) or _has_unseen_end(result)
    )
    if is_lost and not exit_.was_oom_killed:
        return rerun_after_signal(why="killed")
    notes = () if result.measurement is None else result.measurement.notes
    return (
        rerun_after_signal(why="stopped")
        if any(one.code == "window_stopped" for one in notes)
        else None
    )


def _has_lost_sender(failure: Failure | None) -> bool:
    if failure is None or _LOST_CONNECTION.match(failure.signature) is None:
        return False
    return _BATCH_RECEIVED in failure.traceback.replace("\\", "/")


def _has_unseen_end(result: TrialResult) -> bool:
    """Whether a loader worker's end is told without its signal or its exit code, and by no cause either."""
    if result.failure is None or _UNSEEN_END.search(result.reason or "") is None:
        return False
    return _KNOWN_END not in result.failure.traceback


def with_note(report: RankReport, note: Note) -> RankReport:
    """The report with a further remark on its measurement; as it is where there is none."""
    measured = report.result.measurement
    if measured is None:
        return report
    return report.with_result(
        measurement=measured.model_copy(update={"notes": (*measured.notes, note)})
    )


# What a trial's ranks have answered, or what it means that they have not: a Launch and its Exit in,
# one report out.
#
# When a rank of a group fails, the others fail with it: their connections close, their collectives
# time out. The answers of such ranks are collateral; here the rank that failed first is found and
# named. The memory limits are those that a trial is judged by, and the ceiling of RAM at which it
# is ended. Of a single process:
#
# a report was written                             what it says, however the process ended
# afterwards a report of curves that are cut                  as if there were none, but for the
# curves ended at its deadline, for its RAM, cancelled    timeout, host_oom, pruned ended by SIGKILL
# while the kernel's killer ran   host_oom could not write its report                       crashed,
# for its folder any other end                                    crashed


_FAR_ABOVE = (
    1.2  # our convention: a peak that is a little too high is measured and judged, not ended
)
_RAM_SHARE = (
    0.95  # our convention: ended before the kernel's out-of-memory killer chooses a process
)
_NOTHING = " before it had measured anything"
_UNWRITTEN = (
    "the trial's report could not be written into its folder, most likely since the disk is full "
    "or the trial has used "
    "up all that its processes may open; its log says what failed"
)
_SIGNALS = {"SIGSEGV": "a segmentation fault", "SIGABRT": "an abort", "SIGBUS": "a bus error"}
_SUSPICION: dict[Whereabouts, int] = {
    "elsewhere": 0,
    "unknown": 1,
    "ours": 2,
    "calling": 3,
    "waiting": 4,
}


def read_answer(launch: Launch, exit_: Exit, limits: MemoryLimits) -> RankReport:
    """The report of a trial that has ended; of a group, that of all ranks together."""
    codes = exit_.codes if len(exit_.codes) > 1 else (exit_.code,)
    answers = [_answer(launch.folder.report_of(rank), code) for rank, code in enumerate(codes)]
    over_memory = (
        _over_memory(limits, exit_.memory_bytes or 0) if exit_.ended_for == "memory" else None
    )
    if exit_.ended_for == "cancelled" and None in answers:
        return RankReport(result=TrialResult(outcome="pruned", reason="the trial was cancelled"))
    if len(answers) > 1:
        stacks = [_text_of(launch.folder.stack_of(rank)) for rank in range(launch.ranks)]
        return one_report(
            answers, exit_, stacks=stacks, deadline_s=launch.deadline_s, over_memory=over_memory
        )
    report = answers[0]
    if report is None:
        return RankReport(result=over_memory or _unanswered(exit_, launch.deadline_s))
    is_ended = exit_.ended_for not in {None, "done"} or exit_.code not in {None, 0}
    if is_ended and report.curves is not None and report.curves.is_cut:
        ended = over_memory or _unanswered(exit_, launch.deadline_s)
        return report.model_copy(update={"result": ended}).with_result(
            reason=ended.reason.removesuffix(_NOTHING)
        )
    return report


def ram_ceiling_bytes(limits: MemoryLimits) -> int | None:
    """Return the RAM at which a trial is ended: far above the limit, yet before the kernel acts; None: unknown."""
    if limits.ram_bytes is None:
        return None
    most = int(limits.ram_bytes * _RAM_SHARE)
    if limits.limit_is_ram and limits.limit_bytes:
        return min(most, int(limits.limit_bytes * _FAR_ABOVE))
    return most


def _over_memory(limits: MemoryLimits, taken_bytes: int) -> TrialResult:
    """Return the result of a trial that was ended for its RAM."""
    limit = (
        limits.limit_bytes
        if limits.limit_is_ram and limits.limit_bytes
        else limits.ram_bytes or taken_bytes
    )
    reason = (
        f"the trial's processes must stay within {limit / 2**20:,.0f} MiB of RAM, but had taken "
        f"{taken_bytes / 2**20:,.0f} MiB, and were ended"
    )
    return TrialResult(
        outcome="host_oom", reason=reason, violation=max(LEAST_VIOLATION, taken_bytes / limit - 1)
    )


def _unanswered(exit_: Exit, deadline_s: float) -> TrialResult:
    if exit_.ended_for == "deadline":
        return TrialResult(outcome="timeout", reason=_late(deadline_s))
    return _end_of(exit_.code or 0, exit_)


def _late(deadline_s: float) -> str:
    return f"the trial did not end within {deadline_s:.0f} s"


def _end_of(code: int, exit_: Exit) -> TrialResult:
    """The outcome of a process that ended by itself, or by a signal (negative) that was not autotune's."""
    if code == -signal.SIGKILL and exit_.was_oom_killed:
        return TrialResult(
            outcome="host_oom", reason="the kernel's out-of-memory killer ended the trial"
        )
    if code == REPORT_UNWRITTEN:
        return TrialResult(outcome="crashed", reason=_UNWRITTEN)
    reason = f"the trial's process ended itself with exit code {code}{_NOTHING}"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        reason = f"the trial's process was ended by {_SIGNALS.get(name, 'a signal')} ({name})"
    return TrialResult(outcome="crashed", reason=reason)


def _answer(report: Path, code: int | None) -> RankReport | None:
    """A rank's report; a report that was written counts, whatever became of the process afterwards."""
    try:
        return read_model(report, RankReport)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        if code == REPORT_UNWRITTEN:
            return None
        reason = f"the trial's report can't be read ({type(error).__name__}); its process ended with {code}"
        return RankReport(result=TrialResult(outcome="crashed", reason=reason))


def _text_of(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def one_report(
    reports: Sequence[RankReport | None],
    exit_: Exit,
    *,
    stacks: Sequence[str],
    deadline_s: float,
    over_memory: TrialResult | None = None,
) -> RankReport:
    """The report of the group.

    Without a measurement of every rank, it is the first of these that exists: a rank's failure of
    its own (memory before crashes before others), the end of a process that left no report, the
    group's end for its memory, its end for time, and last a collateral failure.

    Args:
        reports: Of each rank; None where it left none.
        exit_: How the ranks' processes ended, with a code for each.
        stacks: What faulthandler wrote of each rank, "" where nothing.
        deadline_s: The trial's.
        over_memory: The result of a group that was ended for its memory; None where it was not.
    """
    answers = {rank: report for rank, report in enumerate(reports) if report is not None}
    measured = {
        rank: report.result.measurement
        for rank, report in answers.items()
        if report.result.outcome == "ok" and report.result.measurement is not None
    }
    if len(measured) == len(reports):
        return _merged(list(measured.values()))
    failed = {rank: report for rank, report in answers.items() if rank not in measured}
    own = {rank: report for rank, report in failed.items() if not report.is_collateral}
    if own:
        return _worst(own)
    ended = {
        rank: RankReport(result=_end_of(code, exit_))
        for rank, code in enumerate(exit_.codes)
        if code is not None and rank not in answers
    }
    if ended:
        return _worst(ended, exit_.first)
    if over_memory is not None:
        return RankReport(result=over_memory)
    frames = [read_stack(text) for text in stacks]
    # A rank that has written its stack and then failed since others ended before it counts as one
    # without an answer.
    silent = [
        rank
        for rank in range(len(reports))
        if rank not in answers or (rank in failed and frames[rank])
    ]
    if silent:
        return _time_out(silent, exit_, frames, deadline_s)
    rank = min(
        failed, key=lambda rank: (rank != exit_.first, rank)
    )  # all were torn down: the first to end is reported
    return _named(rank, failed[rank])


def _merged(measurements: Sequence[Measurement]) -> RankReport:
    try:
        return RankReport(
            result=TrialResult(outcome="ok", measurement=merged_measurement(measurements))
        )
    except (
        ValueError
    ) as error:  # what a rank writes is read from a file, which the user's code may reach
        return RankReport(
            result=TrialResult(outcome="crashed", reason=f"the ranks' reports don't match: {error}")
        )


def _worst(reports: Mapping[int, RankReport], first: int | None = None) -> RankReport:
    """Of several ranks' failures the gravest, then that of the rank that ended first, then that of the lowest rank."""

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        outcome = reports[rank].result.outcome
        return outcome not in OUT_OF_MEMORY, outcome != "crashed", rank != first, rank

    rank = min(reports, key=order)
    return _named(rank, reports[rank])


def _time_out(
    silent: Sequence[int], exit_: Exit, stacks: Sequence[tuple[Frame, ...]], deadline_s: float
) -> RankReport:
    """Ranks that were ended before they answered; the rank that the others waited for is named."""
    stuck = _awaited(silent, stacks)
    what = {
        "deadline": _late(deadline_s),
        "straggling": f"the trial did not end after rank {exit_.first} had",
        "standstill": "no block ended within ten times the longest one's time (at least 30 s)",
    }.get(exit_.ended_for or "", "the ranks stopped answering")
    others = "" if stuck is None else ", the others waited for this rank"
    reason = f"{what}{others}; no answer came from {_describe_ranks(silent)}"
    shown = [rank for rank in silent if stacks[rank]] if stuck is None else [stuck]
    failure = _failure_at(shown[0], stacks[shown[0]]) if shown else None
    report = RankReport(result=TrialResult(outcome="timeout", reason=reason, failure=failure))
    return report if stuck is None else _named(stuck, report)


def _awaited(silent: Sequence[int], stacks: Sequence[tuple[Frame, ...]]) -> int | None:
    """Of the ranks without an answer, the one that the others waited for; None where that is not known."""
    if len(silent) == 1:
        return silent[0]
    suspicion = {rank: _SUSPICION[whereabouts(stacks[rank])] for rank in silent}
    if len(set(suspicion.values())) == 1:
        return None
    return min(silent, key=suspicion.__getitem__)


def _failure_at(rank: int, stack: tuple[Frame, ...]) -> Failure | None:
    if not stack:
        return None
    frames = users_part(stack)
    place = f"{PurePath(frames[-1].file).name}:{frames[-1].line}"
    lines = (
        f"Where rank {rank} stood shortly before its end (most recent call last):",
        *map(str, frames),
    )
    return Failure(signature=f"time-out at {place}", traceback="\n".join(lines))


def _named(rank: int, report: RankReport) -> RankReport:
    """The report with the rank's number in its reason."""
    named = report.with_result(reason=f"rank {rank}: {report.result.reason}")
    return named.model_copy(update={"rank": rank})


def _describe_ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 1", "ranks 0 and 1", "ranks 0, 1 and 2"."""
    *before, last = map(str, ranks)
    return f"ranks {', '.join(before)} and {last}" if before else f"rank {last}"
