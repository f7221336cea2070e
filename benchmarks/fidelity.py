"""A trial's rate against a plain loop of 15 s: eight workloads, six settings of each, three interleaved pairs.

A pair is a trial of the product, as a search makes it, and a run of plain_loop.py right before or after it. Told of
each setting: the median of the pairs' ratios less 1, whether the plain rates lie in the trials' 95 % intervals, how far
the plain runs differ among themselves, and what ten steps after three warm-up steps would have said. Beside it: what
the window's loop costs against a bare one, on steps that are as cheap as they get.

Before, between and after a pair's runs the machine's speed is looked at (quietness.py). A pair in which it changed to
twice or half compares two machines, whatever its outcome: it is put aside and measured again, once; then it counts, and
the table says how many such there are. (A look takes a second, and on shared cores looks differ by far more than runs
of 15 s: a sharper line would put aside pairs that are as good as any.)

Some 80 minutes in all on a quiet machine. Figures are written after each pair; a run that was cut off goes on where its
file ends:
    fidelity.py --max-pairs 1     the next pair that is missing, whichever it is
    fidelity.py --minutes 10      as many as begin within ten minutes
    fidelity.py --summary         the tables of what there is
Exit codes: 0; 1 a run failed; 2 the file is of another revision; 3 nothing was missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from time import monotonic
from typing import Any

import torch

from autotune import Measurement
from autotune.apply.cores import processor_name, usable_cores
from autotune.policy import WindowRules
from autotune.protocol.messages import Extras
from benchmarks.cases.fidelity import WORKLOADS, Settings
from benchmarks.instrumentation import measure_instrumentation
from benchmarks.measures.recording import (
    Recording,
    describe_machine,
    git_revision,
    make_parser,
    read_results,
    say,
    start_recording,
)
from benchmarks.quietness import drift, keep_freed_memory, look_at_speeds
from benchmarks.tables.fidelity import print_fidelity_tables, summarise
from benchmarks.yardsticks.plain_loop import run_plain
from benchmarks.yardsticks.product_run import RunTrial, measurement_figures, open_trials

_PAIRS = 3
_QUIET = 1.0  # own convention: more than looks of a second differ by while nothing lasting changes
_ATTEMPTS = 2
_EXIT_OTHER_REVISION = 2
_EXIT_NOTHING_MISSING = 3
_INSTRUMENTATION = "instrumentation"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """How long everything takes."""

    plain_s: float
    skip_s: float
    window: WindowRules
    rounds: int
    """Of what measuring costs."""


_LARGE = _Scale(plain_s=15.0, skip_s=3.0, window=WindowRules(), rounds=150)
_QUICK = _Scale(plain_s=1.0, skip_s=0.5, window=WindowRules(max_s=1.0), rounds=10)


@dataclass(frozen=True, slots=True)
class _Task:
    """A pair to be measured."""

    workload: str
    setting: int
    number: int
    """Of the setting's pairs, from 0; the even ones begin with the product."""


def main() -> int:
    arguments = _parse()
    recording = start_recording("fidelity", arguments, _machine(arguments))
    recording.results.update(read_results(recording.path, fresh=arguments.fresh))
    if arguments.summary:
        print_fidelity_tables(recording.results)
        return 0
    if _is_of_other_revision(recording.results) and not arguments.resume:
        print(
            f"{recording.path} holds pairs of another revision: add --resume or --fresh",
            file=sys.stderr,
        )
        return _EXIT_OTHER_REVISION
    scale = _QUICK if arguments.quick else _LARGE
    tasks = _missing(arguments, recording.results)
    wants_costs = arguments.workload is None and _INSTRUMENTATION not in recording.results
    if not tasks and not wants_costs:
        say("nothing is missing")
        return _EXIT_NOTHING_MISSING
    ends_at = monotonic() + 60 * arguments.minutes if arguments.minutes is not None else None
    attempts = arguments.max_pairs or _ATTEMPTS * len(tasks)
    while (left := _missing(arguments, recording.results)[:attempts]) and (
        ends_at is None or monotonic() < ends_at
    ):
        _measure_pairs(left, recording, scale, arguments, ends_at)
        attempts -= len(left)
    is_done = not _missing(arguments, recording.results)
    if wants_costs and is_done and not (tasks and arguments.max_pairs):
        say("what measuring costs")
        costs = measure_instrumentation(rounds=scale.rounds)
        figures = {"revision": git_revision(), "load_average": list(os.getloadavg()), "jobs": costs}
        recording.add(_INSTRUMENTATION, figures)
    if is_done:
        print_fidelity_tables(recording.results)
    print(f"\n{recording.path}")
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "plain loops of 1 s, windows of 1 s, one pair")
    parser.add_argument("--workload", choices=list(WORKLOADS), help="this one alone")
    parser.add_argument("--setting", type=int, metavar="N", help="this setting alone, from 0")
    parser.add_argument("--pairs", type=int, metavar="N", help=f"pairs of each setting ({_PAIRS})")
    parser.add_argument("--max-pairs", type=int, metavar="N", help="end after so many pairs")
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="begin no pair after so many minutes"
    )
    parser.add_argument(
        "--extras", action="store_true", help="trials also measure where the time goes"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with a file of another revision"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="start anew, and forget the file's pairs"
    )
    parser.add_argument("--summary", action="store_true", help="only print the tables")
    arguments = parser.parse_args()
    if arguments.pairs is None:
        arguments.pairs = 1 if arguments.quick else _PAIRS
    return arguments


