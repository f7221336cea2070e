"""What we recommend against what loadtune 0.3.0 recommends: the same workloads, one run, judged by a plain loop.

For each workload both tune what is run today: loadtune first, with its own defaults and its batch size search, then the
product with a time-out of as many seconds as that took, or of a minute where that took 20 s or less (loadtune's trials
are a few batches each: it is soon done where it sees little to try). Then a plain training loop, written apart
from both, trains for 15 s with each recommendation, with the best of ours that keeps the batch (once where two of these
are the same), and with today's settings, in turns, three rounds. Told are medians: seconds of tuning, the plain rate of
each recommendation against today's, and what each had claimed. Today's settings are run twice in each round: what these
two differ by is the noise.

    pip install -e '.[versus]'
    versus.py                      all workloads: some 45 minutes
    versus.py --workload photos    this one alone
    versus.py --rounds 1           fewer rounds
Figures are written after each workload; what is in the file already is kept unless --fresh is given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

from autotune import SearchResult, TrainingConfig
from benchmarks import ROOT
from benchmarks.cases.fidelity import WORKLOADS
from benchmarks.measures.recording import (
    describe_machine,
    git_revision,
    make_parser,
    print_table,
    read_results,
    say,
    start_recording,
)
from benchmarks.quietness import keep_freed_memory
from benchmarks.yardsticks.loadtune_run import CASE_VARIABLE, SETTINGS_VARIABLE
from benchmarks.yardsticks.plain_loop import run_plain
from benchmarks.yardsticks.product_run import search

_ROUNDS = 3
_PLAIN_S, _SKIP_S = 15.0, 3.0
_QUICK_S = 1.0
_LOADTUNE_DEADLINE_S = 1200.0
_SHORT_S = 20.0
_TIMEOUT_S = 60.0  # of ours, where loadtune is done sooner than that


def main() -> int:
    arguments = _parse()
    recording = start_recording("versus", arguments, describe_machine())
    recording.results.update(read_results(recording.path, fresh=arguments.fresh))
    for name in [arguments.workload] if arguments.workload else WORKLOADS:
        if name not in recording.results:
            recording.add(name, _compare(name, arguments))
    _print_table(recording.results)
    print(f"\n{recording.path}")
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "plain loops of 1 s, one round")
    parser.add_argument("--workload", choices=list(WORKLOADS), help="this one alone")
    parser.add_argument(
        "--rounds", type=int, default=_ROUNDS, metavar="N", help="of the plain loops (%(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    return parser.parse_args()


def _compare(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    workload = WORKLOADS[name]
    today = dict(workload.settings[0])
    say(f"{name}: loadtune")
    theirs = _theirs(workload.case.__name__, today)
    has_taken_long = "settings" in theirs and theirs["seconds"] > _SHORT_S
    timeout_s = theirs["seconds"] if has_taken_long else _TIMEOUT_S
    say(f"{name}: autotune, {timeout_s:.0f} s")
    ours = _ours(name, today, timeout_s)
    say(f"{name}: plain loops")
    finalists = {
        "today": today,
        "today again": today,
        "autotune": ours["settings"],
        "same batch": ours["same_batch"],
    }
    if "settings" in theirs:
        finalists["loadtune"] = theirs["settings"]
    rates = _plain_rates(workload.case.__name__, finalists, arguments)
    return {
        "revision": git_revision(),
        "autotune": ours,
        "loadtune": theirs,
        "plain_samples_per_s": rates,
    }


def _ours(name: str, today: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    case, begun = replace(WORKLOADS[name].case(), settings=today), perf_counter()
    result = search(case, timeout_s=timeout_s)
    seconds = perf_counter() - begun
    chosen = result.summary.recommendation
    same = result.best_same_batch or result.baseline
    rate = _measured_rate(result)
    return {
        "settings": result.best.model_dump(mode="json", exclude_none=True),
        "same_batch": same.model_dump(mode="json", exclude_none=True),
        "claimed_samples_per_s": rate,
        "speedup": result.speedup,
        "speedup_ci": None if result.speedup_ci is None else list(result.speedup_ci),
        "verdict": None if chosen is None else chosen.verdict,
        "trials": len(result.trials),
        "stopped_because": str(result.summary.stopped_because),
        "seconds": seconds,
    }


def _measured_rate(result: SearchResult) -> float | None:
    """The median rate of all runs of what is recommended."""
    chosen = result.summary.recommendation
    rates = [
        run.samples_per_s
        for one in result.trials
        if chosen and one.number == chosen.number
        for run in one.runs
    ]
    return median(rates) if rates else None


def _theirs(function: str, today: Mapping[str, Any]) -> dict[str, Any]:
    """What loadtune recommends, or how it failed."""
    environment = {
        **os.environ,
        CASE_VARIABLE: f"benchmarks.cases.fidelity:{function}",
        SETTINGS_VARIABLE: json.dumps(dict(today)),
    }
    command = [sys.executable, "-m", "benchmarks.yardsticks.loadtune_run"]
    begun = perf_counter()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LOADTUNE_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        told_last = (
            (done.stdout + done.stderr).strip().splitlines()[-1:]
        )  # what is above names folders of this machine
        return {"error": "".join(told_last), "seconds": perf_counter() - begun}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**told, "seconds": perf_counter() - begun}


def _plain_rates(
    function: str, finalists: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Each contender's plain rates, round after round, every second one in reverse order.

    Recommendations with the same settings share their runs. Today's settings are run twice, for the noise.
    """
    seconds = _QUICK_S if arguments.quick else _PLAIN_S
    configs = {name: _config_of(settings) for name, settings in finalists.items()}
    shared = {
        name: next(one for one in configs if configs[one] == config)
        for name, config in configs.items()
    }
    shared["today again"] = "today again"
    apart = [name for name, first in shared.items() if name == first]
    rates: dict[str, list[float]] = {name: [] for name in apart}
    for number in range(1 if arguments.quick else arguments.rounds):
        for name in apart if number % 2 == 0 else apart[::-1]:
            figures = run_plain(
                f"benchmarks.cases.fidelity:{function}",
                finalists[name],
                seconds=seconds,
                skip_s=min(seconds, _SKIP_S),
            )
            rates[name].append(figures["samples_per_s"])
    return {name: rates[first] for name, first in shared.items()}


