"""What a process that has measured other configurations before shows otherwise: warm against fresh, on recorded grids.

In each round the same points of a grid are measured twice: as trials of the product, each in a process of its own, and
one after another in one process that builds the workload once, in an order of its own. Kept of each point: its rate and
its peak of memory. Told of each workload: the bias (the mean logarithm of warm over fresh), by place in the process as
well; how far runs of the same point differ between processes, fresh and warm; and how far its ratio to the baseline
does, which is what a search decides by. A warm process shares its luck (where its heap lies) among its points.

About twenty minutes; --workload measures one alone, and what the file has whole is not measured again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import exp, log, sqrt
from statistics import fmean, median, variance
from time import perf_counter
from typing import Any

from autotune import TrainingConfig
from autotune.launch.runner import TrialRunner
from autotune.protocol.jobs import WindowRules
from benchmarks.cases.surfaces import GRIDS
from benchmarks.measures.recording import describe_machine, make_parser, print_table, read_results, say, start_recording
from benchmarks.quietness import keep_freed_memory
from benchmarks.replay.surface_order import spread_order
from benchmarks.yardsticks.product_run import TRIAL_DEADLINE_S, open_runner
from benchmarks.yardsticks.warm_run import run_warm

_COMPILED = "+compile"
_WORKLOADS = ("cliff", "text", "ragged", "tiny_gpt", f"cliff{_COMPILED}")
"""A CNN in memory, a GRU over lines of many lengths, dictionaries of many shapes, a transformer; the CNN compiled."""
_POINTS = 6
_ROUNDS = 6
_WINDOW = WindowRules(max_s=2.0)

_Rounds = Sequence[Mapping[str, Any]]


def main() -> None:
    parser = make_parser(__doc__ or "", "two points, two rounds, windows of 0.5 s")
    parser.add_argument("--workload", choices=_WORKLOADS, help="this one alone")
    parser.add_argument("--fresh", action="store_true", help="forget the file's figures")
    arguments = parser.parse_args()
    recording = start_recording("warm_process", arguments, describe_machine("cpu"))
    recording.results.update(read_results(recording.path, fresh=arguments.fresh))
    points, rounds = (2, 2) if arguments.quick else (_POINTS, _ROUNDS)
    window = WindowRules(max_s=0.5) if arguments.quick else _WINDOW
    for name in [arguments.workload] if arguments.workload else _WORKLOADS[: 1 if arguments.quick else None]:
        if len(recording.results.get(name, {}).get("rounds", ())) < rounds:
            _compare(name, points, rounds, window, keep=partial(recording.add, name))
    _print(recording.results)
    print(f"\n{recording.path}")


def _compare(name: str, count: int, rounds: int, window: WindowRules, keep: Callable[[dict[str, Any]], None]) -> None:
    """Both ways in turns, in alternating order; the raw figures and what they tell are kept after each round."""
    grid, found = GRIDS[name.removesuffix(_COMPILED)], list[dict[str, Any]]()
    compiles = {"compile": name.endswith(_COMPILED)}
    with open_runner(grid.case(), device="cpu", space=grid.space, memory_limit=grid.memory_limit) as (runner, _):
        candidates = [point.model_copy(update=compiles) for point in spread_order(grid)[: 2 * count]]
        points = [point for point in candidates if _can_run(runner, point, window)][:count]
        configs = [point.model_dump(mode="json", exclude_defaults=True) for point in points]
        for number in range(rounds):
            order = random.Random(number).sample(range(len(points)), len(points))
            both: dict[str, Any] = {"order": order}
            for way in ("fresh", "warm") if number % 2 == 0 else ("warm", "fresh"):
                begun = perf_counter()
                both[way] = _fresh(runner, points, window) if way == "fresh" else _warm(name, points, order, window)
                both[f"{way}_s"] = perf_counter() - begun
            found.append(both)
            if number > 0:
                keep({"points": configs, "rounds": found, "told": told_of(found, len(points))})
            say(f"{name}: round {number + 1}, fresh {both['fresh_s']:.0f} s, warm {both['warm_s']:.0f} s")


def _can_run(runner: TrialRunner, point: TrainingConfig, window: WindowRules) -> bool:
    """Whether a point stays within the grid's limit, by a run that does not count."""
    return runner.run(point, name="look", deadline_s=TRIAL_DEADLINE_S, window=window).outcome == "ok"


