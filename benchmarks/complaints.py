"""Scripts that people complained about: does `autotune diagnose` name the right cause, and the right remedy first?

Each script of cases/complaints/scripts is copied to a fresh folder as train.py and diagnosed there, unchanged:
    autotune diagnose --json -- python train.py
Recorded: verdict and headline, right or wrong by cases/complaints/expectations.py; the rank of the right remedy,
whether the headline names it, and false remedies above it; seconds in all and to the first verdict, less the script's
own start; lines on 80 columns. Then the script runs as it is and with --fixed, in turn, in pairs: what the remedy
promised against what the fix brings. Goes on where it was cut off. A minute a script with --quick, two without.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from autotune.messages.diagnosis import BOTTLENECKS
from autotune.records.result import Diagnosis
from autotune.report.diagnosis import print_diagnosis
from benchmarks import ROOT
from benchmarks.cases.complaints.expectations import (
    EXPECTATIONS,
    SCRIPTS,
    SHARED_MODULE,
    Expectation,
)
from benchmarks.measures.commands import Line, RunCommand, run_command
from benchmarks.measures.judged import judge, reach, summarize
from benchmarks.measures.recording import (
    Recording,
    describe_machine,
    make_parser,
    print_table,
    read_results,
    say,
    start_recording,
)

_LONGEST_S = 400.0
"""Seconds of a diagnosis, after which it is ended; it should take 45."""
_COLUMNS = 80
_LAST_LINES = 5
"""Lines of a failed command that are kept."""
_RATE = re.compile(r"^rate: ([\d.]+) ")
_GROWTH = re.compile(r"^growth: (-?\d+) MiB")


def main() -> None:
    arguments = _parse()
    recording = start_recording("complaints", arguments, describe_machine("cpu"))
    recording.results.update(read_results(recording.path, fresh=arguments.fresh))
    recording.results.pop("summary", None)
    for expected in _chosen(arguments.only):
        if expected.name in recording.results and not arguments.only:
            continue
        say(expected.name)
        found = _try(expected, arguments)
        recording.add(expected.name, found)
        say(f"{expected.name}: {found['judged']['headline'] if found['judged'] else 'failed'}")
    cases = {name: found for name, found in recording.results.items() if name != "summary"}
    recording.add("summary", summarize(cases))
    _print(cases, recording)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "diagnoses only, no pairs")
    parser.add_argument("--only", metavar="NAME[,NAME]", help="these scripts again")
    parser.add_argument("--fresh", action="store_true", help="forget the file's figures")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=20, help="of a run of a pair (%(default)s)"
    )
    return parser.parse_args()


def _chosen(only: str | None) -> Sequence[Expectation]:
    """Return the cases to run.

    Raises:
        SystemExit: A name is unknown.
    """
    if only is None:
        return EXPECTATIONS
    names = only.split(",")
    known = {expected.name for expected in EXPECTATIONS}
    unknown = set(names) - known
    if unknown:
        raise SystemExit(f"--only must name scripts of {SCRIPTS}, but got {', '.join(unknown)}")
    return [expected for expected in EXPECTATIONS if expected.name in names]


def _try(expected: Expectation, arguments: argparse.Namespace) -> dict[str, Any]:
    """Diagnose a script, then follow the remedy."""
    with tempfile.TemporaryDirectory(prefix="autotune-complaints-") as home:
        folder = Path(home)
        shutil.copy(SCRIPTS / f"{expected.name}.py", folder / "train.py")
        shutil.copy(SCRIPTS / SHARED_MODULE, folder / SHARED_MODULE)
        found = _diagnose(expected, folder)
        if not arguments.quick:
            runs = [
                _run_pair(expected, folder, arguments.seconds, is_fixed_first=bool(number % 2))
                for number in range(arguments.pairs)
            ]
            found |= _follow(expected, runs, found["judged"])
    return found


def _diagnose(expected: Expectation, folder: Path) -> dict[str, Any]:
    """Return how a diagnosis ended, and what it found: None under "judged" if it failed."""
    command = [sys.executable, "-m", "autotune", "diagnose", "--json", "--", *_command(expected)]
    ran = run_command(command, folder=folder, environment=_environment(), within_s=_LONGEST_S)
    found: dict[str, Any] = {"code": ran.code, "seconds": round(ran.seconds, 1), "judged": None}
    try:
        document = json.loads("\n".join(line.text for line in ran.lines if line.stream == "out"))
    except ValueError:
        return found | {"said": ran.texts("err")[-_LAST_LINES:]}
    return found | {
        "first_verdict_s": first_verdict_s(ran.lines, document, ran.seconds),
        "lines": lines_of(document),
        "judged": judge(document, expected, (folder / "train.py").read_text()),
        "findings": document["findings"],
        "advice": document["advice"],
        "shares": document.get("shares", []),
        "notes": document.get("notes", []),
    }


def first_verdict_s(lines: Sequence[Line], document: dict[str, Any], seconds: float) -> float:
    """Return the seconds to the first verdict after the script's first step, at most.

    It includes the start of autotune itself: only the script's own start is taken off.

    Args:
        lines: What the command printed.
        document: The diagnosis.
        seconds: When the command ended, which is when there is a verdict at the latest.
    """
    words = [*BOTTLENECKS.values(), "An hour of this training goes into"]
    verdicts = re.compile("|".join(map(re.escape, words)), re.IGNORECASE)
    shown_s = [line.at_s for line in lines if line.stream == "err" and verdicts.search(line.text)]
    watched = document["evidence"].get("watched")
    startup = watched["startup"] if watched else {}
    own_s = float(sum(startup.values()))
    return round(min([*shown_s, seconds]) - own_s, 1)


def lines_of(document: dict[str, Any]) -> int:
    """Return the lines of a diagnosis on a console of 80 columns."""
    console = Console(width=_COLUMNS, file=StringIO(), force_terminal=False)
    known = {name: document[name] for name in Diagnosis.model_fields}
    diagnosis = Diagnosis.model_validate(known | {"shares": document["hour"]})
    with console.capture() as capture:
        print_diagnosis(diagnosis, console)
    return len(capture.get().splitlines())


def _run_pair(
    expected: Expectation, folder: Path, seconds: float, *, is_fixed_first: bool
) -> tuple[float, float] | None:
    """Run a script as it is and with --fixed; return what both lines say, None if one failed."""
    sides = [False, True]
    if is_fixed_first:
        sides.reverse()
    figures = {}
    for is_fixed in sides:
        fixed = ["--fixed"] if is_fixed else []
        ran = run_command(
            [*_command(expected), "--seconds", str(seconds), *fixed],
            folder=folder,
            environment=_environment(),
            within_s=_LONGEST_S,
        )
        figures[is_fixed] = _figure(ran, expected)
    plain, fix = figures[False], figures[True]
    return None if plain is None or fix is None else (plain, fix)


def _figure(ran: RunCommand, expected: Expectation) -> float | None:
    """Return the figure that a run printed; None if it failed."""
    pattern = _RATE if expected.effect == "rate" else _GROWTH
    found = [pattern.match(text) for text in ran.texts("out")]
    values = [float(match[1]) for match in found if match]
    return values[-1] if ran.code == 0 and values else None


def _follow(
    expected: Expectation,
    runs: Sequence[tuple[float, float] | None],
    judged: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return what the fix brought: a gain in throughput, or MiB of growth before and after."""
    pairs = [pair for pair in runs if pair is not None]
    failed = len(runs) - len(pairs)
    if expected.effect == "growth":
        return {"failed_pairs": failed, "growth_mib": [list(pair) for pair in pairs]}
    if not pairs:
        return {"failed_pairs": failed}
    promised = judged["promised"] if judged else None
    return {"failed_pairs": failed, "reached": reach(pairs, promised)}


