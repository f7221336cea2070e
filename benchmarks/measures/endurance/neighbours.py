"""Two searches at once, readers of a search that runs, and searches in odd places: each has an answer.

A case is a search by the command line in a process of its own. It ends well, with nothing that others could read, or is
refused in one sentence, with nothing written beside its run folder; never with a traceback.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic, sleep

from benchmarks.measures.endurance.part import TORCHS_CACHE, Part, error_in
from benchmarks.measures.endurance.places import PLACES, Place, command_line, fill, lacks
from benchmarks.measures.part_guard import Figures

__all__ = ["NEIGHBOURS"]

_TOGETHER = ("two on one folder", "two on one device", "readers while it runs")
_QUICK = (
    *_TOGETHER,
    "folder: a question mark",
    "read-only checkout",
    "a user without a name",
    "umask 777",
)
_ENDS_WITHIN_S = 500.0
_BEGINS_WITHIN_S = 120.0
_LONG = ("--set", "budget.n_trials=8", "--set", "space.num_workers=[0,1,2]")


def _run(case: str, folder: Path) -> Figures:
    if case in _TOGETHER:
        tried = {
            "two on one folder": _on_one_folder,
            "two on one device": _on_one_device,
            "readers while it runs": _readers,
        }
        return {"fault": tried[case](folder)}
    place = PLACES[case]
    if why := lacks(place):
        return {"skipped": why}
    below = fill(place, folder)
    words, variables = command_line(place, folder)
    before = {*folder.rglob("*")}
    ended = subprocess.run(
        words,
        env=variables,
        cwd=below,
        capture_output=True,
        timeout=_ENDS_WITHIN_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    told = ended.stderr.decode(errors="replace")
    return {
        "exit": ended.returncode,
        "told": error_in(told)[:1500],
        "fault": _fault(place, ended.returncode, told, folder) or _beside(folder, before),
    }


def _fault(place: Place, code: int, told: str, folder: Path) -> str:
    if "Traceback" in told or "this is a bug" in told:
        return "a traceback"
    if "\x1b" in told:
        return "a raw escape on the terminal"
    if place.answer:
        errors = [line for line in told.splitlines() if line.startswith("error: ")]
        is_told = len(errors) == 1 and re.search(place.answer, errors[0])
        return (
            ""
            if code == 2 and is_told
            else f"exit {code}, and not one sentence with {place.answer!r}"
        )
    found = [Path(root) for root, _, files in os.walk(folder) if "recommended.yaml" in files]
    if code != 0 or len(found) != 1:
        return f"exit {code}, {len(found)} recommendations"
    return _laid_open(found[0])


def _beside(folder: Path, before: Collection[Path]) -> str:
    """What a search has written beside its run folder and torch's cache; "" where it is nothing."""
    runs = {path.parent for path in folder.rglob(".lock")}
    new = [
        path
        for path in folder.rglob("*")
        if path not in before and not runs & {path, *path.parents}
    ]
    left = [
        path
        for path in new
        if not any(path in run.parents for run in runs) and TORCHS_CACHE not in str(path)
    ]
    return (
        f"written beside the run folder: {[str(path.relative_to(folder)) for path in left]}"
        if left
        else ""
    )


def _laid_open(run: Path) -> str:
    """What others may read of a run folder; "" where it is nothing."""
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in [run, *run.rglob("*")]}
    wide = [f"{path.name} {mode:o}" for path, mode in modes.items() if mode & 0o077]
    return f"others may use {', '.join(wide)}" if wide else ""


def _on_one_folder(folder: Path) -> str:
    first = _start(folder, "run", _LONG)
    _wait_for(folder / "run" / ".holder", first)
    second = _start(folder, "run")
    said = second.communicate(timeout=_ENDS_WITHIN_S)[1]
    if second.returncode != 2 or f"process {first.pid} on " not in said or said.count("\n") != 1:
        return f"the second ended with {second.returncode} and said: {said}"
    first.communicate(timeout=_ENDS_WITHIN_S)
    return "" if first.returncode == 0 else f"the first ended with {first.returncode}"