def _machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """The machine; from the file of an earlier run where that was here, since asking takes as long as a short trial."""
    here = (processor_name(), usable_cores(), torch.__version__)
    for path in arguments.results.glob("fidelity-*.json"):
        machine: dict[str, Any] = json.loads(path.read_text())["machine"]
        if (machine["processor"], machine["cores"], machine["torch"]) == here:
            return machine
    return describe_machine("cpu")


def _missing(arguments: argparse.Namespace, results: dict[str, Any]) -> list[_Task]:
    """The pairs that are still to be measured: a first pair of every setting, then the second ones."""
    found = results.get("pairs", {})
    return [
        _Task(name, index, number)
        for number in range(arguments.pairs)
        for name, workload in WORKLOADS.items()
        for index in range(len(workload.settings))
        if arguments.workload in {None, name}
        and arguments.setting in {None, index}
        and number >= len(found.get(name, {}).get(str(index), {}).get("pairs", []))
    ]


def _measure_pairs(
    tasks: Sequence[_Task],
    recording: Recording,
    scale: _Scale,
    arguments: argparse.Namespace,
    ends_at: float | None,
) -> None:
    """Measure the pairs in order; trials of neighbouring tasks with one workload share a fork server and a probe."""
    extras = Extras(loader_ceiling=True, device_ceiling=True, breakdown=arguments.extras)
    for name, group in groupby(tasks, key=lambda task: task.workload):
        if ends_at is not None and monotonic() >= ends_at:
            return
        with open_trials(
            WORKLOADS[name].case(), device="cpu", window=scale.window, extras=extras
        ) as run_trial:
            for task in _in_time(group, ends_at):
                _keep(recording, task, _pair(task, run_trial, scale))


def _in_time(tasks: Iterator[_Task], ends_at: float | None) -> Iterator[_Task]:
    return (task for task in tasks if ends_at is None or monotonic() < ends_at)


def _pair(task: _Task, run_trial: RunTrial, scale: _Scale) -> dict[str, Any]:
    """A trial and a plain run next to each other, in alternating order."""
    settings = WORKLOADS[task.workload].settings[task.setting]
    load = list(os.getloadavg())

    def plain() -> dict[str, Any]:
        case = f"benchmarks.cases.fidelity:{task.workload}"
        return run_plain(case, settings, seconds=scale.plain_s, skip_s=scale.skip_s)

    looks = [look_at_speeds()]
    if task.number % 2 == 0:
        trial = _measured(run_trial, settings)
        looks.append(look_at_speeds())
        truth = plain()
    else:
        truth = plain()
        looks.append(look_at_speeds())
        trial = _measured(run_trial, settings)
    looks.append(look_at_speeds())
    change = drift(looks)
    say(
        f"{task.workload} {task.setting}, pair {task.number + 1}: trial {trial.samples_per_s:,.1f}, "
        f"plain {truth['samples_per_s']:,.1f} samples/s ({trial.samples_per_s / truth['samples_per_s'] - 1:+.1%}), "
        f"the machine {change:.0%}"
    )
    figures = {"trial": _trial_figures(trial), "plain": truth}
    return {
        "revision": git_revision(),
        "load_average": load,
        "speeds": looks,
        "drift": change,
        **figures,
    }


def _measured(run_trial: RunTrial, settings: Settings) -> Measurement:
    result = run_trial(settings)
    if result.measurement is None:
        traceback = result.failure.traceback if result.failure is not None else ""
        raise RuntimeError(
            f"the trial must end well, but it is {result.outcome}: {result.reason}\n{traceback}"
        )
    return result.measurement


def _trial_figures(measurement: Measurement) -> dict[str, Any]:
    """A measurement, its blocks' parts as lists side by side."""
    figures = measurement_figures(measurement)
    samples, seconds, waits = zip(*figures.pop("blocks"), strict=True)
    rounded = {
        "seconds": [round(one, 6) for one in seconds],
        "data_wait_s": [round(one, 6) for one in waits],
    }
    return {**figures, "blocks": {"samples": list(samples), **rounded}}


def _keep(recording: Recording, task: _Task, pair: dict[str, Any]) -> None:
    """Count a pair of a quiet machine, or of the last attempt; of any other only its figures in short are kept."""
    pairs = recording.results.setdefault("pairs", {})
    settings = WORKLOADS[task.workload].settings[task.setting]
    new = {"settings": settings, "pairs": [], "put_aside": []}
    kept = pairs.setdefault(task.workload, {}).setdefault(str(task.setting), new)
    aside = kept.setdefault("put_aside", [])
    attempts = 1 + sum(one["number"] == task.number for one in aside)
    if pair["drift"] > _QUIET and attempts < _ATTEMPTS:
        rates = {side: pair[side]["samples_per_s"] for side in ("trial", "plain")}
        aside.append({"number": task.number, "drift": pair["drift"], **rates})
    else:
        kept["pairs"].append(json.loads(json.dumps(pair)))
    recording.results["summary"] = summarise(recording.results)
    recording.add("pairs", pairs)


def _is_of_other_revision(results: dict[str, Any]) -> bool:
    now = git_revision()
    seen = {
        pair["revision"]
        for settings in results.get("pairs", {}).values()
        for one in settings.values()
        for pair in one["pairs"]
    }
    return bool(seen - {now})


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
