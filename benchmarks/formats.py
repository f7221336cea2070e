"""What a diagnosis promises of another data format against what the format brings.

Four jobs: text that is parsed, photographs that are decoded whole and made small, a Parquet table that is read for each
row, and the text below a model that is the limit, of which nothing is to be said. Each is diagnosed; then trials of the
job and of the same job with the advice followed are run in turns, in pairs. Recorded as by lengths.py.

Some five minutes, on the CPU. Parquet needs pyarrow, and is left out without it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cases.formats import FORMAT_CASES
from benchmarks.measures.followed import follow
from benchmarks.measures.recording import (
    describe_machine,
    make_parser,
    print_table,
    start_recording,
)


def main() -> None:
    parser = make_parser(__doc__ or "", "short windows, one pair")
    parser.add_argument("--workload", choices=list(FORMAT_CASES), help="this one alone")
    arguments = parser.parse_args()
    recording = start_recording("formats", arguments, describe_machine("cpu"))
    window_s, pairs = (0.5, 1) if arguments.quick else (4.0, 5)
    for name in [arguments.workload] if arguments.workload else FORMAT_CASES:
        if name == "parquet" and find_spec("pyarrow") is None:
            continue
        kind, make = FORMAT_CASES[name]
        with TemporaryDirectory() as folder:
            today, followed = make(Path(folder))
            found, figures = follow(name, kind, today, followed, window_s, pairs)
        costs = found.diagnosis.evidence.measurement.loader_costs
        formats = [] if costs is None else [cost.model_dump(mode="json") for cost in costs.formats]
        recording.add(name, figures | {"kind": kind, "formats": formats})
    _print(recording.results)
    print(f"\n{recording.path}")


def _print(results: dict[str, Any]) -> None:
    rows = []
    for name, found in results.items():
        promised, ratios = found["promised"], [pair["times"] for pair in found["pairs"]]
        gain = None if promised is None else promised["expected_gain"]
        rows.append(
            [
                name,
                "nothing"
                if promised is None
                else "no figure"
                if gain is None
                else f"{1 + gain:.2f}",
                f"{found['reached_times']:.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ]
        )
    print_table(
        "Times the rate of today in the advised format.",
        ["workload", "promised", "reached", "its pairs"],
        rows,
    )


if __name__ == "__main__":
    main()
