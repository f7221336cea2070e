"""What GPUs have recorded, judged by the spread between runs that is assumed of them now, and by 1 % as before.

Runs of the same settings are taken in pairs: one leads, the other is the trial under way, whose settings count as just
as fast, or 5 % slower. How many would be stopped early? And what do the recorded searches say of their gains? Nothing
is measured: replay/gpu_runs.py reads results/gpu-*.json. Takes some seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from autotune.models.evidence import assumed_variation
from autotune.records.measurement import Interval
from autotune.records.result import RunVariation
from benchmarks.measures.recording import (
    describe_machine,
    git_revision,
    make_parser,
    print_table,
    start_recording,
)
from benchmarks.replay.gpu_runs import (
    RecordedSearch,
    RunsAlike,
    is_stopped,
    read_runs_alike,
    read_searches,
    replayed,
)

_SHARES = (1.0, 0.95)
"""Rates of the trial under way over the best's."""
_COUNTS = ("pairs", "before", "now")
_BEFORE = RunVariation(sd=0.01, degrees_of_freedom=3.0)
"""Assumed of all runs on accelerators until 2026-11-28."""


def main() -> int:
    """Judge, keep, print."""
    arguments = make_parser(__doc__ or "", "all of it").parse_args()
    recording = start_recording("gpu_runs", arguments, describe_machine("cpu"))
    searches = list(read_searches())
    stops = [row for runs in read_runs_alike(searches) for row in count_stops(runs)]
    recording.add("stops", {"revision": git_revision(), "runs": stops, **totals(stops)})
    recording.add(
        "claims", {"revision": git_revision(), "searches": [judge(search) for search in searches]}
    )
    sums = [(name, *(str(sum_[key]) for key in _COUNTS)) for name, sum_ in totals(stops).items()]
    print_table(
        "Pairs of runs of the same settings",
        ("held by, rate", "pairs", "stopped at 1 %", "now"),
        sums,
    )
    claims = recording.results["claims"]["searches"]
    rows = [
        (one["search"], one["verdict_then"], one["verdict"], _shown(one["measured"]))
        for one in claims
    ]
    print_table("Claims", ("search", "then", "now", "measured"), rows)
    print(f"\n{recording.path}")
    return 0


def count_stops(alike: RunsAlike) -> Iterator[dict[str, Any]]:
    """Count the pairs of runs of which the second would be stopped early, for each share."""
    now = assumed_variation("cuda")
    for share in _SHARES:
        pairs = list(permutations(alike.runs, 2))
        yield {
            "name": alike.name,
            "held_by": "device" if alike.is_held_by_device else "host",
            "share": share,
            "pairs": len(pairs),
            "before": sum(is_stopped(run, share, best, _BEFORE) for best, run in pairs),
            "now": sum(is_stopped(run, share, best, now) for best, run in pairs),
        }


def totals(stops: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the pairs of each share and kind of runs."""
    kinds = dict.fromkeys((row["held_by"], row["share"]) for row in stops)
    return {
        f"{held_by}, {share:.0%}": {
            key: sum(
                row[key] for row in stops if (row["held_by"], row["share"]) == (held_by, share)
            )
            for key in _COUNTS
        }
        for held_by, share in kinds
    }


def judge(search: RecordedSearch) -> dict[str, Any]:
    """Return what a search says of its gain now, and said then."""
    found = replayed(search, assumed_variation("cuda"))
    return {
        "search": search.name,
        "verdict_then": search.verdict,
        "verdict": found.verdict,
        "trial": found.number,
        "claimed": _rounded(found.speedup),
        "measured": _rounded(found.measured_speedup),
        "reasons": [reason.code for reason in found.reasons],
    }


def _rounded(ratio: Interval | None) -> list[float]:
    return [] if ratio is None else [round(end, 3) for end in (ratio.value, ratio.low, ratio.high)]


def _shown(ends: list[float]) -> str:
    value, low, high = ends
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
