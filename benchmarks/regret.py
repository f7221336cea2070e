"""Regret against device seconds on recorded surfaces, by replay: our search, Optuna's samplers and others' ways.

The regret of a recommendation is what its rate lies under the best of the whole grid, both as the median of all visits
of a point; what does not fit into memory, or failed in a visit, has a regret of 1. Told are, for each surface and
method over all seeds: the regret in the end (median, worst), of the product also after its confirmation, the seconds of
the device until it stays within 3 %, and trials that ran out of memory. Then how TPE's seconds to a regret compare with
ours. Where visits of a point differ by 10 % regrets of some per cent can't be told apart, though what is close to the
best was visited four times. The confirmation draws from the same visits: a point that was visited once it can't refute.

    regret.py                      every surface in surfaces/, 20 seeds
    regret.py --surfaces FOLDER    others
    regret.py --seeds 3            fewer
    regret.py --only autotune      one method anew; the file keeps the figures of the others, each with its revision
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import repeat
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

import optuna
import torch

from autotune import TrainingConfig
from autotune.worker.setup.machine import usable_cores
from benchmarks.measures.recording import (
    describe_machine,
    git_revision,
    make_parser,
    print_table,
    read_results,
    say,
    start_recording,
)
from benchmarks.replay.methods import METHODS, Course
from benchmarks.replay.replay import SURFACES, Surface, read_surface

_SEEDS = 20
_WITHIN = 0.03
_TARGETS = (0.02, 0.03, 0.05, 0.1)


def main() -> int:
    arguments = _parse()
    recording = start_recording("regret", arguments, describe_machine())
    seeds = range(2 if arguments.quick else arguments.seeds)
    methods = arguments.only or list(METHODS)
    tasks = [(name, seed) for name in methods for seed in seeds]
    earlier = read_results(recording.path, fresh=not arguments.only)
    recording.results.update(earlier)
    with ProcessPoolExecutor(usable_cores(), initializer=torch.set_num_threads, initargs=(1,)) as processes:
        for path in sorted(arguments.surfaces.glob("*.jsonl")):
            surface = _surface(path)
            say(f"{path.stem}: {len(surface.configs)} points")
            runs: dict[str, list[Course]] = {name: [] for name in methods}
            for (name, _), course in zip(tasks, processes.map(_run, repeat(path), tasks), strict=True):
                runs[name].append(course)
            figures = _figures(surface, runs)
            known = {**earlier.get(path.stem, {}).get("methods", {}), **figures["methods"]}
            figures["methods"] = {name: known[name] for name in METHODS if name in known}
            recording.add(path.stem, figures)
    _print_tables(recording.results)
    plot = recording.path.with_suffix(".svg")
    _plot(recording.results, plot)
    print(f"\n{recording.path}\n{plot}")
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "two seeds")
    parser.add_argument("--seeds", type=int, default=_SEEDS, metavar="N", help="seeds of each method (%(default)s)")
    parser.add_argument(
        "--surfaces", type=Path, default=SURFACES, metavar="FOLDER", help="where they are (%(default)s)"
    )
    parser.add_argument("--only", nargs="+", choices=METHODS, metavar="METHOD", help="measure these alone anew")
    return parser.parse_args()


_surface = lru_cache(maxsize=1)(read_surface)


def _run(path: Path, task: tuple[str, int]) -> Course:
    """A method's course on a surface, by its name and seed; its clock is the recording's, whoever else computes."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    name, seed = task
    return METHODS[name](_surface(path), seed)


def _figures(surface: Surface, runs: Mapping[str, Sequence[Course]]) -> dict[str, Any]:
    rates = surface.rates()
    revision = git_revision()
    differences = [abs(one / other - 1) for one, other in surface.pairs()]
    return {
        "machine": surface.environment.device_name,
        "points": len(surface.configs),
        "best_samples_per_s": max(rates.values()),
        "baseline_samples_per_s": rates.get(surface.baseline),
        "repeats_differ_by": median(differences) if differences else None,
        "methods": {
            name: {
                "revision": revision,
                "courses": [_regrets(course, rates) for course in courses],
                "seconds": [course.seconds for course in courses],
                "trials": [course.trials for course in courses],
                "out_of_memory": [course.out_of_memory for course in courses],
                "ended": [course.ended for course in courses],
                "confirmed": [_regret(course.confirmed, rates) for course in courses if course.confirmed is not None],
            }
            for name, courses in runs.items()
        },
    }


