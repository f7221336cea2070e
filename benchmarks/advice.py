"""What a diagnosis expects against what following its advice brings, over workloads that are slow for one reason each.

Each workload is diagnosed. Then trials are run in turns: today's settings, and those of every piece of advice that sets
something, twice, the second time in the opposite order. Recorded for each piece: its kind, by how many times the rate
was expected to rise (Advice.expected_gain), by how many it rose, and the second over the first, less 1.

Advice that sets nothing is followed by a second job (benchmarks/cases/followed_cases.py), in pairs of trials. Recorded
under "followed", for each: what was promised with its interval, what each pair has reached, and whether the median lies
within.

Some eight minutes, on the CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from autotune import TrainingConfig
from autotune.api.diagnose import DiagnosisResult, MeasuringTime, diagnose_plan
from autotune.config.plan import Plan
from autotune.policy import WindowRules
from autotune.protocol.messages import NO_EXTRAS
from autotune.records.result import Advice
from benchmarks.cases.advice import ADVICE_CASES
from benchmarks.cases.advice_data import DATA_CASES
from benchmarks.cases.advice_memory import MEMORY_CASES
from benchmarks.cases.cpu import Case
from benchmarks.measures.followed import follow_case
from benchmarks.measures.recording import (
    describe_machine,
    make_parser,
    print_table,
    say,
    start_recording,
)
from benchmarks.yardsticks.product_run import measurement_figures, open_trials
from benchmarks.yardsticks.workload import workload_of

FOLLOWED_CASES = (*DATA_CASES, *MEMORY_CASES)
"""Advice that sets nothing, each kind with a job that follows it."""
_SETTINGS_WIDTH = 34


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """How long everything takes."""

    measuring: MeasuringTime
    window: WindowRules
    rounds: int
    pairs: int
    followed_s: float


_LARGE = _Scale(
    measuring=MeasuringTime(window_s=3.0, stretch_s=0.5),
    window=WindowRules(max_s=3.0),
    rounds=2,
    pairs=5,
    followed_s=4.0,
)
_QUICK = _Scale(
    measuring=MeasuringTime(window_s=0.5, stretch_s=0.1),
    window=WindowRules(max_s=0.5),
    rounds=1,
    pairs=1,
    followed_s=2.0,  # of less, a busy machine does not time the batches of all lengths before they are given up
)


def main() -> None:
    arguments = _parse()
    recording = start_recording("advice", arguments, describe_machine("cpu"))
    scale = _QUICK if arguments.quick else _LARGE
    chosen = (
        [arguments.workload]
        if arguments.workload
        else [*ADVICE_CASES, *(case.name for case in FOLLOWED_CASES)]
    )
    for name in [name for name in chosen if name in ADVICE_CASES]:
        recording.add(name, _follow(name, ADVICE_CASES[name](), scale))
    on_settings = dict(recording.results)
    if on_settings:
        _print(on_settings)
        recording.add("summary", _summary(on_settings))
    followed = dict[str, Any]()
    for case in [case for case in FOLLOWED_CASES if case.name in chosen]:
        followed[case.name] = follow_case(case, scale.followed_s, scale.pairs)
        recording.add("followed", followed)
    if followed:
        _print_followed(followed)
    print(f"\n{recording.path}")


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "short windows, one round")
    parser.add_argument(
        "--workload",
        choices=[*ADVICE_CASES, *(case.name for case in FOLLOWED_CASES)],
        help="this one alone",
    )
    return parser.parse_args()


def _follow(name: str, case: Case, scale: _Scale) -> dict[str, Any]:
    """A workload's diagnosis, and what each of its pieces of advice has given."""
    found = _diagnose(name, case, scale.measuring)
    say(f"{name}: {found.headline}")
    advised = [piece for piece in found.advice if piece.settings]
    runs = _run_in_turns(case, [{}, *(piece.settings for piece in advised)], scale)
    return {
        "headline": found.headline,
        "verdict": found.verdict,
        "diagnosis": found.diagnosis.model_dump(mode="json"),
        "today": runs[0],
        "advice": [
            _figures(piece, own, runs[0]) for piece, own in zip(advised, runs[1:], strict=True)
        ],
    }