def _fresh(runner: TrialRunner, points: Sequence[TrainingConfig], window: WindowRules) -> list[dict[str, Any]]:
    results = [
        runner.run(point, name="point", deadline_s=TRIAL_DEADLINE_S, window=window).measurement for point in points
    ]
    return [
        {
            "samples_per_s": None if one is None else one.samples_per_s,
            "peak_memory_bytes": None if one is None else one.peak_memory_bytes,
        }
        for one in results
    ]


def _warm(
    name: str, points: Sequence[TrainingConfig], order: Sequence[int], window: WindowRules
) -> list[dict[str, Any]]:
    found = dict(
        zip(order, run_warm(name.removesuffix(_COMPILED), [points[place] for place in order], window), strict=True)
    )
    return [found[place] for place in range(len(points))]


def told_of(rounds: _Rounds, points: int) -> dict[str, Any]:
    """Bias and spreads, on the log scale; points that a fresh process could not measure are left out."""
    known = [
        point for point in range(points) if all(one["fresh"][point]["samples_per_s"] is not None for one in rounds)
    ]
    over = known[0] if known else None  # the baseline, where it could be measured each time
    if len(known) < 2:
        return {"points": len(known)}
    ratios = {point: [_rate(one, "warm", point) - _rate(one, "fresh", point) for one in rounds] for point in known}
    of_all = [ratio for found in ratios.values() for ratio in found]
    places = [
        [
            found[number]
            for point, found in ratios.items()
            for number, one in enumerate(rounds)
            if one["order"][place] == point
        ]
        for place in range(points)
    ]
    return {
        "points": len(known),
        "bias": fmean(of_all),
        "bias_error": sqrt(variance([fmean(found) for found in zip(*ratios.values(), strict=True)]) / len(rounds)),
        "bias_by_point": {point: fmean(found) for point, found in ratios.items()},
        "bias_by_place": [fmean(found) if found else None for found in places],
        "spread": {way: _spread(rounds, way, known) for way in ("fresh", "warm")},
        "spread_over_baseline": {way: _spread(rounds, way, known[1:], over) for way in ("fresh", "warm")},
        "memory_ratio": [
            median(one["warm"][point]["peak_memory_bytes"] / one["fresh"][point]["peak_memory_bytes"] for one in rounds)
            for point in known
        ],
        "seconds": {way: median(one[f"{way}_s"] for one in rounds) for way in ("fresh", "warm")},
    }


def _rate(one: Mapping[str, Any], way: str, point: int) -> float:
    return log(one[way][point]["samples_per_s"])


def _spread(rounds: _Rounds, way: str, points: Sequence[int], over: int | None = None) -> float:
    """Standard deviation between processes of the logarithm of a point's rate, or of its ratio to another's."""

    def of(one: Mapping[str, Any], point: int) -> float:
        return _rate(one, way, point) - (0.0 if over is None else _rate(one, way, over))

    return sqrt(fmean(variance([of(one, point) for one in rounds]) for point in points))


def _print(results: Mapping[str, Any]) -> None:
    rows = []
    for name, found in results.items():
        told = found["told"]
        if "bias" not in told:
            continue
        rows.append(
            [
                name,
                str(told["points"]),
                f"{exp(told['bias']) - 1:+.1%} ± {2 * told['bias_error']:.1%}",
                f"{max(map(abs, told['bias_by_point'].values())):.1%}",
                *(f"{told[what][way]:.1%}" for what in ("spread", "spread_over_baseline") for way in ("fresh", "warm")),
                f"{max(told['memory_ratio']):.2f}",
                f"{told['seconds']['fresh'] / told['seconds']['warm']:.1f}",
            ]
        )
    head = ["", "points", "bias", "worst", "fresh", "warm", "/base", "warm", "memory", "faster"]
    print_table("Warm over fresh; spreads between processes, of rates and of ratios to the baseline.", head, rows)


if __name__ == "__main__":
    keep_freed_memory()
    main()
