"""Whether a search outlasts SIGKILLs: one of its processes, or all, at any moment; then the same command goes on.

A case's number names what is killed and at which stage; the moment within it is drawn by the number.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from time import sleep

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

_CASES, _QUICK = 300, 6
_LATEST_S = {"start": 4.0, "trials": 1.5}
_LATEST_ELSEWHERE_S = 0.6
"""After a stage has begun: what it takes, with short windows."""
_SHORT = "from benchmarks.measures.endurance.short_windows import shorten_all; shorten_all()"


def _cases(is_quick: bool) -> Sequence[str]:
    return [f"kill_{number:03d}" for number in range(_QUICK if is_quick else _CASES)]


def _run(case: str, folder: Path) -> Figures:
    number = int(case[-3:])
    random, stage, role = Random(number), STAGES[number % len(STAGES)], ROLES[number // len(STAGES) % len(ROLES)]
    search = start_search(folder, script=_SHORT)
    search.wait_for(lambda: search.is_at(stage))
    sleep(random.uniform(0, _LATEST_S.get(stage, _LATEST_ELSEWHERE_S)))
    pids = [process.pid for process in search.processes("all")]
    killed = _kill(search, role, random)
    found: Figures = {"stage": stage, "role": role, "killed": killed}
    is_over = role in {"parent", "all"} and killed > 0
    code = search.end()
    fault = left_of(folder, pids)
    found["exit"] = code
    if not is_over and code != 0:
        fault = fault or f"the search ended with {code} though only its {role} was killed: {_output(folder)}"
    return {**found, "fault": fault} if fault else {**found, **_go_on(search, folder, role)}


def _go_on(before: LiveSearch, folder: Path, killed: Role) -> Figures:
    """The same command again, to its end."""
    known, logs = ended_trials(before.run), _logs(before.run)
    search = start_search(folder, script=_SHORT)
    search.wait_for(lambda: False)
    code = search.end()
    after = ended_trials(search.run)
    lost = sorted(number for number in known if after.get(number) != known[number])
    again = sorted(number for number in known if _logs(search.run).get(number) != logs.get(number))
    faults = [
        f"the same command ended with {code}: {_output(folder)}" if code else None,
        f"trials are lost: {lost}" if lost else None,
        f"trials were run again: {again}" if again else None,
        left_of(folder, ()),
        None if code else fault_of_folder(search, may_leave_sockets=killed == "all"),
    ]
    fault = next(filter(None, faults), None)
    return {"known": len(known), "trials": len(after), **({"fault": fault} if fault else {})}


def _kill(search: LiveSearch, role: Role, random: Random) -> int:
    """Kill what there is in a role, one of several; how many were."""
    doomed = search.processes(role)
    if role == "all":
        for process in doomed:
            _send(process)
    elif doomed:
        _send(random.choice(doomed))
    return len(doomed) if role == "all" else min(1, len(doomed))


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
    hit = [case for case in cases.values() if case.get("killed")]
    return {
        "hit": len(hit),
        "by_role": dict(Counter(case["role"] for case in hit)),
        "by_stage": dict(Counter(case["stage"] for case in hit)),
        "promises": {
            "after a kill the search goes on, and nothing is lost, run twice or left": (
                all("fault" not in case for case in cases.values()) if hit else None
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
"""A kill that comes when there is no such process counts as no hit."""