def _diagnose(name: str, case: Case, measuring: MeasuringTime) -> DiagnosisResult:
    baseline = TrainingConfig.model_validate(dict(case.settings))
    plan = Plan(name=name, workload=workload_of(case), baseline=baseline, device="cpu")
    return diagnose_plan(plan, progress=False, measuring=measuring)


def _run_in_turns(
    case: Case, changes: Sequence[dict[str, object]], scale: _Scale
) -> list[list[dict[str, Any]]]:
    """The measurements of today's settings with each of the changes, round by round.

    Raises:
        RuntimeError: a trial did not end well.
    """
    runs: list[list[dict[str, Any]]] = [[] for _ in changes]
    with open_trials(case, device="cpu", window=scale.window, extras=NO_EXTRAS) as run:
        for number in range(scale.rounds):
            order = range(len(changes)) if number % 2 == 0 else reversed(range(len(changes)))
            for place in order:
                result = run({**case.settings, **changes[place]})
                if result.measurement is None:
                    raise RuntimeError(
                        f"a trial must end well, but {changes[place]}: {result.outcome}, {result.reason}"
                    )
                runs[place].append(measurement_figures(result.measurement))
    return runs


def _figures(
    advice: Advice, own: list[dict[str, Any]], today: list[dict[str, Any]]
) -> dict[str, Any]:
    assert advice.expected_gain is not None  # advice on settings always has a figure
    expected, reached = 1 + advice.expected_gain, _rate(own) / _rate(today)
    return {
        "kind": advice.kind,
        "figures": advice.figures,
        "settings": advice.settings,
        "basis": advice.basis,
        "expected_times": expected,
        "reached_times": reached,
        "error": reached / expected - 1,
        "runs": own,
    }


def _rate(runs: Sequence[dict[str, Any]]) -> float:
    return float(median(run["samples_per_s"] for run in runs))


def _summary(results: dict[str, Any]) -> dict[str, Any]:
    pieces = [piece for figures in results.values() for piece in figures["advice"]]
    errors = [abs(piece["error"]) for piece in pieces]
    return {
        "pieces": len(pieces),
        "helped": sum(piece["reached_times"] > 1 for piece in pieces),
        "median_absolute_error": median(errors) if errors else None,
        "worst_absolute_error": max(errors, default=None),
    }


def _print(results: dict[str, Any]) -> None:
    rows = [
        [
            name,
            _say_settings(piece["settings"]),
            f"{piece['expected_times']:.2f}",
            f"{piece['reached_times']:.2f}",
            f"{piece['error']:+.0%}",
        ]
        for name, figures in results.items()
        for piece in figures["advice"]
    ]
    head = ["workload", "settings", "expected", "reached", "error"]
    print_table(
        "Times the rate of today: as the diagnosis expects it, and as trials reached it.",
        head,
        rows,
    )
    summary = _summary(results)
    if summary["pieces"]:
        print(
            f"\n{summary['helped']} of {summary['pieces']} pieces of advice helped; what was reached differs from what "
            f"was\nexpected by {summary['median_absolute_error']:.0%} in the median, "
            f"by {summary['worst_absolute_error']:.0%} at the most."
        )


def _print_followed(followed: dict[str, Any]) -> None:
    """Print gains in throughput."""
    rows = []
    for name, found in followed.items():
        interval = found["interval"]
        promised = "nothing" if interval is None else " to ".join(f"{end:.2f}" for end in interval)
        within = "" if interval is None else "yes" if found["is_within"] else "no"
        rows.append([name, found["kind"], promised, f"{median(found['reached']):.2f}", within])
    head = ["job", "advice", "promised", "reached", "within"]
    print_table("Gain in throughput: as promised, and as pairs of trials reached it.", head, rows)


def _say_settings(settings: dict[str, object]) -> str:
    short = {
        "persistent_workers": "persistent",
        "micro_batch_size": "batch",
        "intra_op_threads": "threads",
    }
    text = ", ".join(f"{short.get(name, name)}={value}" for name, value in settings.items())
    return text if len(text) <= _SETTINGS_WIDTH else f"{text[: _SETTINGS_WIDTH - 3]}..."


if __name__ == "__main__":
    main()
