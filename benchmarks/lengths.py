"""What a diagnosis promises of batches of like lengths against what a batch sampler that makes them brings.

Three jobs: sequences whose lengths vary, sequences of one length, and the first with a slow loader, of which nothing is
to be said. Each is diagnosed; then trials of today's random batches and of a sampler that sorts pools of 50 batches by
length are run in turns, in pairs. Recorded: the gain that was promised with its interval (None: nothing was said), the
median over the pairs of the second rate over the first, and each pair's.

Some five minutes, on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.cases.cpu import Case
from benchmarks.cases.lengths import LENGTH_CASES, PooledByLength
from benchmarks.measures.followed import follow
from benchmarks.measures.recording import (
    describe_machine,
    make_parser,
    print_table,
    start_recording,
)

_KIND = "batch_like_lengths"


def main() -> None:
    parser = make_parser(__doc__ or "", "short windows, one pair")
    parser.add_argument("--workload", choices=list(LENGTH_CASES), help="this one alone")
    arguments = parser.parse_args()
    recording = start_recording("lengths", arguments, describe_machine("cpu"))
    window_s, pairs = (0.5, 1) if arguments.quick else (4.0, 5)
    for name in [arguments.workload] if arguments.workload else LENGTH_CASES:
        recording.add(name, _follow(name, LENGTH_CASES[name](), window_s, pairs))
    _print(recording.results)
    print(f"\n{recording.path}")


def _follow(name: str, case: Case, window_s: float, pairs: int) -> dict[str, Any]:
    """What was promised, what pairs of trials have reached, and the lengths that both come from."""
    found, figures = follow(
        name, _KIND, case, replace(case, batch_sampler=PooledByLength), window_s, pairs
    )
    measured = found.diagnosis.evidence.measurement
    return figures | {"lengths": _dumped(measured.lengths), "tokens": _dumped(measured.tokens)}


def _dumped(record: Any) -> Any:
    return None if record is None else record.model_dump(mode="json")


def _print(results: dict[str, Any]) -> None:
    rows = []
    for name, found in results.items():
        promised, ratios = found["promised"], [pair["times"] for pair in found["pairs"]]
        figures = {} if promised is None else promised["figures"]
        rows.append(
            [
                name,
                "nothing" if promised is None else f"{1 + promised['expected_gain']:.2f}",
                ""
                if promised is None
                else f"{1 + figures['gain_low']:.2f} to {1 + figures['gain_high']:.2f}",
                f"{found['reached_times']:.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ]
        )
    head = ["workload", "promised", "interval", "reached", "its pairs"]
    print_table("Times the rate of today in batches of like lengths.", head, rows)


if __name__ == "__main__":
    main()
