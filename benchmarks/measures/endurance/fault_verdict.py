"""What a fault in a phase must come to, held against what a search or a diagnosis has left: nothing, or a sentence.

Comes in: the fault, the phases that it struck in, and what was seen: exit code, output, summary, logs. A search must go
on where it can, and name the culprit; where it can't, it must end at once with the user's own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.records.result import RunSummary
from autotune.records.trial import OUT_OF_MEMORY
from benchmarks.measures.endurance.fault_table import Fault, is_reached
from benchmarks.measures.endurance.part import error_in, without_places

__all__ = ["AND", "Seen", "faults_in", "is_without_strike", "told_of"]

_WORKLOAD_ERROR, _NOTHING_FEASIBLE = (1, 2), 3
_FAILURE_NOTES = {"sides_not_measured", "stress_failed", "stress_out_of_memory", "others_failed"}
_OURS = re.compile(r"/autotune/(worker|launch|api|tuning)/|this is a bug in autotune")
_AT_A_POINT = "process_ended_at_point"
"""What is known of a point at which a process ended; the next process goes on behind it."""
AND = " | "
"""Between sentences."""
_NO_STRIKE = "the fault never struck in"
_WHOLE_S = 200.0
"""Of a search or a diagnosis in which nothing hangs, many times what it takes."""
_LATE_S = 8.0
"""By which a trial's end may come after its deadline: its processes are ended, and its log is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was seen of a search or a diagnosis."""

    exit_code: int
    output: str
    errors: str
    summary: RunSummary | None
    """None where a search left none, and of a diagnosis."""
    diagnosis: str
    """A diagnosis, as JSON; "" where there is none."""
    curves: str
    """What a search has kept of loader and device alone, as JSON; "" where it measured neither."""
    struck: frozenset[str]
    """Phases in which the fault struck."""
    strikes: int
    """Processes that it struck."""
    took_s: float
    logs: Mapping[str, str]
    deadline_s: float


def faults_in(fault: Fault, phases: tuple[str, ...], seen: Seen) -> Iterator[str]:
    """What is otherwise than it must be; each a sentence."""
    for phase in phases:
        if phase not in seen.struck and is_reached(fault, phase):
            yield f"{_NO_STRIKE} {phase}"
    longest_s = _WHOLE_S + seen.strikes * (seen.deadline_s + _LATE_S)
    if seen.took_s > longest_s:
        yield f"it must end within {longest_s:.0f} s, but took {seen.took_s:.0f} s"
    is_harmless = fault.outcome == "ok" or phases[0] in fault.passes
    if is_harmless or not (seen.struck & {*phases} and is_reached(fault, phases[0])):
        yield from _disturbed(seen)
        return
    yield from _PHASES[phases[0]](fault, seen)
    if seen.summary is not None:
        slow = [
            round(trial.result.wall_s, 1)
            for trial in seen.summary.trials
            if trial.result.wall_s > seen.deadline_s + _LATE_S
        ]
        if slow:
            yield f"a trial went beyond its deadline of {seen.deadline_s} s: {slow} s"


def is_without_strike(told: str) -> bool:
    """Whether all that was otherwise than it must be is that the fault never struck, in faults_in's sentences."""
    return bool(told) and all(one.startswith(_NO_STRIKE) for one in told.split(AND))


def told_of(seen: Seen, folder: Path) -> str:
    """What was told of the fault, for people who read the table, without the names of places."""
    trials = () if seen.summary is None else seen.summary.trials
    trial = next((trial for trial in trials if trial.outcome != "ok"), None)
    text = " ".join(_notes(seen)) if trial is None else f"{trial.outcome}: {trial.reason}"
    told = error_in(seen.errors).strip() if seen.summary is None else text
    whole = str(without_places({"told": told}, folder)["told"])
    return whole[-300:] if seen.summary is None else whole[:300]


def _disturbed(seen: Seen) -> Iterator[str]:
    """What a harmless fault must not have changed."""
    if seen.exit_code != 0:
        yield f"nothing must end otherwise, but exit code {seen.exit_code}: {seen.errors.strip()[-400:]}"
    if seen.summary is None:
        yield from (f"the diagnosis must be whole, but tells {one}" for one in _notes(seen))
        return
    yield from (
        f"trial {one.number} must be ok, but is {one.outcome}: {one.reason}"
        for one in seen.summary.trials
        if one.outcome not in {"ok", "pruned"}
    )
    yield from (f"there must be no such note: {one}" for one in _notes(seen))
    yield from (
        f"every further run of trial {one.number} must be ok, but one is {run.outcome}: {run.reason}"
        for one in seen.summary.trials
        for run in one.repeats
        if run.outcome != "ok"
    )
    if seen.summary.recommendation is None:
        yield "something must be recommended"


def _ends_the_command(fault: Fault, seen: Seen) -> Iterator[str]:
    """Nothing can be said without this run: the command ends with the culprit."""
    codes = (
        (_NOTHING_FEASIBLE, *_WORKLOAD_ERROR) if fault.outcome in OUT_OF_MEMORY else _WORKLOAD_ERROR
    )
    if seen.exit_code not in codes:
        yield f"exit code must be one of {codes}, but is {seen.exit_code}"
    if not re.search(fault.says, seen.errors):
        yield f"what ends it must say {fault.says!r}, but says: {seen.errors.strip()[-400:]}"
    if (
        fault.frame
        and fault.outcome == "crashed"
        and not re.search(rf"work\.py.*{fault.frame}", seen.errors, re.DOTALL)
    ):
        yield f"what ends it must name {fault.frame} in work.py"
    if _OURS.search(seen.errors):
        yield f"what ends it must not show our own code: {seen.errors.strip()[-400:]}"


