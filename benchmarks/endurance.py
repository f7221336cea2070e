"""What a search outlasts: load, kills, faults of trials, any input, damaged folders, neighbours. Hours, in parts.

Each part is a list of cases; each case runs in a process of its own under a time limit, and is written down when it
has ended. A call goes on with the cases that the file does not hold yet, until its time is over. What a part promises
stands under "promises": true, false, or null where it could not be judged.

    python -m benchmarks.endurance                       go on with what is missing, for an hour
    python -m benchmarks.endurance --only kills,stops    these parts alone
    python -m benchmarks.endurance --again errors        cases that failed or broke a promise once more
    python -m benchmarks.endurance --fresh --only soak   forget what there is of them
    python -m benchmarks.endurance --list                the parts, what each proves, and how far it is

Exit codes: 0; 1 a case failed or a promise was not kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from benchmarks.measures.endurance.damage import DAMAGE
from benchmarks.measures.endurance.faults import (
    FAULTS_OF_TRIALS,
    FAULTS_ON_FRESH_INTERPRETERS,
    FAULTS_ON_RAY,
)
from benchmarks.measures.endurance.fuzz import FUZZ_CALLS, FUZZ_CLI, FUZZ_CONFIGS
from benchmarks.measures.endurance.kills import KILLS
from benchmarks.measures.endurance.long_report import LONG_REPORT
from benchmarks.measures.endurance.neighbours import NEIGHBOURS
from benchmarks.measures.endurance.part import Part, without_places
from benchmarks.measures.endurance.power_loss import POWER_LOSS
from benchmarks.measures.endurance.soak import SOAK
from benchmarks.measures.endurance.stops import STOPS
from benchmarks.measures.part_guard import Figures, Keep, run_guarded
from benchmarks.measures.recording import (
    Recording,
    describe_machine,
    git_revision,
    make_parser,
    print_table,
    read_results,
    say,
    start_recording,
)

__all__ = ["PARTS", "go_on", "judged"]

_BUDGET_S = 3600.0

PARTS: Mapping[str, Part] = {
    "neighbours": NEIGHBOURS,
    "kills": KILLS,
    "power_loss": POWER_LOSS,
    "stops": STOPS,
    "soak": SOAK,
    "long_report": LONG_REPORT,
    "faults": FAULTS_OF_TRIALS,
    "faults_fresh": FAULTS_ON_FRESH_INTERPRETERS,
    "faults_ray": FAULTS_ON_RAY,
    "fuzz_configs": FUZZ_CONFIGS,
    "fuzz_calls": FUZZ_CALLS,
    "fuzz_cli": FUZZ_CLI,
    "damage": DAMAGE,
}
"""In the order in which they run."""


def main() -> int:
    arguments = _parse()
    recording = start_recording("endurance", arguments, describe_machine("cpu"))
    recording.results.update(read_results(recording.path, fresh=False))
    wanted = arguments.only or [*PARTS]
    if arguments.list:
        _print_parts(recording.results, quick=arguments.quick)
        return 0
    for name in wanted:
        if arguments.fresh:
            recording.results.pop(name, None)
        elif arguments.again == "errors" and name in recording.results:
            cases = recording.results[name]["cases"]
            recording.results[name]["cases"] = {
                case: found for case, found in cases.items() if not _is_bad(found)
            }
    ends_at = monotonic() + arguments.budget_s
    for name in wanted:
        go_on(name, PARTS[name], recording, ends_at, quick=arguments.quick)
    _print_parts(recording.results, quick=arguments.quick)
    print(f"\n{recording.path}")
    found = [recording.results.get(name, {}) for name in wanted]
    is_bad = any(
        False in part.get("promises", {}).values() or part.get("errors") or part.get("faults")
        for part in found
    )
    return 1 if is_bad else 0


def go_on(name: str, part: Part, recording: Recording, ends_at: float, *, quick: bool) -> None:
    """Try the cases that are not written down yet, until a time of monotonic(); write down each as it ends."""
    known: dict[str, Figures] = dict(recording.results.get(name, {}).get("cases", {}))
    left = [case for case in part.cases(quick) if case not in known]
    if not left:
        return
    say(f"{name}: {len(left)} cases to go")
    for case in left:
        if monotonic() > ends_at:
            say(f"{name}: the time of this call is over")
            break
        begun = monotonic()
        with TemporaryDirectory(prefix="autotune-endurance-") as folder:
            found = without_places(
                run_guarded(partial(_try, part, case, Path(folder)), limit_s=part.limit_s),
                Path(folder),
            )
        known[case] = {"wall_s": round(monotonic() - begun, 2), "revision": git_revision(), **found}
        if _is_bad(known[case]):
            say(f"{name}: {case}: {found.get('fault') or found['error'].strip().splitlines()[-1]}")
        recording.add(name, judged(part, known, quick=quick) | {"cases": known})


def judged(part: Part, cases: Mapping[str, Figures], *, quick: bool) -> Figures:
    """How far a part is, and what its cases tell together."""
    whole = {name: found for name, found in cases.items() if "error" not in found}
    judgement = part.judge(whole)
    if len(whole) < len(cases):  # whoever does not come to its end has kept nothing
        judgement["promises"] = {
            name: kept and None for name, kept in judgement["promises"].items()
        }
    return {
        "tried": len(cases),
        "of": len(part.cases(quick)),
        "errors": [name for name, found in cases.items() if "error" in found],
        "faults": {name: found["fault"] for name, found in whole.items() if found.get("fault")},
        **judgement,
    }


def _try(part: Part, case: str, folder: Path, _keep: Keep) -> Figures:
    return part.run(case, folder)


def _is_bad(found: Mapping[str, Any]) -> bool:
    return "error" in found or bool(found.get("fault"))


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "few cases of each part")
    parser.add_argument(
        "--only", type=_names, default=[], metavar="NAME[,NAME]", help="these parts alone"
    )
    parser.add_argument(
        "--again", choices=["errors"], help="try the cases once more that failed or broke a promise"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="forget what there is of the parts that run"
    )
    parser.add_argument("--list", action="store_true", help="name the parts, and how far each is")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=_BUDGET_S,
        metavar="S",
        help="seconds of a call (%(default)s)",
    )
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"parts are {', '.join(PARTS)}, but got {', '.join(unknown)}"
        )
    return names


def _print_parts(results: Mapping[str, Any], *, quick: bool) -> None:
    rows = []
    for name, part in PARTS.items():
        found = results.get(name, {})
        told = [*found.get("promises", {}).values()]
        rows.append(
            [
                name,
                f"{found.get('tried', 0)} of {len(part.cases(quick))}",
                str(len(found.get("errors", []))),
                str(len(found.get("faults", {}))),
                f"{told.count(True)} kept, {told.count(False)} broken" if told else "",
            ]
        )
    print_table("What a search outlasts.", ["part", "cases", "errors", "faults", "promises"], rows)
    for name, part in PARTS.items():
        print(f"{name}: {part.proves}")


if __name__ == "__main__":
    sys.exit(main())
