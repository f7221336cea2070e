"""What endurance.py has tried and what was broken, as rows and sentences of docs/endurance.md. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from benchmarks.measures.endurance.fault_table import FAULTS

__all__ = ["fault_rows", "report_figures", "soak_figures", "tried_rows"]

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
        if name in results
    ]


def fault_rows(results: Results) -> list[Figures]:
    """Of each kind of fault: searches and diagnoses of it on each launcher, those as expected, and the slowest."""
    rows = list[Figures]()
    cases = {name: results.get(name, {}).get("cases", {}) for name in _LAUNCHERS}
    for kind in dict.fromkeys(chain.from_iterable(cases.values())):
        cells = {name: _cells(cases[name].get(kind, {})) for name in _LAUNCHERS}
        every = [cell for own in cells.values() for cell in own]
        rows.append(
            {
                "kind": kind,
                "expected": _EXPECTED[FAULTS[kind].outcome],
                **{name: len(own) for name, own in cells.items()},
                "broken": sum(_broken(own.get(kind, {})) for own in cases.values()),
                "slowest_s": max((cell["search_s"] for cell in every), default=0.0),
            }
        )
    return rows


def soak_figures(results: Results) -> list[Figures]:
    """Of each long search, and of many in one process: what they have come to hold."""
    cases = results.get("soak", {}).get("cases", {})
    return [
        {
            "search": _SEARCHES[name.rstrip("0123456789").rstrip("_")]
            if name[0].isalpha()
            else _SEARCHES["searches"],
            "trials": found["trials"],
            "kib": found["trends"]["rss_kib"]["slope"],
            "low_kib": found["trends"]["rss_kib"]["low"],
            "high_kib": found["trends"]["rss_kib"]["high"],
            "server": f"{found['trends']['server_rss_kib']['slope']:.1f}"
            if name[0].isalpha()
            else "not watched",
            "grown": sum(max(0.0, found["trends"][held]["grown"]) for held in _HELD),
            "slower_ms": 1000 * found["trends"]["apart_cpu_s"]["grown"],
        }
        for name, found in cases.items()
        if "error" not in found
    ]


def report_figures(results: Results) -> list[Figures]:
    """Of the longest report, and of the study of the longest search."""
    reports, searches = (results.get(part, {}).get("cases", {}) for part in ("long_report", "soak"))
    studies = [
        found["last"]["study_bytes"]
        for name, found in searches.items()
        if name.startswith("one_search")
    ]
    return [
        {
            "trials": found["trials"],
            "shown_s": found["shown_s"],
            "report_s": found["report_s"],
            "page_mb": found["page_bytes"] / 1e6,
            "study_mb": max(studies) / 1e6,
        }
        for found in reports.values()
        if studies and "error" not in found
    ]


_SEARCHES = {
    "one_search_of": "one, by chance",
    "model_of": "one, led by the model",
    "searches": "200 of two trials, in one process",
}
_EXPECTED = {
    "ok": "no change",
    "crashed": "crash",
    "timeout": "time-out",
    "diverged": "divergence",
    "host_oom": "out of RAM",
    "oom": "out of device memory",
}
"""How a trial with such a fault has to end, by its outcome."""
_HELD = ("descriptors", "threads", "children", "segments", "temporary")
_LAUNCHERS = ("faults", "faults_fresh", "faults_ray")


def _broken(case: Mapping[str, Any]) -> int:
    """Searches and diagnoses with a fault; what the case as a whole leaves behind counts for one."""
    return max(sum(bool(cell["fault"]) for cell in _cells(case)), int(bool(case.get("fault"))))


def _cells(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*case.get("cells", {}).values()]


def _cases(part: Results) -> int:
    return int(part["tried"]) - len(part.get("skipped", ()))


_COUNTS: Mapping[str, Callable[[Results], int]] = {
    "soak": lambda part: sum(case["trials"] for case in part["cases"].values() if "trials" in case),
    "long_report": lambda part: sum(
        case["trials"] for case in part["cases"].values() if "trials" in case
    ),
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
