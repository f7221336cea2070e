"""Whether a search outlasts being stopped and a clock that jumps: it ends well, and believes no stopped window.

A process is stopped for some seconds, or for good; or the parent's clock jumps an hour ahead or back once a trial has
ended.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from time import sleep

import autotune
from autotune.protocol.clock import LONGEST_DEADLINE
from benchmarks.measures.endurance.live_search import ROLES, LiveSearch, Role, fault_of_folder, left_of, start_search
from benchmarks.measures.endurance.part import Part
from benchmarks.measures.part_guard import Figures

__all__ = ["STOPS"]

_REPEATS = 4
_STOPPED_S = 3.0
_DEADLINE_S = "25"
_FOREVER: tuple[Role, ...] = ("server", "rank", "worker")
_JUMP = """
import time
from pathlib import Path
from autotune.protocol import clock

clock._read = lambda: time.monotonic() + ({jump_s} if Path("run/trials.jsonl").exists() else 0)
"""
_JUMPS = {"clock_ahead": 3600, "clock_back": -3600}


def _cases(is_quick: bool) -> Sequence[str]:
    repeats = 1 if is_quick else _REPEATS
    stopped = [f"{role}_{number}" for number in range(repeats) for role in ROLES]
    return [*stopped, *(f"{role}_forever" for role in _FOREVER), *_JUMPS]


def _run(case: str, folder: Path) -> Figures:
    if case in _JUMPS:
        return _checked(start_search(folder, script=_JUMP.format(jump_s=_JUMPS[case])))
    name, _, kind = case.partition("_")
    role = next(known for known in ROLES if known == name)
    search = start_search(folder, {LONGEST_DEADLINE: _DEADLINE_S})
    stage = "trials" if kind == "forever" else Random(case).choice(["baseline", "trials"])
    search.wait_for(lambda: search.is_at("trials" if stage == "trials" else "baseline"))
    search.wait_for(lambda: bool(search.processes(role)))
    sleep(Random(case).uniform(0.0, 2.0))
    stopped = [process.pid for process in search.processes(role)]
    _send(stopped, signal.SIGSTOP)
    if kind != "forever":
        sleep(_STOPPED_S)
        _send(stopped, signal.SIGCONT)
    return {"role": role, "stage": stage, "stopped": len(stopped), **_checked(search)}


def _checked(search: LiveSearch) -> Figures:
    """The end of a search, which must be a good one."""
    search.wait_for(lambda: False)
    code = search.end()
    if code:
        return {"exit": code, "fault": f"it ended with {code}: {(search.folder / 'output').read_text()[-600:]}"}
    autotune.load(search.run / "recommended.yaml")
    trials = [json.loads(line)["result"] for line in (search.run / "trials.jsonl").read_text().splitlines()]
    fault = left_of(search.folder, ()) or fault_of_folder(search)
    remarks = [remark["code"] for trial in trials for remark in (trial["measurement"] or {}).get("remarks", ())]
    found: Figures = {"exit": code, "outcomes": [trial["outcome"] for trial in trials], "remarks": remarks}
    return {**found, "fault": fault} if fault else found


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _judge(cases: Mapping[str, Figures]) -> Figures:
    told = sum("measured_anew" in case.get("remarks", ()) for case in cases.values())
    is_kept = all("fault" not in case for case in cases.values()) if cases else None
    return {"measured_anew": told, "promises": {"a search that was stopped, or whose clock jumps, ends well": is_kept}}


STOPS = Part(
    proves="stopped processes and a clock that jumps end no search, and no stopped window is believed silently",
    cases=_cases,
    run=_run,
    judge=_judge,
    limit_s=400.0,
)
"""SIGSTOP and SIGCONT, SIGSTOP alone, and jumps of an hour."""