def _on_one_device(folder: Path) -> str:
    both = {name: _start(folder, name, _LONG) for name in ("one", "two")}
    for search in both.values():
        search.communicate(timeout=_ENDS_WITHIN_S)
    codes = [search.returncode for search in both.values()]
    if codes != [0, 0]:
        return f"they ended with {codes}"
    reports = {name: (folder / name / "report.md").read_text() for name in both}
    unaware = [
        mine
        for mine, other in (("one", "two"), ("two", "one"))
        if f"process {both[other].pid} " not in reports[mine]
    ]
    return f"not told in {unaware}" if unaware else ""


def _readers(folder: Path) -> str:
    """Readers of a search from its beginning, and of one that goes on, which has a result to report."""
    begun = _read_during(_start(folder, "run", _LONG[2:]), folder, {0, 2})
    return begun or _read_during(_start(folder, "run", _LONG), folder, {0})


def _read_during(search: subprocess.Popen[str], folder: Path, codes: Collection[int]) -> str:
    """Both of Optuna's ways to read a study, and our report, again and again while the search writes."""
    _wait_for(folder / "run" / "trials.jsonl", search)
    reads, faults = 0, list[str]()
    while search.poll() is None:
        with closing(
            sqlite3.connect(f"file:{folder}/run/study.db?mode=ro", uri=True, timeout=10.0)
        ) as study:
            if study.execute("PRAGMA integrity_check").fetchone() != ("ok",):
                faults.append("study.db is not whole")
        reader = "import optuna, sys; print(len(optuna.load_study(study_name=None, storage=sys.argv[1]).trials))"
        found = subprocess.run(
            [*_PYTHON, "-c", reader, f"sqlite:///{folder}/run/study.db"],
            capture_output=True,
            text=True,
            check=False,
        )
        faults += [f"optuna: {found.stderr[-300:]}"] if found.returncode else []
        report = subprocess.run(
            [*_PYTHON, "-m", "autotune", "report", f"{folder}/run"],
            env=_variables(),
            capture_output=True,
            text=True,
            check=False,
        )
        if report.returncode not in codes or report.stderr.count("\n") > (report.returncode != 0):
            faults.append(f"report: {report.stderr[-300:]}")
        reads += 1
    search.communicate()
    if search.returncode != 0:
        faults.append(f"the search ended with {search.returncode}")
    return "; ".join(dict.fromkeys(faults)) or ("" if reads else "nothing was read")


def _start(folder: Path, run_dir: str, more: Sequence[str] = ()) -> subprocess.Popen[str]:
    place = Place(arguments=["--set", f"run_dir={run_dir}", *more])
    fill(place, folder)
    words, variables = command_line(place, folder)
    return subprocess.Popen(
        words,
        env=variables,
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _variables() -> dict[str, str]:
    return command_line(Place(), Path())[1]


_PYTHON = command_line(Place(), Path())[0][:1]


def _wait_for(path: Path, search: subprocess.Popen[str]) -> None:
    begun = monotonic()
    while not path.exists():
        if search.poll() is not None or monotonic() - begun > _BEGINS_WITHIN_S:
            raise RuntimeError(f"the search did not come to {path.name}")
        sleep(0.02)


def _judge(cases: Mapping[str, Figures]) -> Figures:
    tried = {name: found for name, found in cases.items() if "skipped" not in found}
    return {
        "skipped": {name: found["skipped"] for name, found in cases.items() if "skipped" in found},
        "promises": {
            "every place has an answer": not any(found["fault"] for found in tried.values())
            if tried
            else None
        },
    }


NEIGHBOURS = Part(
    proves="Two searches at once, and searches in odd places and of odd users: each has an answer",
    cases=lambda is_quick: _QUICK if is_quick else (*_TOGETHER, *PLACES),
    run=_run,
    judge=_judge,
    limit_s=1200.0,
)
