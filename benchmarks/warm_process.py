"""What a process that has measured other configurations before shows otherwise: warm against fresh, on recorded grids.

In each round the same points of a grid are measured twice, at once after another: as trials of the product, each in a
process of its own, and by its warm worker, which builds the workload once, in an order that changes from round to
round. Kept of each point: its rate and its peak of memory. Told of each workload: the bias (the logarithm of warm over
fresh, a round's median, since a neighbour's load falls on one of the two) of points that came after others in their
process, and by place there; how far runs of the same point differ between processes, fresh
and warm; and how far its ratio to the baseline does, which is what a search decides by: a process shares its luck
(where its heap lies) among its points.

About twenty minutes; --workload measures one alone, and what the file has whole is not measured again. A compiled
model has processes of its own in the product, so none is here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from math import exp, log, sqrt
from statistics import fmean, median, variance
from time import perf_counter
from typing import Any

from autotune import TrainingConfig
from autotune.launch.local import LocalLauncher
from autotune.launch.runner import TrialRunner
from autotune.policy import WindowRules
from autotune.space.space import ResolvedSpace
from benchmarks.cases.surfaces import GRIDS, Grid
from benchmarks.measures.recording import (
    describe_machine,
    make_parser,
    print_table,
    read_results,
    say,
    start_recording,
)
from benchmarks.quietness import keep_freed_memory
from benchmarks.replay.surface_order import spread_order
from benchmarks.yardsticks.product_run import TRIAL_DEADLINE_S, open_runner

__all__ = ["compare", "told_of"]

_WORKLOADS = ("cliff", "ragged", "tiny_gpt", "text")
"""A CNN in memory, dictionaries of many shapes, a transformer, a GRU over lines of many lengths."""
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
    for name in (
        [arguments.workload] if arguments.workload else _WORKLOADS[: 1 if arguments.quick else None]
    ):
        if len(recording.results.get(name, {}).get("rounds", ())) < rounds:
            say(name)
            compare(
                GRIDS[name],
                "cpu",
                points,
                window,
                keep=partial(recording.add, name),
                goes_on=lambda n: n < rounds,
            )
    _print(recording.results)
    print(f"\n{recording.path}")


def compare(
    grid: Grid,
    device: str,
    count: int,
    window: WindowRules,
    *,
    keep: Callable[[dict[str, Any]], None],
    goes_on: Callable[[int], bool],
) -> None:
    """Measure so many points both ways, in rounds.

    The raw figures and what they tell are kept after each round; `goes_on`, given how many there were, says whether
    another one begins.
    """
    found = list[dict[str, Any]]()
    both_runners = (
        _runner_of(grid, device),
        _runner_of(grid, device),
    )  # a server forks for one at a time
    with both_runners[0] as (runner, _), both_runners[1] as (beside, _):
        points = [
            point for point in spread_order(grid)[: 2 * count] if _can_run(runner, point, window)
        ][:count]
        configs = [point.model_dump(mode="json", exclude_defaults=True) for point in points]
        warm = LocalLauncher(beside.logs / "warm.log", device=device, shared_from_s=0.0)
        while goes_on(number := len(found)):
            order = random.Random(number).sample(range(len(points)), len(points))
            both = _round(
                points, order, window, {"fresh": runner, "warm": replace(beside, launcher=warm)}
            )
            warm.end_shared()
            found.append(both)
            if number > 0:
                keep({"points": configs, "rounds": found, "told": told_of(found, len(points))})
            say(f"round {number + 1}, fresh {both['fresh_s']:.0f} s, warm {both['warm_s']:.0f} s")
        warm.close()


def _runner_of(
    grid: Grid, device: str
) -> AbstractContextManager[tuple[TrialRunner, ResolvedSpace]]:
    return open_runner(grid.case(), device=device, space=grid.space, memory_limit=grid.memory_limit)


def _round(
    points: Sequence[TrainingConfig],
    order: Sequence[int],
    window: WindowRules,
    runners: Mapping[str, TrialRunner],
) -> dict[str, Any]:
    """Each point in a fresh process and in the warm one, at once after another: the machine is another one soon."""
    seconds, figures = (
        dict.fromkeys(runners, 0.0),
        {way: dict[int, dict[str, Any]]() for way in runners},
    )
    for number, place in enumerate(order):
        for way in sorted(runners, reverse=number % 2 == 0):
            begun = perf_counter()
            figures[way][place] = _figures(runners[way], points[place], window)
            seconds[way] += perf_counter() - begun
    by_point = {way: [figures[way][place] for place in range(len(points))] for way in runners}
    return {"order": order, **by_point, **{f"{way}_s": taken for way, taken in seconds.items()}}


def _can_run(runner: TrialRunner, point: TrainingConfig, window: WindowRules) -> bool:
    """Whether a point stays within the grid's limit, by a run that does not count."""
    return (
        runner.run(point, name="look", deadline_s=TRIAL_DEADLINE_S, window=window).outcome == "ok"
    )


