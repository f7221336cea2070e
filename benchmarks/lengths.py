"""What a diagnosis promises of batches of like lengths against what a batch sampler that makes them brings.

Three jobs: sequences whose lengths vary, sequences of one length, and the first with a slow loader, of which nothing is
to be said. Each is diagnosed; then trials of today's random batches and of a sampler that sorts pools of 50 batches by
length are run in turns, in pairs. Recorded: the gain that was promised with its interval (None: nothing was said), the
median over the pairs of the second rate over the first, and each pair's.

Some five minutes, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from autotune.api.diagnose import MeasuringTime, diagnose_plan
from autotune.protocol.jobs import NO_EXTRAS, WindowRules
from benchmarks.cases.cpu import Case
from benchmarks.cases.lengths import LENGTH_CASES, PooledByLength
from benchmarks.measures.recording import describe_machine, make_parser, print_table, say, start_recording
from benchmarks.yardsticks.product_run import RunTrial, measurement_figures, open_trials, plan_for

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
    """What was promised, and what pairs of trials have reached."""
    measuring = MeasuringTime(window_s=window_s, stretch_s=min(1.0, window_s / 2))
    found = diagnose_plan(plan_for(case, "cpu"), progress=False, measuring=measuring)
    advice = next((piece for piece in found.advice if piece.kind == _KIND), None)
    say(f"{name}: {found.headline} {'nothing is said' if advice is None else advice.text}")
    sorted_case = replace(case, batch_sampler=PooledByLength)
    rules = WindowRules(max_s=window_s)
    with (
        open_trials(case, device="cpu", window=rules, extras=NO_EXTRAS) as today,
        open_trials(sorted_case, device="cpu", window=rules, extras=NO_EXTRAS) as sorted_by_length,
    ):
        runs = [_pair(case, today, sorted_by_length, is_turned=bool(number % 2)) for number in range(pairs)]
    return {
        "headline": found.headline,
        "promised": None if advice is None else advice.model_dump(mode="json"),
        "lengths": _dumped(found.diagnosis.evidence.measurement.lengths),
        "tokens": _dumped(found.diagnosis.evidence.measurement.tokens),
        "host_load": _dumped(found.diagnosis.evidence.measurement.host_load),
        "reached_times": median(_ratio(pair) for pair in runs),
        "pairs": [{"times": _ratio(pair), "today": pair[0], "sorted": pair[1]} for pair in runs],
    }


def _pair(case: Case, today: RunTrial, by_length: RunTrial, *, is_turned: bool) -> tuple[dict[str, Any], ...]:
    """Both sides' figures, today's first, whichever ran first.

    Raises:
        RuntimeError: a trial did not end well.
    """
    results = [run(case.settings) for run in ((by_length, today) if is_turned else (today, by_length))]
    figures = []
    for result in reversed(results) if is_turned else results:
        if result.measurement is None:
            raise RuntimeError(f"a trial must end well, but: {result.outcome}, {result.reason}")
        figures.append(measurement_figures(result.measurement))
    return tuple(figures)


def _ratio(pair: Sequence[dict[str, Any]]) -> float:
    return float(pair[1]["samples_per_s"] / pair[0]["samples_per_s"])


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
                "" if promised is None else f"{1 + figures['gain_low']:.2f} to {1 + figures['gain_high']:.2f}",
                f"{found['reached_times']:.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ]
        )
    head = ["workload", "promised", "interval", "reached", "its pairs"]
    print_table("Times the rate of today in batches of like lengths.", head, rows)


if __name__ == "__main__":
    main()
