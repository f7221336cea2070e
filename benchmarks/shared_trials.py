"""What a search of an ordinary job gains where trials share a process: regret and seconds, replayed.

Each recorded surface is searched by the product with a process for each trial, and with one that trials share, as if
its workload took so many seconds to build beside what was recorded. What shares a process saves a trial's start as it
was recorded; its rate strays from a first run, and its memory, as warm_process.py has measured it: of the
surface's own workload where that was measured, else as the others do together. Told is the median over the seeds of
what is recommended in the end, and of all seconds, from the probe to the stress run.

About ten minutes; what the file has is not computed again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import optuna
import torch

from autotune import TrainingConfig
from autotune.apply.cores import usable_cores
from benchmarks import ROOT
from benchmarks.measures.recording import (
    describe_machine,
    make_parser,
    print_table,
    read_results,
    say,
    start_recording,
)
from benchmarks.replay.methods import METHODS
from benchmarks.replay.replay import SURFACES, Surface, read_surface
from benchmarks.replay.shared_process import SlowGround, Straying

_BUILDS_S = (0.0, 1.0, 3.0)
"""Of building, beside what was recorded: some hundredths of a second."""
_SEEDS = 20
_WARM = ROOT / "benchmarks" / "results" / "warm_process-amd-epyc-2-cores.json"


def main() -> int:
    parser = make_parser(__doc__ or "", "one surface, one seed, one build")
    parser.add_argument(
        "--ground", default="", metavar="NAME", help="those alone whose name begins so"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the file's figures")
    arguments = parser.parse_args()
    recording = start_recording("shared_trials", arguments, describe_machine("cpu"))
    recording.results.update(read_results(recording.path, fresh=arguments.fresh))
    paths = [
        path for path in sorted(SURFACES.glob("*.jsonl")) if path.name.startswith(arguments.ground)
    ]
    paths, builds_s = (paths[:1], _BUILDS_S[-1:]) if arguments.quick else (paths, _BUILDS_S)
    seeds, strayings = (
        1 if arguments.quick else _SEEDS,
        strayings_in(json.loads(_WARM.read_text())["results"]),
    )
    with ProcessPoolExecutor(
        usable_cores(), initializer=torch.set_num_threads, initargs=(1,)
    ) as processes:
        for path, build_s in product(paths, builds_s):
            name = f"{path.stem}, {build_s:g} s"
            if len(recording.results.get(name, {}).get("own", ())) >= seeds:
                continue
            say(name)
            workload = _surface(path).name
            straying = strayings.get(workload, strayings[""])
            search = partial(_search, path, build_s, straying)
            found = {
                way: list(processes.map(partial(search, way == "shared"), range(seeds)))
                for way in ("own", "shared")
            }
            recording.add(
                name,
                {"ground": workload, "build_s": build_s, "straying": asdict(straying), **found},
            )
    _print(recording.results)
    print(f"\n{recording.path}")
    return 0


def strayings_in(results: Mapping[str, Any]) -> dict[str, Straying]:
    """How runs after others stray, by workload; under "" their mean, which spreads by all settings of all."""
    told = {name: one["told"] for name, one in results.items() if "bias" in one["told"]}
    found = {name: _straying([one]) for name, one in told.items()}
    return {**found, "": _straying(list(told.values()))}


def _straying(told: Sequence[Mapping[str, Any]]) -> Straying:
    apart = [value for one in told for value in one["bias_by_point"].values()]
    memory = fmean(ratio for one in told for ratio in one["memory_ratio"])
    return Straying(bias=fmean(one["bias"] for one in told), spread=stdev(apart), memory=memory)


@lru_cache(maxsize=1)
def _surface(path: Path) -> Surface:
    return read_surface(path)


def _search(
    path: Path,
    build_s: float,
    straying: Straying,
    shares: bool,
    seed: int,
) -> dict[str, float]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    surface = _surface(path)
    ground = SlowGround(
        surface, partial(start_s, surface), build_s, shares=shares, straying=straying
    )
    course = METHODS["autotune"](ground, seed)
    return {
        "regret": 1
        - surface.truth.rates.get(course.recommended, 0.0)
        / surface.truth.rates[surface.truth.best],
        "seconds": course.whole_s,
        "trials": course.trials,
    }


def start_s(surface: Surface, config: TrainingConfig) -> float:
    """The shortest start of a trial of a point: its process, model, dataset and loader."""
    visits = (visit.measurement for visit in surface.visits.get(config, ()))
    return min((measured.startup_s for measured in visits if measured is not None), default=0.0)


def told_of(results: Mapping[str, Any]) -> dict[float, dict[str, float]]:
    """Of each build: medians over the surfaces of the seconds' ratio, shared over own, and of the regret's difference.

    "worst" is the largest difference of a surface's median regret.
    """
    told = {}
    for build_s in sorted({one["build_s"] for one in results.values()}):
        grounds = [one for one in results.values() if one["build_s"] == build_s]
        differences = [
            _median(one, "shared", "regret") - _median(one, "own", "regret") for one in grounds
        ]
        ratios = [
            _median(one, "shared", "seconds") / _median(one, "own", "seconds") for one in grounds
        ]
        told[build_s] = {
            "seconds": median(ratios),
            "slowest": max(ratios),
            "regret": median(differences),
            "worst": max(differences),
        }
    return told


def _median(one: Mapping[str, Any], way: str, column: str) -> float:
    return float(median(search[column] for search in one[way]))


def _print(results: Mapping[str, Any]) -> None:
    rows = [
        [
            f"{one['ground']}, {one['build_s']:g} s",
            *(f"{100 * _median(one, way, 'regret'):.1f}" for way in ("own", "shared")),
            *(
                f"{100 * max(search['regret'] for search in one[way]):.1f}"
                for way in ("own", "shared")
            ),
            *(f"{_median(one, way, 'seconds'):.0f}" for way in ("own", "shared")),
        ]
        for one in results.values()
    ]
    head: Sequence[str] = ["surface, build", "regret %", "shared", "worst", "shared", "s", "shared"]
    print_table("A process for each trial, and one that trials share.", head, rows)
    rows = [
        [
            f"{build_s:g} s",
            f"{told['seconds']:.2f}",
            f"{told['slowest']:.2f}",
            f"{100 * told['regret']:+.1f}",
            f"{100 * told['worst']:+.1f}",
        ]
        for build_s, told in told_of(results).items()
    ]
    head = ["build", "seconds", "slowest", "regret", "worst"]
    print_table(
        "Shared over own: seconds, and points of regret; medians over surfaces, and the worst.",
        head,
        rows,
    )


if __name__ == "__main__":
    sys.exit(main())