def _command(expected: Expectation) -> list[str]:
    if expected.ranks > 1:
        return ["torchrun", "--nproc_per_node", str(expected.ranks), "train.py"]
    return ["python", "train.py"]


def _environment() -> dict[str, str]:
    """Return the environment of a user: this interpreter is `python`, and autotune is this one."""
    own = str(Path(sys.executable).parent)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PATH": os.pathsep.join([own, os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(paths),
        "COLUMNS": str(_COLUMNS),
    }


def _print(cases: dict[str, Any], recording: Recording) -> None:
    rows = [_row(name, found) for name, found in cases.items()]
    head = [
        "script",
        "cause",
        "rank",
        "headline",
        "false",
        "s",
        "first",
        "lines",
        "promised",
        "reached",
    ]
    print_table("What diagnose finds, and what following it brings", head, rows)
    figures = recording.results["summary"]
    print(
        f"\nright cause {_percent(figures['cause'])}, right remedy first "
        f"{_percent(figures['first'])}, in the headline {_percent(figures['headline'])}, "
        f"no false remedy above {_percent(figures['no_false_above'])}, "
        f"promised within interval {_percent(figures['within'])}; "
        f"{figures['failed']} of {figures['cases']} failed\n{recording.path}"
    )


def _row(name: str, found: dict[str, Any]) -> list[str]:
    judged = found["judged"]
    reached = found.get("reached")
    gain = "-" if reached is None else f"{reached['gain']:+.0%}"
    if found.get("growth_mib"):
        plain, fixed = found["growth_mib"][0]
        gain = f"{plain:.0f}>{fixed:.0f}M"
    if judged is None:
        return [name, "failed", "-", "-", "-", f"{found['seconds']:.0f}", "-", "-", "-", gain]
    promised = judged["promised"]
    return [
        name,
        "right" if judged["is_cause_right"] else str(judged["verdict"]),
        "-" if judged["rank"] is None else str(judged["rank"]),
        "yes" if judged["is_headline"] else "no",
        str(len(judged["false_above"])),
        f"{found['seconds']:.0f}",
        f"{found['first_verdict_s']:.0f}",
        str(found["lines"]),
        "-" if promised is None else f"{promised['gain']:+.0%}",
        gain,
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


if __name__ == "__main__":
    main()
