"""Whether each setting earns its place: jobs on which it wins and does nothing, and what a search finds.

Of each case pairs of trials are run in turns, today's settings and the same with the one setting changed; then a
default search of the job, of which nothing is given but its baseline. Cases that need what this machine lacks are
searched on a simulated machine, and marked as on paper: their factors are made up. Recorded: the ratios of the pairs,
in how many trials the setting was tried, what was recommended, and whether both are as the case expects: pairs beyond
5 % and their own noise on the side that it names, or within 5 %; a setting that wins is recommended in every search,
any other in none. All that the file holds is judged anew in each run.

    settings.py                            all cases
    settings.py --part in_order_wins_here  this one alone
    settings.py --judge                    none: what the file holds is judged
    settings.py --part cost --before DIR   how long default searches take with the settings, and without: by the same
                                           search in the checkout DIR of a revision before them, in turns

Forty minutes on the CPU, and half an hour for each round of the cost.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import autotune
from autotune.policy import WindowRules
from autotune.protocol.messages import NO_EXTRAS
from benchmarks import ROOT
from benchmarks.cases.settings import SettingCase
from benchmarks.cases.settings_binding import BINDING_SETTING_CASES
from benchmarks.cases.settings_loader import LOADER_SETTING_CASES
from benchmarks.cases.settings_paper import simulated
from benchmarks.cases.settings_step import STEP_SETTING_CASES
from benchmarks.measures.pairs import mean_ratio
from benchmarks.measures.recording import (
    describe_machine,
    git_revision,
    make_parser,
    print_table,
    read_results,
    say,
    start_recording,
)
from benchmarks.yardsticks.product_run import (
    measurement_figures,
    open_trials,
    search,
    search_figures,
)

_CASES: Mapping[str, SettingCase] = {
    f"{case.setting}_{case.expects}_{case.where}": case
    for case in (*LOADER_SETTING_CASES, *STEP_SETTING_CASES, *BINDING_SETTING_CASES)
}
_COST_WORKLOADS = ("photos", "digits", "sleeping_vectors", "tiny_gpt")
_SEEDS = 5
"""Simulated searches of a case on paper, each with its own noise."""
_BEYOND = 0.05
"""Of the rate, from which a setting counts as winning or losing: the usual spread between runs on a CPU."""


def main() -> int:
    arguments = _parse()
    recording = start_recording("settings", arguments, describe_machine("cpu"))
    recording.results.update(read_results(recording.path, fresh=arguments.fresh))
    parts = [] if arguments.judge else [arguments.part] if arguments.part else [*_CASES]
    for name in parts:
        if name == "cost":
            continue
        say(name)
        case = _CASES[name]
        figures = _on_paper(case, arguments) if case.case is None else _here(case, arguments)
        about = {
            "setting": case.setting,
            "value": case.value,
            "expects": case.expects,
            "why": case.why,
        }
        recording.add(
            name, {**about, "where": case.where, "git_revision": git_revision(), **figures}
        )
    if arguments.before is not None:
        recording.add("cost", _cost(arguments, recording.results.get("cost", {})))
    for name in [name for name in _CASES if name in recording.results]:
        recording.add(
            name, recording.results[name] | _judged(_CASES[name], recording.results[name])
        )
    _print_cases({name: found for name, found in recording.results.items() if name != "cost"})
    _print_cost(recording.results.get("cost", {}))
    print(f"\n{recording.path}")
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "short windows, one pair, searches of 20 s")
    parser.add_argument("--part", choices=[*_CASES, "cost"], help="this one alone")
    parser.add_argument(
        "--judge", action="store_true", help="measure nothing, and judge what was measured"
    )
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="a checkout of a revision without the settings"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="pairs of searches for the cost (%(default)s)",
    )
    parser.add_argument(
        "--workload",
        choices=_COST_WORKLOADS,
        action="append",
        help="for the cost, this one; may be given again (all)",
    )
    parser.add_argument(
        "--pairs", type=int, default=5, metavar="N", help="pairs of trials of a case (%(default)s)"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="forget what the file holds of an earlier run"
    )
    arguments = parser.parse_args()
    if arguments.part == "cost" and arguments.before is None:
        parser.error("--part cost needs --before, a checkout of a revision without the settings")
    return arguments


def _here(case: SettingCase, arguments: argparse.Namespace) -> dict[str, Any]:
    """Pairs of trials, and a default search, of a job on this machine."""
    assert case.case is not None
    window, pairs = (
        (WindowRules(max_s=0.5), 1)
        if arguments.quick
        else (WindowRules(max_s=4.0), arguments.pairs)
    )
    changed = {**case.case.settings, case.setting: case.value}
    runs: list[dict[str, Any]] = []
    with open_trials(case.case, device="cpu", window=window, extras=NO_EXTRAS) as run:
        for number in range(pairs):
            order = [case.case.settings, changed]
            found = [run(settings) for settings in (reversed(order) if number % 2 else order)]
            found = found[::-1] if number % 2 else found
            measured = [result.measurement for result in found]
            if any(one is None for one in measured):
                raise RuntimeError(
                    f"a trial must end well, but: {[(one.outcome, one.reason) for one in found]}"
                )
            runs.append(
                {
                    "today": measurement_figures(measured[0]),  # type: ignore[arg-type] # not None
                    "changed": measurement_figures(measured[1]),  # type: ignore[arg-type] # not None
                }
            )
    times = [pair["changed"]["samples_per_s"] / pair["today"]["samples_per_s"] for pair in runs]
    result = search(case.case, timeout_s=20 if arguments.quick else None)
    return {"times": times, "pairs": runs, "search": search_figures(result), **_found(case, result)}


def _on_paper(case: SettingCase, arguments: argparse.Namespace) -> dict[str, Any]:
    """Searches on a simulated machine."""
    found: list[dict[str, Any]] = []
    for seed in range(1 if arguments.quick else _SEEDS):
        machine = simulated(case, seed)
        baseline = {
            "micro_batch_size": 32,
            "num_workers": 8,
            "compile": machine.space.get("compile", False),
        }
        with TemporaryDirectory(prefix="autotune-benchmark-") as folder:
            result = autotune.search(
                _nothing,
                _nothing,
                launcher=machine.launcher,
                baseline=baseline,
                space=dict(machine.space),
                objective={"global_batch": "keep"},
                run_dir=Path(folder) / "run",
                seed=seed,
                progress=False,
            )
        found.append({"seed": seed, **_found(case, result)})
    return {"searches": found}


def _judged(case: SettingCase, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Whether pairs and searches are as the case expects."""
    searches = figures.get("searches", [figures])
    found = [one["is_recommended"] for one in searches]
    judged: dict[str, Any] = {
        "search_as_expected": all(found) if case.expects == "wins" else not any(found)
    }
    if "times" in figures:
        effect = _effect(figures["times"])
        mean = mean_ratio(figures["times"])
        is_expected = None if effect == "not told" else effect == case.expects
        judged |= {
            "effect": effect,
            "interval": [mean.low, mean.high],
            "pairs_as_expected": is_expected,
        }
    return judged


