"""Are the decisions right on this machine? Whole searches of real training steps with a gain that is known.

Each search is one of autotune.search, in a fresh run folder, without a time-out or a number of trials. The step does
the same work whatever is set, and sleeps in proportion to it unless one setting is on (cases/known_gain.py): precision
in one search, memory layout in the next. With a ratio of 1 there is nothing to win: what is compared is alike (A/A).
Told is what decisions.py tells of simulated machines, by the same calculation: how often a search says that its
recommendation is proven faster, how often that is false, how often its interval holds the truth, how far its claim lies
off, what a user who follows the recommendation loses.

    decisions_here.py               searches of each ratio in turns until each has 20
    decisions_here.py --minutes 9   begins no search that may end later; the next call goes on
    decisions_here.py --searches 5  fewer
    decisions_here.py --fresh       all anew
    decisions_here.py --summary     the table of what there is
Exit codes: 0; 3 nothing was missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from statistics import median
from time import monotonic, perf_counter
from typing import Any

from autotune import SearchResult, TrainingConfig
from autotune.models.evidence import assumed_variation, evidence_of_runs
from benchmarks.cases.known_gain import BASELINE, CARRIERS, SEARCHED, known_gain, true_ratio
from benchmarks.decisions import print_decisions, repeated_of, rounded, summarise
from benchmarks.measures.recording import (
    Recording,
    describe_machine,
    git_revision,
    make_parser,
    read_results,
    say,
    start_recording,
)
from benchmarks.measures.verdicts import claim_of, is_proven, verdict_of
from benchmarks.quietness import keep_freed_memory
from benchmarks.yardsticks.product_run import only, search

RATIOS = (1.0, 1.03, 1.1, 1.5)
_SEARCHES = 20
_SEARCH_NEEDS_S = 240.0  # as long as none was seen
_EXIT_NOTHING_MISSING = 3


def main() -> int:
    begun, arguments = monotonic(), _parse()
    recording = start_recording("decisions_here", arguments, describe_machine("cpu"))
    recording.results.update(read_results(recording.path, fresh=arguments.fresh))
    wanted = 1 if arguments.quick else arguments.searches
    if arguments.summary or _next(recording.results, wanted) is None:
        print_decisions(recording.results)
        return 0 if arguments.summary else _EXIT_NOTHING_MISSING
    while (ratio := _next(recording.results, wanted)) is not None:
        if (
            arguments.minutes is not None
            and monotonic() + _longest_s(recording) > begun + 60 * arguments.minutes
        ):
            break
        _add(recording, ratio, timeout_s=20.0 if arguments.quick else None)
    print_decisions(recording.results)
    print(f"\n{recording.path}")
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "one search of each ratio, with a time-out of 20 s")
    parser.add_argument(
        "--searches", type=int, default=_SEARCHES, metavar="N", help="of each ratio (%(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="begin nothing that may end after so many minutes",
    )
    parser.add_argument("--fresh", action="store_true", help="all anew")
    parser.add_argument("--summary", action="store_true", help="only print the table")
    return parser.parse_args()


def name_of(ratio: float) -> str:
    """Of a part of the results."""
    return f"gain {100 * (ratio - 1):.0f} %"


def _next(results: Mapping[str, Any], wanted: int) -> float | None:
    """The ratio with the fewest searches so far; None where each has enough."""
    counts = {ratio: results.get(name_of(ratio), {}).get("count", 0) for ratio in RATIOS}
    ratio = min(RATIOS, key=lambda one: counts[one])
    return ratio if counts[ratio] < wanted else None


def _longest_s(recording: Recording) -> float:
    seen = [one["whole_s"] for part in recording.results.values() for one in part["searches"]]
    return max(seen, default=_SEARCH_NEEDS_S)


def _add(recording: Recording, ratio: float, timeout_s: float | None) -> None:
    """Make the next search of a ratio, and write it down."""
    searches = list(recording.results.get(name_of(ratio), {}).get("searches", ()))
    seed = len(searches)
    carrier = CARRIERS[seed % len(CARRIERS)]
    space = only(BASELINE, **SEARCHED)
    begun = perf_counter()
    result = search(
        known_gain(ratio, carrier), space=space, seed=seed, device="cpu", timeout_s=timeout_s
    )
    whole_s = round(perf_counter() - begun, 1)

    def truth(config: TrainingConfig) -> float:
        return true_ratio(config, ratio, carrier)

    told = {
        "seed": seed,
        "carrier": carrier,
        **figures_of(result, truth, ratio),
        "whole_s": whole_s,
    }
    searches.append({**told, "revision": git_revision()})
    part = {"count": len(searches), **summarise(searches, ratio - 1), "searches": searches}
    recording.add(name_of(ratio), part)
    say(
        f"{name_of(ratio)}, by {carrier}: {told['verdict']}, {told['claim']}, true {told['truth']}, {whole_s:.0f} s"
    )


def figures_of(
    result: SearchResult, truth: Callable[[TrainingConfig], float], best: float
) -> dict[str, Any]:
    """What a search says, and what is true."""
    said = result.summary.recommendation
    if said is None:
        raise RuntimeError("a search of a step that always runs must recommend something")
    claim = claim_of(said)
    return {
        "verdict": verdict_of(said),
        "claim": None if claim is None else rounded(claim),
        "falsely_proven": int(
            is_proven(said) and truth(result.best) <= 1
        ),  # of others the result says nothing
        "repeated": list(
            repeated_of(
                result.trials, evidence_of_runs(result.trials, assumed_variation("cpu")), truth
            )
        ),
        "truth": truth(result.best),
        "best": best,
        "trials": len(result.trials),
        "rates": [
            [one.number, round(median(run.samples_per_s for run in one.runs), 2)]
            for one in said.confirmations
        ],
    }


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
