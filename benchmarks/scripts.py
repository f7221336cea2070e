"""Every script of tests/scripts by `diagnose`, `run` and `apply`, whole: how each ended, and what it has left behind.

Each gets a copy of that folder for itself. `run` has half a minute, and what it has recommended is then applied for a
quarter of one: a script that trains without end must still train by then. Figures are of function, not of speed. Takes
a minute and a half a script; goes on where it was cut off. The environment must have what the scripts need:
    make setup-integrations; .venv-integrations/bin/python -m benchmarks.scripts
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import ROOT
from benchmarks.measures.commands import run_command
from benchmarks.measures.recording import (
    Recording,
    describe_machine,
    make_parser,
    print_table,
    read_results,
    say,
    start_recording,
)

_SCRIPTS = ROOT / "tests" / "scripts"
_COMMANDS: dict[str, dict[str, Any]] = yaml.safe_load((_SCRIPTS / "commands.yaml").read_text())
_SEARCH_S, _APPLIED_S, _LONGEST_S = 30, 15.0, 300.0
_TORCHS_OWN = "torchinductor_"
"""Its cache, which importing its compiler makes."""
_NOT_COUNTED = {"__pycache__", "runs"}


def main() -> int:
    arguments = _parse()
    recording = start_recording("scripts", arguments, describe_machine("cpu"))
    recording.results.update(read_results(recording.path, fresh=arguments.fresh))
    for name in arguments.script or _names():
        needed = _COMMANDS.get(name, {}).get("needs")
        if needed and find_spec(needed) is None:
            say(f"{name}: passed over, {needed} is not installed")
        elif name not in recording.results or arguments.script:
            say(name)
            recording.add(name, _tried(name))
    _print(recording)
    bad = [name for name, found in recording.results.items() if not _is_well(found)]
    print(
        f"\n{recording.path}: {len(recording.results)} scripts, not as they should be: {', '.join(bad) or 'none'}"
    )
    return 1 if bad else 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "nothing: it is as quick as it can be")
    parser.add_argument("--script", action="append", help="this one alone; may be repeated")
    parser.add_argument("--fresh", action="store_true", help="forget the file's figures")
    return parser.parse_args()


def _names() -> list[str]:
    alone = [path.name for path in _SCRIPTS.glob("*.py") if path.name not in _COMMANDS]
    return sorted([*_COMMANDS, *alone])


def _tried(name: str) -> dict[str, Any]:
    """Try one script; exit codes, seconds, and what is otherwise than before."""
    own = _COMMANDS.get(name, {})
    words, search_s = own.get("command", f"python {name}").split(), own.get("search_s", _SEARCH_S)
    with (
        tempfile.TemporaryDirectory(prefix="autotune-scripts-") as home,
        tempfile.TemporaryDirectory(prefix="autotune-tmp-") as temporary,
    ):
        shutil.copytree(_SCRIPTS, home, dirs_exist_ok=True)
        folder, before = Path(home, own.get("folder", "")), _files(Path(home))
        run = partial(_ended, folder=folder, environment={**os.environ, "TMPDIR": temporary})
        found: dict[str, Any] = {
            "diagnose": run(["diagnose", "--", *words], within_s=_LONGEST_S),
            "run": run(
                ["run", "--set", f"budget.timeout_s={search_s}", "--", *words], within_s=_LONGEST_S
            ),
        }
        after = _files(Path(home))
        found["temporary"] = sorted(
            path.name for path in Path(temporary).iterdir() if not path.name.startswith(_TORCHS_OWN)
        )
        found |= {"new_files": sorted(after - before), "lost_files": sorted(before - after)}
        recommended = [*folder.glob("runs/*/recommended.yaml")]
        if recommended:
            found["apply"] = run(
                ["apply", str(recommended[0].parent), "--", *words], within_s=_APPLIED_S
            )
        found["processes"] = len(_processes_in(folder))
    return found


def _ended(
    words: list[str], *, folder: Path, environment: dict[str, str], within_s: float
) -> dict[str, Any]:
    """Run autotune; its exit code (None: it ran until it was ended), seconds, and the first line of its answer."""
    command = [sys.executable, "-m", "autotune", *words]
    ran = run_command(command, folder=folder, environment=environment, within_s=within_s)
    lines = ran.texts("out" if ran.code == 0 else "err")
    lines = [line for line in lines if line.startswith("error: ")] or lines
    return {
        "code": ran.code,
        "seconds": round(ran.seconds, 1),
        "said": "" if words[0] == "apply" else "".join(lines[:1]),
    }


def _files(folder: Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*"))
    return {str(path) for path in paths if not _NOT_COUNTED & set(path.parts)}


def _processes_in(folder: Path) -> list[int]:
    running = [(process.pid, process.info["cwd"]) for process in psutil.process_iter(["cwd"])]
    return [pid for pid, cwd in running if cwd and Path(cwd).is_relative_to(folder)]


def _is_well(found: dict[str, Any]) -> bool:
    codes = [
        found["diagnose"]["code"],
        found["run"]["code"],
        found.get("apply", {"code": None})["code"],
    ]
    return codes[:2] == [0, 0] and codes[2] in {None, 0} and not any(found[left] for left in _LEFT)


_LEFT = ("new_files", "lost_files", "processes", "temporary")


def _print(recording: Recording) -> None:
    rows = [
        [
            name,
            *(
                f"{found[what]['code']} {found[what]['seconds']:.0f} s" if what in found else "-"
                for what in _WHAT
            ),
            ", ".join(left for left in _LEFT if found[left]) or "nothing",
        ]
        for name, found in recording.results.items()
    ]
    print_table(
        "Exit code (None: still training when it was ended) and seconds",
        ["script", *_WHAT, "left"],
        rows,
    )


_WHAT = ("diagnose", "run", "apply")


if __name__ == "__main__":
    raise SystemExit(main())
