"""The tables of benchmarks/ranks.py, from the results that it writes down. Pure but for the printing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.measures.recording import print_table

__all__ = ["print_ranks_tables"]

_START_TARGET_S = 1.5
_RATE_TARGET = 0.03


def print_ranks_tables(results: Mapping[str, Any]) -> None:
    """Print a table for each part that was measured."""
    if "start" in results:
        rows = [
            _start_row(name, one["pairs"]) for name, one in results["start"]["launchers"].items()
        ]
        head = ["launcher", "pairs", "batch: 1", "2", "beyond", "step: 1", "2", "beyond"]
        title = "Seconds from launch to the last rank's first batch and step, medians;\n"
        print_table(
            f"{title}beyond: median of the pairs' differences, to be {_START_TARGET_S} at most.",
            head,
            rows,
        )
    if "rate" in results:
        rows = [
            _rate_row(name, setting, one["pairs"])
            for name, settings in results["rate"]["cases"].items()
            for setting, one in settings.items()
        ]
        head = ["workload", "setting", "pairs", "plain/s", "group/s", "error", "A/A"]
        print_table(
            f"Rate of two ranks; error: pairs' ratios less 1, to be within {_RATE_TARGET:.0%}.",
            head,
            rows,
        )
    if "death" in results:
        rows = [_death_row(name, runs) for name, runs in results["death"]["kinds"].items()]
        head = ["what happens", "runs", "outcomes", "rank named", "median s", "longest s"]
        print_table("Seconds from a rank's death to the runner's outcome.", head, rows)
    if "ray" in results:
        rows = [_ray_row(name, results["ray"]["triples"]) for name in ("ray", "ray, reserved anew")]
        head = ["launcher", "runs", "step: local", "Ray", "beyond", "end: local", "Ray", "beyond"]
        connect_s = results["ray"]["connect_s"]
        title = "Seconds from launch to the first step and to the end, medians; beyond: of the differences.\n"
        print_table(f"{title}To connect took {connect_s:.1f} s.", head, rows)


def _ray_row(name: str, triples: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [name, str(len(triples))]
    for key in ("first_step_s", "launch_s"):
        local, ray = ([triple[side][key] for triple in triples] for side in ("fork server", name))
        beyond = median(b - a for a, b in zip(local, ray, strict=True))
        cells += [f"{median(local):.3f}", f"{median(ray):.3f}", f"{beyond:+.3f}"]
    return cells


def _start_row(name: str, pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [name, str(len(pairs))]
    for key in ("first_batch_s", "first_step_s"):
        one, two = ([pair[side][key] for pair in pairs] for side in ("one", "two"))
        beyond = median(b - a for a, b in zip(one, two, strict=True))
        cells += [
            f"{median(one):.2f}",
            f"{median(two):.2f}",
            _marked(f"{beyond:.2f}", is_off=beyond > _START_TARGET_S),
        ]
    return cells


def _rate_row(name: str, setting: str, pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    plain, group = ([pair[side]["samples_per_s"] for pair in pairs] for side in ("plain", "trial"))
    error = median(b / a for a, b in zip(plain, group, strict=True)) - 1
    spread = (max(plain) - min(plain)) / median(plain)
    return [
        name,
        setting,
        str(len(pairs)),
        f"{median(plain):,.0f}",
        f"{median(group):,.0f}",
        _marked(f"{error:+.1%}", is_off=abs(error) > _RATE_TARGET),
        f"{spread:.1%}" if len(pairs) > 1 else "-",
    ]


def _death_row(name: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    seconds = [run["death_to_outcome_s"] for run in runs]
    return [
        name,
        str(len(runs)),
        ", ".join(sorted({run["outcome"] for run in runs})),
        f"{sum(run['names_rank'] for run in runs)}/{len(runs)}",
        f"{median(seconds):.2f}",
        f"{max(seconds):.2f}",
    ]


def _marked(text: str, *, is_off: bool) -> str:
    """With a mark where a target is missed."""
    return f"{text}!" if is_off else text
