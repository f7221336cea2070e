"""Whether a search outlasts being stopped and a clock that jumps: it ends well, and believes no stopped window.

A process is stopped for some seconds, or for good; or the parent's clock, or the time of day of all processes, jumps an
hour ahead or back once a trial has ended.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from time import sleep
from typing import Any

from autotune.protocol.disk import LONGEST_DEADLINE
from benchmarks.measures.endurance.live_search import (
    ROLES,
    HungError,
    LiveSearch,
    Role,
    Stage,
    fault_of_folder,
    fault_of_result,
    left_of,
    segments_now,
    send,
    start_search,
)
from benchmarks.measures.endurance.part import Part
from benchmarks.measures.part_guard import Figures

__all__ = ["STOPS"]

_REPEATS = 4
_STOPPED_S = 3.0
_SEEN_S = 2.5
"""That a block lasts at least in which something stood still for so long: a loader worker has batches in advance."""
_DEADLINE_S = "25"
_FOREVER: tuple[Role, ...] = ("server", "rank", "worker")
_BRIEF = "from benchmarks.measures.endurance.short_windows import end_briefly; end_briefly()"
_JUMP = f"""
{_BRIEF}
import time
from pathlib import Path
from autotune.protocol import clock

clock._read = lambda: time.monotonic() + ({{jump_s}} if Path("run/trials.jsonl").exists() else 0)
"""
_DAY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    int (*whole)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int done = whole(id, at);
    if (id == CLOCK_REALTIME && access(FROM, F_OK) == 0) at->tv_sec += JUMP_S;
    return done;
}
"""
"""The time of day, for all processes of a search."""
_JUMPS = {"clock_ahead": 3600, "clock_back": -3600, "day_ahead": 3600, "day_back": -3600}
_WITHOUT_END = ("--set", "budget.timeout_s=null")
"""A jump ahead uses up a time-out."""


def _cases(is_quick: bool) -> Sequence[str]:
    repeats = 1 if is_quick else _REPEATS
    stopped = [f"{role}_{number}" for number in range(repeats) for role in ROLES]
    return [*stopped, *(f"{role}_forever" for role in _FOREVER), *_JUMPS]


def _run(case: str, folder: Path) -> Figures:
    try:
        return _of_clock(case, folder) if case in _JUMPS else _of_signals(case, folder)
    except HungError as hung:
        return {"fault": str(hung)}


def _of_clock(case: str, folder: Path) -> Figures:
    segments, jump_s = segments_now(), _JUMPS[case]
    if case.startswith("clock"):
        search = start_search(folder, script=_JUMP.format(jump_s=jump_s), settings=_WITHOUT_END)
    elif shutil.which("cc") is None:
        return {"skipped": "needs cc"}
    else:
        shim = folder / "shim.so"
        flags = [
            f"-DJUMP_S={jump_s}",
            f'-DFROM="{folder}/run/trials.jsonl"',
            "-shared",
            "-fPIC",
            "-o",
            str(shim),
        ]
        subprocess.run(["cc", *flags, "-x", "c", "-", "-ldl"], input=_DAY, text=True, check=True)
        search = start_search(folder, {"LD_PRELOAD": str(shim)}, _BRIEF, _WITHOUT_END)
    code = search.end()
    return {"exit": code, **_told(search, code, left_of(folder, segments), all_must_end_well=True)}


def _of_signals(case: str, folder: Path) -> Figures:
    name, _, kind = case.partition("_")
    segments, role = segments_now(), next(known for known in ROLES if known == name)
    search = start_search(folder, {LONGEST_DEADLINE: _DEADLINE_S}, _BRIEF)
    stage: Stage = "trials" if kind == "forever" else Random(case).choice(["baseline", "trials"])
    search.wait_for(lambda: search.is_at(stage))
    sleep(Random(case).uniform(0.0, 2.0))
    search.wait_for(lambda: bool(search.processes(role)))
    stopped = search.processes(role)
    count = len(send(stopped, signal.SIGSTOP))
    if kind != "forever":
        sleep(_STOPPED_S)
        send(stopped, signal.SIGCONT)
    code = search.end()
    found = _told(search, code, left_of(folder, segments), all_must_end_well=kind != "forever")
    if not count:
        raise RuntimeError(f"there was no {role} to stop")
    return {"exit": code, "role": role, "stage": stage, "stopped": count, **found}


def _told(search: LiveSearch, code: int, left: str | None, *, all_must_end_well: bool) -> Figures:
    """How a search ended, which must be well."""
    if code:
        return {"fault": f"it ended with {code}: {search.said}"}
    trials = [
        json.loads(line)["results"][0]
        for line in (search.run / "trials.jsonl").read_text().splitlines()
    ]
    found: Figures = {
        "outcomes": [trial["outcome"] for trial in trials],
        "notes": [
            note["code"]
            for trial in trials
            for note in (trial["measurement"] or {}).get("notes", ())
        ],
    }
    faults = (
        left,
        fault_of_folder(search),
        fault_of_result(search) if all_must_end_well else None,
        next(filter(None, map(_believed, trials)), None),
    )
    fault = next(filter(None, faults), None)
    return {**found, **({"fault": fault} if fault else {})}


def _believed(trial: Mapping[str, Any]) -> str | None:
    """A window that stood still, and is taken for one that did not."""
    if trial["measurement"] is None:
        return None
    longest_s = max(block["seconds"] for block in trial["measurement"]["window"]["blocks"])
    is_told = {"rerun_after_signal", "window_stopped"} & {
        note["code"] for note in trial["measurement"]["notes"]
    }
    if longest_s < _SEEN_S or is_told:
        return None
    return f"a block of {longest_s:.1f} s is believed"


def _judge(cases: Mapping[str, Figures]) -> Figures:
    tried = {name: case for name, case in cases.items() if "skipped" not in case}
    told = sum("rerun_after_signal" in case.get("notes", ()) for case in cases.values())
    is_kept = all("fault" not in case for case in tried.values()) if tried else None
    return {
        "measured_anew": told,
        "skipped": sorted({*cases} - {*tried}),
        "promises": {"a search that was stopped, or whose clock jumps, ends well": is_kept},
    }


STOPS = Part(
    proves="stopped processes and a clock that jumps end no search, and no stopped window is believed silently",
    cases=_cases,
    run=_run,
    judge=_judge,
    limit_s=400.0,
)
"""SIGSTOP and SIGCONT, SIGSTOP alone, and jumps of an hour."""