def _ends_the_baseline(fault: Fault, seen: Seen) -> Iterator[str]:
    """What crashes in the user's own configuration ends the search; what needs less of something lets it go on."""
    if fault.outcome == "crashed":
        yield from _ends_the_command(fault, seen)
        return
    yield from _goes_on(seen)
    yield from _trials_end(fault, seen, {0})


def _ends_trials(fault: Fault, seen: Seen) -> Iterator[str]:
    yield from _goes_on(seen)
    numbers = (
        {trial.number for trial in seen.summary.trials} - {0} if seen.summary is not None else set()
    )
    yield from _trials_end(fault, seen, numbers)


def _trials_end(fault: Fault, seen: Seen, numbers: set[int]) -> Iterator[str]:
    for trial in seen.summary.trials if seen.summary is not None else ():
        if trial.number not in numbers:
            if trial.outcome != "ok":
                yield f"trial {trial.number} must be ok, but is {trial.outcome}: {trial.reason}"
            continue
        if trial.outcome != fault.outcome:
            yield f"trial {trial.number} must be {fault.outcome}, but is {trial.outcome}: {trial.reason[:400]}"
        if not re.search(fault.says, trial.reason):
            yield f"the reason must say {fault.says!r}, but says: {trial.reason[:400]}"
        traceback = trial.result.failure.traceback if trial.result.failure is not None else ""
        logs = [trial.result.log or "", *re.findall(r"logs/\S+?\.log", trial.reason)]
        where = "".join([traceback, *(seen.logs.get(log.rpartition("/")[2], "") for log in logs)])
        if fault.frame and not re.search(rf"work\.py.*{fault.frame}", where):
            yield f"traceback or log must name {fault.frame} in work.py"


def _goes_on(seen: Seen) -> Iterator[str]:
    if seen.exit_code != 0:
        yield f"the search must go on, but ended with {seen.exit_code}: {seen.errors.strip()[-400:]}"
    elif seen.summary is None or seen.summary.recommendation is None:
        yield "something must be recommended"


def _is_noted(fault: Fault, seen: Seen) -> Iterator[str]:
    """The search goes on to a recommendation, whose notes name the culprit.

    Where all hang that are measured again, the baseline too, that speaks against none: nothing is proven then.
    """
    yield from _goes_on(seen)
    if seen.summary is None:
        return
    chosen = seen.summary.recommendation
    is_left = fault.outcome == "timeout" and chosen is not None and chosen.verdict == "unconfirmed"
    if "repeat" in seen.struck and chosen is not None and chosen.number != 0 and not is_left:
        yield f"what fails when it runs again must not be recommended, but trial {chosen.number} is"
    yield from (
        f"trial {one.number} must be ok, but is {one.outcome}: {one.reason}"
        for one in seen.summary.trials
        if one.outcome != "ok"
    )
    told = json.dumps(
        [note.model_dump(mode="json") for note in seen.summary.notes], ensure_ascii=False
    )
    says = f"{fault.says}|{_AT_A_POINT}" if "look" in seen.struck else fault.says
    points = json.dumps(
        [
            point["reason"]
            for side in ("loader", "device")
            for point in json.loads(seen.curves or "{}").get(side, ())
        ]
    )
    if not re.search(says, told + points):  # a single point that failed is told in the curves alone
        yield f"a note must say {fault.says!r}, but there are {[*_notes(seen)]}"


def _is_remarked(fault: Fault, seen: Seen) -> Iterator[str]:
    """The diagnosis is given, and says what could not be measured, and why."""
    if seen.exit_code != 0:
        yield f"the diagnosis must be given, but it ended with {seen.exit_code}: {seen.errors.strip()[-400:]}"
    elif not re.search(f"{fault.says}|{_AT_A_POINT}", seen.diagnosis):
        yield f"the diagnosis must say {fault.says!r}, but says {[*_notes(seen)]}"


def _notes(seen: Seen) -> Iterator[str]:
    """Notes of a summary, or of a diagnosis, that tell of a failure."""
    notes = (
        [note.model_dump(mode="json") for note in seen.summary.notes]
        if seen.summary is not None
        else []
    )
    if seen.diagnosis:
        notes = [
            *json.loads(seen.diagnosis)["notes"],
            *json.loads(seen.diagnosis)["evidence"]["curves"]["notes"],
        ]
    yield from (
        json.dumps(note)
        for note in notes
        if note["code"] in _FAILURE_NOTES or "fail" in note["code"]
    )


_PHASES = {
    "probe": _ends_the_command,
    "baseline": _ends_the_baseline,
    "trial": _ends_trials,
    "guard": _ends_trials,
    "look": _is_noted,
    "repeat": _is_noted,
    "stress": _is_noted,
    "diagnose": _ends_the_command,
    "others": _is_remarked,
}
