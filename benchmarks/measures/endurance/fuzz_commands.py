"""Command lines with made-up words, each run as a user would: `python -m autotune ...` in a process of its own."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from hypothesis import strategies as st

from benchmarks import ROOT
from benchmarks.measures.endurance.fuzz_texts import documents, overrides
from benchmarks.measures.endurance.fuzz_tries import BrokenError

__all__ = ["commands", "try_command"]

_LONGEST_S = 120.0
_REFUSED_S = 10.0
"""Of a refusal, in time of the processor."""
_RAN = "logs/probe.log"
"""In a run folder: the user's own code has run, and what it printed is kept."""
_DOCUMENTED = {0, 2, 3}
_NOT_WELL = 4
"""With --exit-code."""
_PATHS = [
    "",
    ".",
    "/",
    "/dev/null",
    "nowhere",
    "x" * 5000,
    "a b",
    "a'b",
    "user_code.py",
    "\U0001f600",
    "-",
    "--",
    "-1",
]
_OPTIONS = [
    *("--json", "--quiet", "--fresh", "--exit-code", "--print", "--nonsense", "--help"),
    *("--set", "--to", "hf", "--executor"),
]


def commands(folder: Path) -> st.SearchStrategy[list[str]]:
    """Words after `autotune`; a configuration among them lies in the folder."""
    paths = st.sampled_from(_PATHS) | st.text(
        st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8
    )
    configs = documents().map(lambda raw: _written(folder, raw))
    options = st.lists(st.sampled_from(_OPTIONS), max_size=2)
    settings: st.SearchStrategy[list[str]] = (
        overrides().map(lambda text: ["--set", text.replace("\0", "")]) | _nothing()
    )
    of_plan = st.tuples(
        st.sampled_from(["run", "check", "diagnose"]), configs | paths, settings, options
    )
    names = st.sampled_from(["report", "export", "init", "apply", "env", "nonsense"])
    others = st.tuples(names, paths, _nothing(), options)
    return (of_plan | others).map(
        lambda all_: [all_[0], all_[1], *map(_as_word, all_[2]), *all_[3]]
    )


def _nothing() -> st.SearchStrategy[list[str]]:
    return st.just(list[str]())


def try_command(folder: Path, words: list[str]) -> str:
    """Run it; its exit code as a text."""
    for made_before in (folder / "run", folder / "runs"):
        shutil.rmtree(made_before, ignore_errors=True)
    before, begun = _files(folder), _cpu_s()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AUTOTUNE_TEST_LONGEST_DEADLINE_S": "20"}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "autotune", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise BrokenError(f"it took more than {_LONGEST_S:.0f} s: {words!r:.300}") from None
    told = ended.stderr.strip()
    if ended.returncode not in _DOCUMENTED | ({_NOT_WELL} if "--exit-code" in words else set()):
        raise BrokenError(f"exit code {ended.returncode}: {told[-300:]}")
    if "this is a bug" in told or ('File "' in told and "autotune/" in told):
        raise BrokenError(f"a traceback of ours: {told[-600:]}")
    if ended.returncode == 2:
        made = {name for name, known in _files(folder).items() if before.get(name) != known}
        ran = tuple(name.removesuffix(_RAN) for name in made if name.endswith(_RAN))
        if unwanted := sorted(name for name in made if not f"{name}/".startswith(ran or ("/",))):
            raise BrokenError(f"written on a refusal: {unwanted}")
        if _cpu_s() - begun > _REFUSED_S and not ran:
            raise BrokenError(f"a refusal took {_cpu_s() - begun:.0f} s: {told[:300]}")
        if not told:
            raise BrokenError("nothing was said of a refusal")
    return str(ended.returncode)


def _as_word(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _written(folder: Path, raw: bytes) -> str:
    (folder / "made.yaml").write_bytes(raw)
    return "made.yaml"


def _files(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Sizes and times of the last change, but for what trying itself writes; None: a folder."""
    paths = [
        path
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts and path.name != "made.yaml"
    ]
    found = {
        str(path.relative_to(folder)): None if path.is_dir() else path.lstat() for path in paths
    }
    return {
        name: None if known is None else (known.st_size, known.st_mtime_ns)
        for name, known in found.items()
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
