"""Whether a search outlasts SIGKILLs: one of its processes, or all, at any moment; then the same command goes on.

A case kills in one role. A search whose parent was killed is started again, and killed again in its next stage; one
whose server, rank or loader worker is killed, in every second stage, is to go on by itself.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic, sleep

import psutil

from benchmarks.measures.endurance.live_search import (
    ROLES,
    STAGES,
    LiveSearch,
    Role,
    ended_trials,
    fault_of_folder,
    left_of,
    start_search,
)
from benchmarks.measures.endurance.part import Part
from benchmarks.measures.part_guard import Figures

__all__ = ["KILLS"]

_CASES, _QUICK = 80, 5
_LATEST_S = {"start": 4.0, "trials": 1.5}
_LATEST_ELSEWHERE_S = 0.6
"""After a stage has begun: what it takes, with short windows."""
_COMES_WITHIN_S = 1.5
"""A process of the role, once the moment is there."""
_FATAL: frozenset[Role] = frozenset({"parent", "all"})
_SHORT = "from benchmarks.measures.endurance.short_windows import shorten_all; shorten_all()"


def _cases(is_quick: bool) -> Sequence[str]:
    return [f"kills_{number:03d}" for number in range(_QUICK if is_quick else _CASES)]


def _run(case: str, folder: Path) -> Figures:
    number = int(case[-3:])
    random, role = Random(number), ROLES[number % len(ROLES)]
    search = start_search(folder, script=_SHORT)
    hit, known, logs, faults = dict[str, int](), dict[int, str](), dict[int, int](), list[str | None]()
    for stage in STAGES if role in _FATAL else STAGES[number // len(ROLES) % 2 :: 2]:
        if not search.wait_for(partial(search.is_at, stage)):
            break
        sleep(random.uniform(0, _LATEST_S.get(stage, _LATEST_ELSEWHERE_S)))
        pids = [process.pid for process in search.processes("all")]
        killed = _kill(search, role, random)
        hit[stage] = killed
        if role not in _FATAL or not killed:
            continue
        search.end()
        faults.append(left_of(folder, pids))
        ended = ended_trials(search.run)
        known = {**ended, **known}  # what was known first must hold to the end
        logs = {**{one: at for one, at in _logs(search.run).items() if one in ended}, **logs}
        search = start_search(folder, script=_SHORT)
    search.wait_for(lambda: False)
    faults += _faults_at_end(search, role, search.end(), known, logs)
    fault = next(filter(None, faults), None)
    found: Figures = {"role": role, "hit": hit, "known": len(known), "trials": len(ended_trials(search.run))}
    return {**found, **({"fault": fault} if fault else {})}


def _faults_at_end(
    search: LiveSearch, role: Role, code: int, known: Mapping[int, str], logs: Mapping[int, int]
) -> Iterator[str | None]:
    """What is wrong with a search that must have ended well; `known` and `logs`: of trials that ended before a kill."""
    after, written = ended_trials(search.run), _logs(search.run)
    lost = sorted(number for number in known if after.get(number) != known[number])
    again = sorted(number for number in logs if written.get(number) != logs[number])
    yield f"the command ended with {code}: {_output(search.folder)}" if code else None
    yield f"trials are lost: {lost}" if lost else None
    yield f"trials were run again: {again}" if again else None
    yield left_of(search.folder, ())
    yield None if code else fault_of_folder(search, may_leave_sockets=role == "all")


def _kill(search: LiveSearch, role: Role, random: Random) -> int:
    """Kill one process of a role, or all there are; how many were."""
    until = monotonic() + _COMES_WITHIN_S
    while not (doomed := search.processes(role)) and monotonic() < until and search.process.poll() is None:
        sleep(0.005)
    if role != "all":
        doomed = random.sample(doomed, min(1, len(doomed)))
    for process in doomed:
        _send(process)
    return len(doomed)


def _send(process: psutil.Process) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def _logs(run: Path) -> dict[int, int]:
    """When the logs of trials were written last."""
    found = (path for path in (run / "logs").glob("trial-*.log") if path.stem[6:].isdecimal())
    return {int(path.stem[6:]): path.stat().st_mtime_ns for path in found}


def _output(folder: Path) -> str:
    return (folder / "output").read_text(errors="replace")[-600:]


def _judge(cases: Mapping[str, Figures]) -> Figures:
    hits = [(case["role"], stage) for case in cases.values() for stage, killed in case["hit"].items() if killed]
    return {
        "kills": len(hits),
        "by_role": dict(Counter(role for role, _ in hits)),
        "by_stage": dict(Counter(stage for _, stage in hits)),
        "promises": {
            "after a kill the search goes on, and nothing is lost, run twice or left": (
                all("fault" not in case for case in cases.values()) if hits else None
            )
        },
    }


KILLS = Part(
    proves="after a SIGKILL of any of its processes the same command goes on, and nothing is lost, run twice or left",
    cases=_cases,
    run=_run,
    judge=_judge,
    limit_s=600.0,
)
"""Each has up to six kills: in some stages there is no such process."""
