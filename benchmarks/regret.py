"""Regret against seconds, told as users get it: what a search recommends in the end, and what all of it took.

The grounds are recorded surfaces (replay/replay.py) and simulated machines whose truth is known (replay/landscapes.py).
The truth of a surface is a two-way model of its visits, with a standard error (replay/truth.py); the regret of a
recommendation is what its rate lies under the best of the grid, and 1 where it failed, or passed the memory limit.
The product recommends once its race is decided, others the best that they have measured. Told for each ground:

    regret      in the end, over all seeds: median, worst; in brackets before the race is decided
    +-          the median's own standard error, by the truth's
    floor       what one who always took the best point would seem to have, for the truth's own error: median, 95 %
    s           of the trials, from the end of the baseline's to the search's; whole: with probe, baseline,
                repeats and stress run

Then how the product's seconds compare with those that TPE needs to one regret: ours, the floor or 1 %, the largest.
Each search's recommendations are kept by the number of the point, and every point with its rate, error and visits.

    regret.py                      every surface in surfaces/, every landscape, 20 seeds
    regret.py --minutes 10         as many as begin within ten minutes; the next call goes on where this one ended
    regret.py --ground photos      those whose name begins so
    regret.py --surfaces FOLDER    other surfaces
    regret.py --seeds 3            fewer
    regret.py --only autotune      a method anew, where the file has it of another revision
    regret.py --fresh              all anew; otherwise what was measured on the same surface stays
    regret.py --summary            the tables of what there is
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from time import monotonic
from typing import Any

import optuna
import torch

from autotune import TrainingConfig
from autotune.apply.cores import usable_cores
from benchmarks.measures.recording import (
    describe_machine,
    git_revision,
    make_parser,
    read_results,
    say,
    start_recording,
)
from benchmarks.replay.ground import Ground
from benchmarks.replay.landscapes import LANDSCAPES
from benchmarks.replay.methods import METHODS, Course
from benchmarks.replay.replay import SURFACES, read_surface
from benchmarks.replay.truth import floor_of
from benchmarks.tables.regret import plot_regret, print_regret_tables

_SEEDS = 20
Place = Path | str
"""Where a ground is: a surface's file, or a landscape's name."""


_PROMISED_AT = (0.0, 1 / 3, 1 / 2)


def main() -> int:
    begun, arguments = monotonic(), _parse()
    recording = start_recording("regret", arguments, describe_machine("cpu"))
    known = read_results(recording.path, fresh=arguments.fresh)
    recording.results.update(
        {name: ground for name, ground in known.items() if "recording" in ground}
    )
    if arguments.summary:
        print_regret_tables(recording.results)
        return 0
    seeds = 2 if arguments.quick else arguments.seeds
    with ProcessPoolExecutor(
        usable_cores(), initializer=torch.set_num_threads, initargs=(1,)
    ) as processes:
        for place in _places(arguments):
            recording.add(_name_of(place), _known(place, recording.results.get(_name_of(place))))
        for place in _places(arguments):
            ground = recording.results[_name_of(place)]
            for name in _missing(ground["methods"], seeds, arguments.only):
                if arguments.minutes is not None and monotonic() >= begun + 60 * arguments.minutes:
                    print(f"\n{recording.path}: more is to be measured")
                    return 0
                say(f"{_name_of(place)}: {name}")
                courses = list(processes.map(_run, repeat(place), repeat(name), range(seeds)))
                methods = {**ground["methods"], name: _figures(_ground(place), courses)}
                ground["methods"] = {
                    method: methods[method] for method in METHODS if method in methods
                }
                recording.add(_name_of(place), ground)
    print_regret_tables(recording.results)
    plot = recording.path.with_suffix(".svg")
    plot_regret(recording.results, plot)
    print(f"\n{recording.path}\n{plot}")
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "two seeds")
    parser.add_argument(
        "--seeds", type=int, default=_SEEDS, metavar="N", help="seeds of each method (%(default)s)"
    )
    parser.add_argument(
        "--surfaces",
        type=Path,
        default=SURFACES,
        metavar="FOLDER",
        help="where they are (%(default)s)",
    )
    parser.add_argument(
        "--ground", default="", metavar="NAME", help="those alone whose name begins so"
    )
    parser.add_argument(
        "--only", nargs="+", choices=METHODS, metavar="METHOD", help="measure these alone anew"
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="begin nothing after so many minutes"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="start anew, and forget what the file has"
    )
    parser.add_argument("--summary", action="store_true", help="only print the tables")
    return parser.parse_args()


def _places(arguments: argparse.Namespace) -> list[Place]:
    places: list[Place] = [*sorted(arguments.surfaces.glob("*.jsonl")), *LANDSCAPES]
    return [place for place in places if _name_of(place).startswith(arguments.ground)]


def _name_of(place: Place) -> str:
    return place.stem if isinstance(place, Path) else place


@lru_cache(maxsize=1)
def _ground(place: Place) -> Ground:
    return read_surface(place) if isinstance(place, Path) else LANDSCAPES[place]


def _known(place: Place, earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is told of a ground now, with what was measured on it before; nothing where it was recorded anew."""
    content = (
        place.read_bytes() if isinstance(place, Path) else repr(_ground(place).truth.rates).encode()
    )
    digest = hashlib.sha256(content).hexdigest()[:12]
    told = {
        "recording": digest,
        "is_simulated": not isinstance(place, Path),
        **describe(_ground(place)),
    }
    is_same = earlier is not None and earlier.get("recording") == digest
    return {**told, "methods": earlier["methods"]} if earlier is not None and is_same else told