def _effect(times: Sequence[float]) -> str:
    """What pairs tell of a setting: it does nothing where the interval of their mean lies within 5 %."""
    gain, mean = median(times) - 1, mean_ratio(times)
    if mean.low > 1 and gain > _BEYOND:
        return "wins"
    if mean.high < 1 and gain < -_BEYOND:
        return "loses"
    return "nothing" if mean.low > 1 - _BEYOND and mean.high < 1 + _BEYOND else "not told"


def _found(case: SettingCase, result: autotune.SearchResult) -> dict[str, Any]:
    """What a search has done with the setting."""
    tried = [trial for trial in result.trials if getattr(trial.config, case.setting) == case.value]
    return {
        "trials": len(result.trials),
        "tried_in": len(tried),
        "recommended": getattr(result.best, case.setting),
        "is_recommended": getattr(result.best, case.setting) == case.value,
        "speedup": result.speedup,
    }


def _cost(arguments: argparse.Namespace, known: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of default searches in this checkout and in one before the settings, in turns; others' stay as known."""
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(1 if arguments.quick else arguments.rounds):
        for name in arguments.workload or _COST_WORKLOADS:
            places = [("before", arguments.before.resolve()), ("now", ROOT)]
            pair = dict(
                _search_in(place, name, quick=arguments.quick)
                for place in (reversed(places) if number % 2 else places)
            )
            found.setdefault(name, []).append(pair)
            say(f"{name}: {pair['before']:.0f} s before, {pair['now']:.0f} s now")
    found = {**known.get("workloads", {}), **found}
    ratios = [median(pair["now"] / pair["before"] for pair in pairs) for pairs in found.values()]
    return {
        "workloads": found,
        "before": _revision_of(arguments.before),
        "median_ratio": median(ratios),
    }


def _search_in(place: tuple[str, Path], workload: str, *, quick: bool) -> tuple[str, float]:
    """The seconds of a default search by default_search.py of a checkout."""
    name, path = place
    with TemporaryDirectory(prefix="autotune-benchmark-") as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.default_search",
            "--workload",
            workload,
            "--results",
            folder,
        ]
        own = {**os.environ, "PYTHONPATH": str(path)}  # before an installed autotune
        subprocess.run(
            [*command, *(["--quick"] if quick else [])],
            cwd=path,
            env=own,
            check=True,
            capture_output=True,
        )
        (file,) = Path(folder).glob("default_search-*.json")
        return name, float(json.loads(file.read_text())["results"][workload]["seconds"])


def _revision_of(path: Path) -> str:
    command = ["git", "-C", str(path), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _print_cases(results: Mapping[str, Any]) -> None:
    rows = []
    for name, found in results.items():
        times = found.get("times")
        searches = found.get("searches", [found])
        rows.append(
            [
                name,
                "paper" if times is None else f"{median(times):.2f}",
                "" if times is None else f"{min(times):.2f} to {max(times):.2f}",
                f"{sum(one['tried_in'] for one in searches)} of {sum(one['trials'] for one in searches)}",
                f"{sum(one['is_recommended'] for one in searches)} of {len(searches)}",
                "no"
                if not found["search_as_expected"] or found.get("pairs_as_expected") is False
                else "yes",
            ]
        )
    print_table(
        "Times the rate with the setting, in pairs of trials; and in default searches.",
        ["case", "times", "its pairs", "tried in", "recommended", "as expected"],
        rows,
    )


def _print_cost(cost: Mapping[str, Any]) -> None:
    rows = []
    for name, pairs in cost.get("workloads", {}).items():
        ratios = [pair["now"] / pair["before"] for pair in pairs]
        before, now = (median(pair[side] for pair in pairs) for side in ("before", "now"))
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([name, f"{before:.0f}", f"{now:.0f}", f"{median(ratios):.2f}", span])
    if rows:
        print_table(
            f"Seconds of default searches, without the settings ({cost['before']}) and with them.",
            ["workload", "before", "now", "ratio", "its pairs"],
            rows,
        )


def _nothing() -> None:
    """Stands for a model and a dataset, which a fake launcher never builds."""


if __name__ == "__main__":
    sys.exit(main())