def _figures(runner: TrialRunner, point: TrainingConfig, window: WindowRules) -> dict[str, Any]:
    """Rate and peak; on an accelerator torch's own, since the warm process is there while the other one measures."""
    measured = runner.run(
        point, name="point", deadline_s=TRIAL_DEADLINE_S, window=window
    ).measurement
    if measured is None:
        return {"samples_per_s": None, "peak_memory_bytes": None}
    own_bytes = measured.memory.reserved_bytes
    peak_bytes = measured.peak_memory_bytes if own_bytes is None else own_bytes
    return {"samples_per_s": measured.samples_per_s, "peak_memory_bytes": peak_bytes}


def told_of(rounds: _Rounds, points: int) -> dict[str, Any]:
    """Bias and spreads, on the log scale; points that could not be measured each time are left out."""
    known = [
        point
        for point in range(points)
        if all(
            one[way][point]["samples_per_s"] is not None
            for one in rounds
            for way in ("fresh", "warm")
        )
    ]
    if len(known) < 2:
        return {"points": len(known)}
    later = {point: [one for one in rounds if one["order"].index(point) > 0] for point in known}
    by_round = [
        median(_ratio(one, point) for point in known if one["order"].index(point) > 0)
        for one in rounds
    ]
    places = [
        [_ratio(one, one["order"][place]) for one in rounds if one["order"][place] in known]
        for place in range(points)
    ]
    return {
        "points": len(known),
        "bias": fmean(by_round),
        "bias_error": sqrt(variance(by_round) / len(rounds)),
        "bias_by_point": {
            point: median(_ratio(one, point) for one in came)
            for point, came in later.items()
            if came
        },
        "bias_by_place": [median(found) if found else None for found in places],
        "spread": {way: _spread(rounds, way, known) for way in ("fresh", "warm")},
        "spread_over_baseline": {
            way: _spread(rounds, way, known[1:], known[0]) for way in ("fresh", "warm")
        },
        "memory_ratio": [
            median(
                one["warm"][point]["peak_memory_bytes"] / one["fresh"][point]["peak_memory_bytes"]
                for one in rounds
            )
            for point in known
        ],
        "seconds": {way: median(one[f"{way}_s"] for one in rounds) for way in ("fresh", "warm")},
    }


def _ratio(one: Mapping[str, Any], point: int) -> float:
    """The logarithm of warm over fresh."""
    return _rate(one, "warm", point) - _rate(one, "fresh", point)


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
                *(
                    f"{told[what][way]:.1%}"
                    for what in ("spread", "spread_over_baseline")
                    for way in ("fresh", "warm")
                ),
                f"{max(told['memory_ratio']):.2f}",
                f"{told['seconds']['fresh'] / told['seconds']['warm']:.1f}",
            ]
        )
    head = ["", "n", "bias", "worst", "fresh", "warm", "/base", "warm", "memory", "faster"]
    print_table(
        "Warm over fresh; spreads between processes, of rates and of ratios to the baseline.",
        head,
        rows,
    )


if __name__ == "__main__":
    keep_freed_memory()
    main()
