"""How long a whole default search takes, on the device that there is, and what had been promised before.

Each workload is searched with nothing but its baseline given: no number of trials, no time-out. Told are the seconds
from the call to the recommendation, the share of them in which a trial ran, what was promised before the first trial,
the trials, why the search ended, what it won, and after how much training it has paid for itself. On a CUDA GPU the
workloads are those of gpu.py, elsewhere the four of configs/.

    default_search.py                      all of them
    default_search.py --workload photos    this one alone
    default_search.py --method tpe         by another method
Target: a whole default search on one GPU ends within 5 minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from autotune.models.time_estimate import payback_s
from benchmarks.cases import fidelity as fidelity_cases
from benchmarks.cases import gpu as gpu_cases
from benchmarks.cases.cpu import Case
from benchmarks.measures.recording import (
    describe_machine,
    make_parser,
    print_table,
    say,
    start_recording,
)
from benchmarks.yardsticks.product_run import search, search_figures

_CPU = ("photos", "digits", "sleeping_vectors", "tiny_gpt")
_GPU = ("resnet50", "gpt2", "jpeg_cnn")


def main() -> int:
    machine = describe_machine()
    cases = _cases(machine["device_kind"] != "cpu")
    arguments = _parse(cases)
    recording = start_recording("default_search", arguments, machine)
    for name in [arguments.workload] if arguments.workload else cases:
        say(name)
        recording.add(name, _measure(cases[name](), arguments))
    _print_table(recording.results)
    print(f"\n{recording.path}")
    return 0


def _cases(is_gpu: bool) -> Mapping[str, Callable[[], Case]]:
    if is_gpu:
        return {name: getattr(gpu_cases, name) for name in _GPU}
    return {name: lambda name=name: _with_baseline(name) for name in _CPU}  # type: ignore[misc] # the name is bound


def _with_baseline(name: str) -> Case:
    workload = fidelity_cases.WORKLOADS[name]
    return replace(workload.case(), settings=dict(workload.settings[0]))


def _parse(cases: Mapping[str, object]) -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "a time-out of 20 s each")
    parser.add_argument("--workload", choices=list(cases), help="this one alone")
    parser.add_argument("--method", default="model", help="what proposes trials (%(default)s)")
    return parser.parse_args()


def _measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    begun = perf_counter()
    result = search(case, method=arguments.method, timeout_s=20 if arguments.quick else None)
    seconds = perf_counter() - begun
    return {
        "seconds": seconds,
        "promised_s": result.summary.promised_s,
        "in_trials_s": sum(trial.result.wall_s for trial in result.trials),
        "payback_s": None if result.speedup is None else payback_s(seconds, result.speedup),
        "search": search_figures(result),
    }


def _print_table(results: Mapping[str, Any]) -> None:
    rows = []
    for name, one in results.items():
        found = one["search"]
        promised, speedup, paid = one["promised_s"], found["speedup"], one["payback_s"]
        rows.append(
            (
                name,
                f"{one['seconds']:.0f}",
                "-" if promised is None else f"{promised:.0f}",
                f"{one['in_trials_s']:.0f}",
                str(len(found["trials"])),
                "-" if speedup is None else f"{speedup:.2f}",
                "-" if paid is None else f"{paid / 60:.0f} min",
            )
        )
        say(f"{name}: {found['stopped_because']}")
    head = ("workload", "s", "promised", "in trials", "trials", "speed-up", "paid after")
    print_table("Whole default searches", head, rows)


if __name__ == "__main__":
    sys.exit(main())
