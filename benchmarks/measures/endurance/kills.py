"""Whether a search outlasts SIGKILLs: one of its processes, or all, at any moment; then the same command goes on.

A case kills in one role. A search whose parent was killed is started again, and killed again in its next stage; one
whose server, rank or loader worker is killed, in every second stage, is to go on by itself.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic, sleep

from benchmarks.measures.endurance.live_search import (
    ROLES,
    STAGES,
    HungError,
    LiveSearch,
    Role,
    Stage,
    ended_trials,
    fault_of_folder,
    fault_of_result,
    left_of,
    segments_now,
    send,
    start_search,
)
from benchmarks.measures.endurance.part import Part
from benchmarks.measures.endurance.short_windows import SHORT
from benchmarks.measures.part_guard import Figures

__all__ = ["KILLS"]

_CASES, _QUICK = 88, 5
_FEWEST_KILLS = 300
_LATEST_S = {"start": 4.0, "trials": 1.5}
_LATEST_ELSEWHERE_S = 0.6
"""After a stage has begun: what it takes, with short windows."""
_COMES_WITHIN_S = 1.5
"""A process of the role, once the moment is there."""
_FATAL: frozenset[Role] = frozenset({"parent", "all"})
_WITH_RANKS: tuple[Stage, ...] = ("probe", "baseline", "trials", "repeats")
_WITH_WORKERS: tuple[Stage, ...] = ("baseline", "trials", "repeats")


def _cases(is_quick: bool) -> Sequence[str]:
    return [f"kills_{number:03d}" for number in range(_QUICK if is_quick else _CASES)]


def _run(case: str, folder: Path) -> Figures:
    number = int(case[-3:])
    random, role = Random(number), ROLES[number % len(ROLES)]
    found: Figures = {"role": role, "hit": dict[str, int]()}
    try:
        faults = [fault for fault in _killed(number, role, random, folder, found["hit"]) if fault]
    except HungError as hung:
        faults = [str(hung)]
    return {**found, **({"fault": faults[0]} if faults else {})}


def _killed(
    number: int, role: Role, random: Random, folder: Path, hit: dict[str, int]
) -> Iterator[str | None]:
    """Kill in one stage after the other, and go on; what is wrong, None where nothing is."""
    segments, known, logs = segments_now(), dict[int, str](), dict[int, int]()
    search = start_search(folder, script=SHORT)
    for stage in _stages(number, role):
        if not _comes_to(search, stage, role):
            break
        sleep(random.uniform(0, _LATEST_S.get(stage, _LATEST_ELSEWHERE_S)))
        ended, written = (
            ended_trials(search.run),
            _logs(search.run),
        )  # what had ended before the kill
        hit[stage] = _kill(search, role, random)
        known = {**ended, **known}  # what was known first must hold to the end
        logs = {**{one: at for one, at in written.items() if one in ended}, **logs}
        if role in _FATAL and hit[stage]:
            search.end()
            yield left_of(folder, segments)
            search = start_search(folder, script=SHORT)
    code = search.end()
    yield left_of(folder, segments)
    if code:
        yield f"the command ended with {code}: {search.said}"
        return
    after, written = ended_trials(search.run), _logs(search.run)
    lost = sorted(number for number in known if after.get(number) != known[number])
    again = sorted(number for number in logs if written.get(number) != logs[number])
    yield f"trials are lost: {lost}" if lost else None
    yield f"trials were run again: {again}" if again else None
    yield fault_of_folder(search, may_leave_sockets=role == "all")
    yield fault_of_result(search)


def _comes_to(search: LiveSearch, stage: Stage, role: Role) -> bool:
    """Wait for a stage and for a process in the role; False where the search ended before.

    The probe's log is there before its process.
    """
    wanted: Role = "rank" if stage == "probe" and role in _FATAL else role
    is_there = search.wait_for(partial(search.is_at, stage))
    return is_there and search.wait_for(lambda: bool(search.processes(wanted)))


def _stages(number: int, role: Role) -> Sequence[Stage]:
    """Those in which there is a process of the role; every second one where the search is to go on by itself.

    A second kill of the same trial counts for a failure of it.
    """
    if role in _FATAL:
        return STAGES
    turn = number // len(ROLES) % 2
    return {"server": STAGES, "rank": _WITH_RANKS, "worker": _WITH_WORKERS}[role][turn::2]


def _kill(search: LiveSearch, role: Role, random: Random) -> int:
    """Kill one process of a role, or all there are; how many were."""
    until = monotonic() + _COMES_WITHIN_S
    while (
        not (doomed := search.processes(role))
        and monotonic() < until
        and search.process.poll() is None
    ):
        sleep(0.005)
    return len(
        send(
            doomed if role == "all" else random.sample(doomed, min(1, len(doomed))), signal.SIGKILL
        )
    )


def _logs(run: Path) -> dict[int, int]:
    """When the logs of trials were written last."""
    found = (path for path in (run / "logs").glob("trial-*.log") if path.stem[6:].isdecimal())
    return {int(path.stem[6:]): path.stat().st_mtime_ns for path in found}


def _judge(cases: Mapping[str, Figures]) -> Figures:
    hits = [
        (case["role"], stage)
        for case in cases.values()
        for stage, killed in case["hit"].items()
        if killed
    ]
    return {
        "kills": len(hits),
        "by_role": dict(Counter(role for role, _ in hits)),
        "by_stage": dict(Counter(stage for _, stage in hits)),
        "promises": {
            "after a kill the search goes on, and nothing is lost, run twice or left": (
                all("fault" not in case for case in cases.values()) if hits else None
            ),
            f"{_FEWEST_KILLS} kills were tried": len(hits) >= _FEWEST_KILLS or None,
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