def _missing(known: Mapping[str, Any], seeds: int, only: Sequence[str] | None) -> list[str]:
    """Methods to be measured: those without enough seeds; of those asked for, what is of another revision."""
    revision = git_revision()
    return [
        name
        for name in only or METHODS
        if name not in known
        or known[name]["seeds"] < seeds
        or (only and known[name]["revision"] != revision)
    ]


def _run(place: Place, name: str, seed: int) -> Course:
    """A method's course on a ground; its clock is the ground's, whoever else computes."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return METHODS[name](_ground(place), seed)


def describe(ground: Ground) -> dict[str, Any]:
    """A ground, its points by column in the order of their numbers; a rate of None: it may not be used."""
    truth, configs = ground.truth, ground.configs
    return {
        "is_held_out": ground.is_held_out,
        "spread": truth.spread,
        "floor": floor_of(truth)._asdict(),
        "best": configs.index(truth.best),
        "baseline": configs.index(ground.baseline),
        "points": {
            "settings": {
                name: [getattr(config, name) for config in configs] for name in ground.domains
            },
            "samples_per_s": [_rounded(truth.rates.get(config), 2) for config in configs],
            "standard_error": [_rounded(truth.errors.get(config), 5) for config in configs],
            "visits": [ground.visits_of(config) for config in configs],
        },
        "methods": {},
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _figures(ground: Ground, courses: Sequence[Course]) -> dict[str, Any]:
    """A method's searches by column, points by their numbers."""
    places = {config: place for place, config in enumerate(ground.configs)}
    return {
        "revision": git_revision(),
        "seeds": len(courses),
        "recommended": [places[course.recommended] for course in courses],
        "before_confirmation": [places[course.steps[-1].recommended] for course in courses],
        "trial_s": [round(course.seconds, 2) for course in courses],
        "whole_s": [round(course.whole_s, 2) for course in courses],
        "trials": [course.trials for course in courses],
        "out_of_memory": [course.out_of_memory for course in courses],
        "ended": [course.ended for course in courses],
        "spent_s": {
            kind: [round(course.spent_s[kind], 2) for course in courses]
            for kind in courses[0].spent_s
        },
        "promised": [_promised(course) for course in courses],
        "steps": [_steps(course, places) for course in courses],
    }


def _promised(course: Course) -> list[float]:
    """The seconds that the product promised over those that its search took, its stress run left out.

    At the beginning, after a third of the search and after half of it; nothing of another method.
    """
    taken_s = course.whole_s - course.spent_s.get("stress", 0.0)
    latest = [
        [total for at_s, total in course.promised if at_s <= part * taken_s]
        for part in _PROMISED_AT
    ]
    first = [total for _, total in course.promised[:1]]
    return [round((totals or first)[-1] / taken_s, 3) for totals in latest if totals or first]


def _steps(course: Course, places: Mapping[TrainingConfig, int]) -> str:
    """Each change of what would be recommended before the race is decided, as "SECONDS POINT"."""
    found, before = list[str](), None
    for step in course.steps:
        if step.recommended != before:
            found.append(f"{step.seconds:.2f} {places[step.recommended]}")
        before = step.recommended
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
