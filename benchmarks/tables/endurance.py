"""What endurance.py has tried and what was broken, as rows and sentences of docs/endurance.md. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["fault_rows", "soak_figures", "tried_rows"]

Figures = Mapping[str, Any]
Results = Mapping[str, Any]


def tried_rows(results: Results) -> list[Figures]:
    """Of each part: how much was tried, and how many cases broke a promise or did not come to their end."""
    return [
        {
            "part": name,
            "tried": count(results[name]),
            "broken": len(results[name]["faults"]),
            "unended": len(results[name]["errors"]),
            "cases": results[name]["tried"],
            "of": results[name]["of"],
        }
        for name, count in _COUNTS.items()
    ]


def fault_rows(results: Results) -> list[Figures]:
    """Of each kind of fault: searches and diagnoses of it on each launcher, those as expected, and the slowest."""
    rows = list[Figures]()
    for kind in results["faults"]["cases"]:
        cells = {name: _cells(results[name]["cases"].get(kind, {})) for name in _LAUNCHERS}
        every = [cell for own in cells.values() for cell in own]
        rows.append(
            {
                "kind": kind,
                **{name: len(own) for name, own in cells.items()},
                "broken": sum(bool(cell["fault"]) for cell in every),
                "slowest_s": max((cell["search_s"] for cell in every), default=0.0),
            }
        )
    return rows


def soak_figures(results: Results) -> Figures:
    """How a long search ends."""
    cases = results["soak"]["cases"]
    long = next(found for name, found in cases.items() if name.startswith("one_search"))
    trend = long["trends"]["rss_kib"]
    return {
        "trials": long["trials"],
        "kib": trend["slope"],
        "low_kib": trend["low"],
        "high_kib": trend["high"],
        "apart_ms": 1000 * long["last"]["apart_cpu_s"],
        "report_s": long["report_s"],
        "page_mb": long["page_bytes"] / 1e6,
        "study_mb": long["last"]["study_bytes"] / 1e6,
    }


_LAUNCHERS = ("faults", "faults_fresh", "faults_ray")


def _cells(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*case.get("cells", {}).values()]


def _cases(part: Results) -> int:
    return int(part["tried"]) - len(part.get("skipped", ()))


_COUNTS: Mapping[str, Callable[[Results], int]] = {
    "soak": lambda part: sum(case["trials"] for case in part["cases"].values() if "trials" in case),
    "kills": lambda part: int(part["kills"]),
    "power_loss": lambda part: int(part["cuts"]),
    "stops": _cases,
    "faults": lambda part: int(part["cells"]),
    "faults_fresh": lambda part: int(part["cells"]),
    "faults_ray": lambda part: int(part["cells"]),
    "fuzz_configs": lambda part: int(part["inputs"]),
    "fuzz_calls": lambda part: int(part["inputs"]),
    "fuzz_cli": lambda part: int(part["inputs"]),
    "damage": lambda part: int(part["uses_tried"]),
    "neighbours": _cases,
}
"""What a part counts, in the order of the page."""
