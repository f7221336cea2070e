"""Part "damage": every file of a run folder damaged in every way, and the folder used in every way.

A use ends with a result, or with an error of ours that names the file; where it needs the file and goes on without it,
it says so. It never falls, hangs or unpickles.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.measures.endurance.damage_kinds import (
    DAMAGES,
    NOT_SEEN,
    OF_A_FOLDER,
    ONE_OF_A_KIND,
    OPENED,
)
from benchmarks.measures.endurance.damage_uses import READS, USES, make_run, used
from benchmarks.measures.endurance.part import Part
from benchmarks.measures.endurance.short_windows import without_drawings
from benchmarks.measures.part_guard import Figures, Keep, run_guarded

__all__ = ["DAMAGE"]

_STATES = ("finished", "interrupted", "killed")
_FILES = (
    *(
        "study.db",
        "study.db-wal",
        "study.db-shm",
        "trials.jsonl",
        "summary.json",
        "curves.json",
        "recommended.yaml",
    ),
    *("report.md", "report.html", "environment.json", ".lock", ".holder", "logs/trial-001.log"),
    "recommended.patch",
)
_FOLDERS = ("logs", "payload", "scratch")
_LONGEST_S = 60.0
"""Of a use, many times what it takes: then it hangs."""
_NOT_READ = {("finished", "curves.json"), ("interrupted", "study.db-wal")}
"""A search that is over needs no curves; one that was interrupted has taken its log into the database."""
_UNNAMED = re.compile(
    r"a run folder must hold|is feasible|recommended\.yaml: there is no such file"
)
"""Refusals for what a folder does not hold at all, as that of a search that was killed."""
_NOBODY = 65534
_OFTEN_USED = ("report", "resume", "open_run")
_LESS_OFTEN = ("load", "export", "warm_start")


def _cases(is_quick: bool) -> Sequence[str]:
    states, names = (_STATES[:1], _FILES[:4]) if is_quick else (_STATES, (*_FILES, *_FOLDERS))
    return [f"{state} {name}" for state in states for name in names]


def _run(case: str, folder: Path) -> Figures:
    state, _, name = case.partition(" ")
    whole, endings, faults = folder / "whole", dict[str, str](), list[str]()
    told = dict[str, str]()
    without_drawings()
    make_run("finished", folder / "first")
    for use in USES:  # what is imported and read once, forks need not do again, and nobody may not
        used(use, folder / "first")
    if error := run_guarded(lambda _: _made(state, whole), limit_s=2 * _LONGEST_S).get("error"):
        raise RuntimeError(error)
    for damage in (
        OF_A_FOLDER if name in _FOLDERS else DAMAGES if state == "finished" else ONE_OF_A_KIND
    ):
        for use in _uses_of(name):
            place = folder / "try"
            ending, fault = _tried(
                whole, place, name, damage, use, is_read=(state, name) not in _NOT_READ
            )
            endings[f"{damage}: {use}"] = ending["kind"]
            told |= {f"{damage}: {use}": ending["text"]} if fault else {}
            faults += [f"{damage}: {use}: {fault}"] if fault else []
            _cleared(place)
    found: Figures = {"endings": endings, "tried": len(endings), "told": told, "faults": faults}
    return {**found, **({"fault": faults[0]} if faults else {})}


def _made(state: str, whole: Path) -> Figures:
    make_run(state, whole)
    return {}


def _uses_of(name: str) -> Iterator[str]:
    yield from _OFTEN_USED
    yield from (use for use in _LESS_OFTEN if name in READS[use])


def _tried(
    whole: Path, place: Path, name: str, damage: str, use: str, *, is_read: bool
) -> tuple[Figures, str | None]:
    """How a use of a damaged copy ended, and what is wrong with that."""
    run_dir, outside = place / "run", place / "outside"
    outside.mkdir(parents=True)
    (outside / "secret").write_text("nobody reads or writes this")
    shutil.copytree(whole, run_dir)
    file = run_dir / name
    file.parent.mkdir(exist_ok=True)
    DAMAGES[damage](file, outside)
    if damage == "unreadable":
        _given_away(place)
    before = _seen(outside)
    found = run_guarded(partial(_used, use, run_dir), limit_s=_LONGEST_S)
    if "error" in found:
        last = found["error"].strip().splitlines()[-1]
        return {"kind": "ended", "text": found["error"][-500:]}, f"it hung or died: {last}"
    is_needed = is_read and name in READS[use] and damage not in NOT_SEEN
    fault = _fault(found, name, is_needed=is_needed) or _reached(before, _seen(outside))
    text = found["text"] if fault else found["text"][:160]
    return {"kind": found["kind"], "text": text[-3000:]}, fault


def _given_away(place: Path) -> None:
    """Give a folder to nobody, where root, who may read all, is the one that tries."""
    if os.geteuid() == 0:
        place.parent.chmod(0o711)
        for path in (place, *place.rglob("*")):
            os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)


def _used(use: str, run_dir: Path, _keep: Keep) -> Figures:
    is_given = os.geteuid() == 0 and run_dir.stat().st_uid == _NOBODY
    if is_given:
        os.setresuid(_NOBODY, _NOBODY, 0)
    try:
        return dict(used(use, run_dir).figures())
    finally:
        if is_given:
            os.setresuid(0, 0, 0)


def _fault(found: Mapping[str, str], name: str, *, is_needed: bool) -> str | None:
    kind, text = found["kind"], found["text"]
    if kind == "fell":
        return text.strip().splitlines()[-1]
    own = Path(name).name.removesuffix("-wal").removesuffix("-shm")
    if kind == "told" and own not in text and not _UNNAMED.search(text):
        return f"{own} is not named: {text.splitlines()[0][:200]}"
    if kind == "result" and is_needed and own not in text:
        return f"it went on without a word of {own}"
    return None


def _seen(outside: Path) -> dict[str, tuple[int, int, int]]:
    """What lies outside, with size, mode and time of the last change."""
    kept = {}
    for path in sorted(outside.rglob("*")):
        known = path.lstat()
        kept[str(path.relative_to(outside))] = (
            known.st_size,
            stat.S_IMODE(known.st_mode),
            known.st_mtime_ns,
        )
    return kept


def _reached(before: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    if OPENED in after:
        return "a pickle was read"
    changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    return f"outside of the folder, {', '.join(changed)} changed" if changed else None


def _cleared(place: Path) -> None:
    for path in place.rglob("*"):
        if path.is_file() and not os.access(path, os.R_OK):
            path.chmod(0o600)
    shutil.rmtree(place)


def _judge(cases: Mapping[str, Figures]) -> Figures:
    faults = [f"{name}: {fault}" for name, found in cases.items() for fault in found["faults"]]
    return {
        "uses_tried": sum(found["tried"] for found in cases.values()),
        "faults_found": len(faults),
        "promises": {"every damage is told or outlived": not faults if cases else None},
    }


DAMAGE = Part(
    proves="every file of a run folder may be damaged in any way: it is named, or what is whole is gone on with",
    cases=_cases,
    run=_run,
    judge=_judge,
    limit_s=3600.0,
)