def _config_of(settings: Mapping[str, Any]) -> TrainingConfig:
    """All settings, but for the learning rate: the product scales it, and it has no part in the speed."""
    return TrainingConfig.model_validate({**settings, "lr": 1.0})


def _print_table(results: Mapping[str, Any]) -> None:
    rows = []
    for name, one in results.items():
        plain = {who: median(rates) for who, rates in one["plain_samples_per_s"].items()}
        noise = abs(plain["today again"] / plain["today"] - 1)
        ours, theirs = one["autotune"], one["loadtune"]
        base = (plain["today"] + plain["today again"]) / 2
        rows.append(
            (
                name,
                f"{noise:.1%}",
                f"{plain['autotune'] / base:.2f}",
                f"{plain['same batch'] / base:.2f}",
                f"{plain['loadtune'] / base:.2f}" if "loadtune" in plain else "failed",
                f"{ours['seconds']:.0f}",
                f"{theirs['seconds']:.0f}",
                _claim(ours, plain["autotune"]),
                _claim(theirs, plain.get("loadtune")),
            )
        )
    head = ("workload", "A/A", "ours", "same b.", "loadtune", "s", "s lt", "claim", "claim lt")
    print_table(
        "Plain rate of what each recommends, against today's; claims against that plain rate",
        head,
        rows,
    )


def _claim(told: Mapping[str, Any], plain: float | None) -> str:
    claimed = told.get("claimed_samples_per_s")
    return "-" if not claimed or not plain else f"{claimed / plain - 1:+.0%}"


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