def _regrets(course: Course, rates: Mapping[TrainingConfig, float]) -> list[list[float]]:
    """[seconds, regret] of each change of what would be recommended."""
    found = list[list[float]]()
    for step in course.steps:
        regret = _regret(step.recommended, rates)
        if not found or regret != found[-1][1]:
            found.append([round(step.seconds, 2), regret])
    return found


def _regret(recommended: TrainingConfig, rates: Mapping[TrainingConfig, float]) -> float:
    return round(1 - rates.get(recommended, 0.0) / max(rates.values()), 5)


def _seconds_to(course: Sequence[Sequence[float]], regret: float) -> float:
    """Seconds after which the regret stays within a bound."""
    since = inf
    for seconds, now in course:
        since = (seconds if since == inf else since) if now <= regret else inf
    return since


def _print_tables(results: Mapping[str, Any]) -> None:
    for name, one in results.items():
        noise = one["repeats_differ_by"]
        told = "" if noise is None else f", repeats differ by {noise:.1%}"
        rows = [_row(method, figures) for method, figures in one["methods"].items()]
        head = (
            "method",
            "regret",
            "worst",
            "confirmed",
            "worst",
            f"s to {_WITHIN:.0%}",
            "reached",
            "s in all",
            "trials",
            "oom",
        )
        print_table(f"{name}: {one['points']} points{told}", head, rows)
    comparisons = [_comparison(results, target) for target in _TARGETS]
    columns = ("regret", "TPE", "autotune", "ratio", "surfaces")
    print_table("Median seconds to a regret, over the surfaces on which both reach it", columns, comparisons)


def _row(method: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    ends = [course[-1][1] for course in figures["courses"]]
    reached = [_seconds_to(course, _WITHIN) for course in figures["courses"]]
    typical = median(reached)
    return (
        method,
        f"{median(ends):.1%}",
        f"{max(ends):.1%}",
        f"{median(figures['confirmed']):.1%}" if figures["confirmed"] else "",
        f"{max(figures['confirmed']):.1%}" if figures["confirmed"] else "",
        "-" if typical == inf else f"{typical:.0f}",
        f"{fmean(one < inf for one in reached):.0%}",
        f"{median(figures['seconds']):.0f}",
        f"{median(figures['trials']):.0f}",
        f"{fmean(figures['out_of_memory']):.1f}",
    )


def _comparison(results: Mapping[str, Any], target: float) -> tuple[str, ...]:
    pairs = []
    for one in results.values():
        theirs, ours = (
            median(_seconds_to(course, target) for course in one["methods"][name]["courses"])
            for name in ("TPE", "autotune")
        )
        if theirs < inf and ours < inf:
            pairs.append((theirs, ours))
    if not pairs:
        return f"{target:.0%}", "-", "-", "-", "0"
    ratio = median(theirs / max(ours, 1e-9) for theirs, ours in pairs)
    theirs, ours = (median(column) for column in zip(*pairs, strict=True))
    return f"{target:.0%}", f"{theirs:.0f}", f"{ours:.0f}", f"{ratio:.1f}", str(len(pairs))


def _plot(results: Mapping[str, Any], path: Path) -> None:
    """A panel for each surface: the median regret of each method against seconds."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False)
    for axis, (name, one) in zip(axes.flat, results.items(), strict=False):
        for number, (method, figures) in enumerate(one["methods"].items()):
            times, regrets = _median_curve(figures["courses"])
            is_ours = method == "autotune"
            axis.plot(times, regrets, color=f"C{number}", lw=2.5 if is_ours else 1, label=method, zorder=3 - number)
        axis.set(title=name.partition("-")[0], xscale="log", yscale="symlog", xlabel="seconds", ylabel="regret")
        axis.set_yscale("symlog", linthresh=0.01)
    axes.flat[0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path)


def _median_curve(courses: Sequence[Sequence[Sequence[float]]]) -> tuple[list[float], list[float]]:
    times = sorted({max(1.0, seconds) for course in courses for seconds, _ in course})
    regrets = [median(_regret_at(course, seconds) for course in courses) for seconds in times]
    return times, regrets


def _regret_at(course: Sequence[Sequence[float]], seconds: float) -> float:
    return next((regret for since, regret in reversed(course) if since <= seconds), course[0][1])


if __name__ == "__main__":
    sys.exit(main())
