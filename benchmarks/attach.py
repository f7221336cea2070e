"""The attached mode on training scripts of others: found, measured, won, what could not be reached, seconds.

Takes the scripts of cases/attach.py that lie in a folder (AUTOTUNE_FOREIGN, or --foreign); of each three parts, written
down as soon as they are known, so that a run which was cut off goes on:
    look      the probe and a trial: framework, loader, baseline, what is out of reach, seconds; and again, preloaded
    pairs     interleaved pairs of an attached window and a run of the same script that nobody watches (unwatched.py)
    search    a search of a minute or two through `autotune run --json`
A script that fails is a row with its reason. `hooks` measures what watching adds to a step, on steps that cost nothing.
Some two hours in all on a quiet machine:
    attach.py --part look --script mnist     one part of one script
    attach.py --summary                      the table of what there is
It must run in the environment that the scripts need (torchvision, transformers, accelerate, lightning, ...).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import sqrt
from pathlib import Path
from statistics import median, stdev
from time import monotonic
from typing import Any

from autotune.api.setup import opened_launcher, runner_for, temporary_folder
from autotune.config.plan import Plan
from autotune.errors import AutotuneError
from autotune.files.plan_file import parse_plan
from autotune.launch.runner import TrialRunner
from autotune.policy import WindowRules
from autotune.space.space import ResolvedSpace
from autotune.tuning.probe import probe_workload
from benchmarks.cases import attach as cases
from benchmarks.measures.attach_hooks import measure_hooks
from benchmarks.measures.recording import (
    Recording,
    describe_machine,
    make_parser,
    read_results,
    say,
    start_recording,
)
from benchmarks.quietness import keep_freed_memory
from benchmarks.tables.attach import print_attach_tables, verdict_of_pairs
from benchmarks.yardsticks.unwatched import steps_per_s

_PARTS = ("look", "pairs", "search")
_PAIRS, _MOST_PAIRS = 5, 15
_WINDOW = WindowRules(max_s=4.0, precision=0.01)
_SKIP_S, _PLAIN_S, _WITHIN_S = 2.0, 5.0, 120.0
_SEARCH_S = 60.0


def main() -> int:
    arguments = _parse()
    recording = start_recording("attach", arguments, describe_machine("cpu"))
    recording.results.update(read_results(recording.path, fresh=arguments.fresh))
    if arguments.summary:
        print_attach_tables(recording.results)
        return 0
    keep_freed_memory()
    if arguments.hooks:
        recording.add("hooks", measure_hooks(rounds=2 if arguments.quick else 8))
    for script in _chosen(arguments):
        for part in arguments.part or _PARTS:
            _measure(script, part, arguments, recording)
    print_attach_tables(recording.results)
    print(f"\n{recording.path}")
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "one pair, windows of 1 s, searches of 30 s")
    parser.add_argument(
        "--foreign", type=_folder, default=cases.foreign_folder(), help="where the scripts lie"
    )
    parser.add_argument(
        "--runs", type=_folder, default=Path(tempfile.gettempdir()) / "autotune-foreign-runs"
    )
    parser.add_argument("--script", action="append", help="this one alone; may be repeated")
    parser.add_argument(
        "--part", action="append", choices=_PARTS, help="this part alone; may be repeated"
    )
    parser.add_argument(
        "--hooks", action="store_true", help="also measure what watching adds to a step"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the file's figures")
    parser.add_argument("--summary", action="store_true", help="only print the tables")
    return parser.parse_args()


def _folder(path: str) -> Path:
    return Path(path).resolve()


def _chosen(arguments: argparse.Namespace) -> list[cases.Script]:
    found = [script for script in cases.SCRIPTS if (arguments.foreign / script.path).exists()]
    if not found:
        say(
            f"no script was found in {arguments.foreign}; benchmarks/cases/attach.py says what belongs there"
        )
    return [script for script in found if not arguments.script or script.name in arguments.script]


def _measure(
    script: cases.Script, part: str, arguments: argparse.Namespace, recording: Recording
) -> None:
    """Measure a part that is missing, and keep it; a failure is what is kept."""
    key = f"{script.name}/{part}"
    if key in recording.results and not arguments.script:
        return
    say(f"{script.name}: {part}")
    begun = monotonic()
    try:
        figures = _DO[part](script, arguments)
    except (AutotuneError, OSError, subprocess.SubprocessError, ValueError) as error:
        figures = {
            "failed": next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
        }
    recording.add(
        key,
        {
            "kind": script.kind,
            "origin": asdict(script.origin),
            **figures,
            "took_s": monotonic() - begun,
        },
    )


@contextmanager
def _opened(
    script: cases.Script, arguments: argparse.Namespace
) -> Iterator[tuple[Plan, TrialRunner]]:
    """The plan of a script and a runner of its trials, from its own working folder and environment."""
    run = arguments.runs / script.name
    cases.prepare(script, arguments.foreign, run)
    before, folder = dict(os.environ), Path.cwd()
    os.environ.update(cases.environment(script, arguments.foreign, run))
    os.chdir(cases.working_folder(script, run))
    try:
        plan = parse_plan(
            {
                "workload": {"command": list(cases.command(script, arguments.foreign, run))},
                "device": "cpu",
            },
            name=script.name,
        )
        with temporary_folder() as held, opened_launcher(None, held, plan) as launcher:
            yield plan, runner_for(plan, held, launcher)
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


def _look(script: cases.Script, arguments: argparse.Namespace) -> dict[str, Any]:
    window = WindowRules(max_s=1.0) if arguments.quick else _WINDOW
    with _opened(script, arguments) as (plan, runner):
        begun = monotonic()
        ready, space = probe_workload(plan, runner)
        probe_s = monotonic() - begun
        figures = {"probe_s": probe_s, **_facts(space), "trials": []}
        for number in range(2):
            result = ready.run(
                space.baseline, name=f"trial-{number}", deadline_s=_WITHIN_S, window=window
            )
            own: dict[str, Any] = {
                "outcome": result.outcome,
                "reason": result.reason,
                "wall_s": result.wall_s,
            }
            if result.measurement is not None:
                kept = (
                    "samples_per_s",
                    "samples_per_s_ci",
                    "startup_s",
                    "build_s",
                    "data_wait_fraction",
                )
                own |= {name: getattr(result.measurement, name) for name in kept}
            figures["trials"].append(own)
        return figures


def _facts(space: ResolvedSpace) -> dict[str, Any]:
    script = space.facts.script
    assert script is not None
    return {
        "framework": script.framework,
        "loaders": [f"{Path(site.file).name}:{site.line}" for site in script.loaders],
        "baseline": script.observed.model_dump(mode="json", exclude_defaults=True),
        "reached": list(script.reached),
        "unreached": {
            str(note.figures["setting"]): note.figures["reason"] for note in script.unreached
        },
        "new_files": len(script.new_files),
    }


def _pairs(script: cases.Script, arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios of attached to unwatched rates, in steps a second, in alternating order.

    Where five pairs do not keep the promise five more are made, and once more five; all of them count.
    """
    pairs, most, window = (
        (1, 1, WindowRules(max_s=1.0)) if arguments.quick else (_PAIRS, _MOST_PAIRS, _WINDOW)
    )
    run = arguments.runs / script.name
    with _opened(script, arguments) as (plan, runner):
        ready, space = probe_workload(plan, runner)
        step_samples = space.baseline.global_batch_size
        command = cases.command(script, arguments.foreign, run)
        own = cases.environment(script, arguments.foreign, run)

        def attached() -> float | None:
            result = ready.run(space.baseline, name="pair", deadline_s=_WITHIN_S, window=window)
            if result.measurement is None:
                raise ValueError(result.reason)
            return result.measurement.samples_per_s / step_samples

        def unwatched() -> float | None:
            return steps_per_s(
                command, Path.cwd(), own, skip_s=_SKIP_S, seconds=_PLAIN_S, within_s=_WITHIN_S
            )

        rates: list[dict[str, float | None]] = []
        figures: dict[str, Any] = {}
        while not rates or (len(rates) < most and verdict_of_pairs(figures) == "no"):
            for number in range(pairs):
                order = (("attached", attached), ("unwatched", unwatched))
                rates.append(
                    {name: rate() for name, rate in (order if number % 2 == 0 else order[::-1])}
                )
            figures = _ratios(rates)
        return figures


def _ratios(rates: list[dict[str, float | None]]) -> dict[str, Any]:
    ratios = [
        pair["attached"] / pair["unwatched"]
        for pair in rates
        if pair["attached"] and pair["unwatched"]
    ]
    return {
        "rates": rates,
        "ratios": ratios,
        "median_ratio": median(ratios) if ratios else None,
        "standard_error": stdev(ratios) / sqrt(len(ratios)) if len(ratios) > 1 else None,
    }


def _search(script: cases.Script, arguments: argparse.Namespace) -> dict[str, Any]:
    run = arguments.runs / script.name
    cases.prepare(script, arguments.foreign, run)
    seconds = 30.0 if arguments.quick else _SEARCH_S
    with tempfile.TemporaryDirectory() as scratch:
        words = [
            "run",
            "--json",
            "--quiet",
            "--set",
            f"budget.timeout_s={seconds:g}",
            "--set",
            f"run_dir={scratch}/run",
        ]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "autotune",
                *words,
                "--",
                *cases.command(script, arguments.foreign, run),
            ],
            cwd=cases.working_folder(script, run),
            env={**os.environ, **cases.environment(script, arguments.foreign, run)},
            capture_output=True,
            text=True,
            timeout=seconds + 240,
            check=False,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise ValueError(
                next(
                    (line for line in lines if line.startswith("error")),
                    lines[-1] if lines else "?",
                )
            )
        document = json.loads(done.stdout)
    return {"verdict": document["verdict"], "speedup": document["speedup"],
            "settings": (document["summary"]["recommendation"] or {}).get("config"),
            "trials": sum(document["outcomes"].values())}  # fmt: skip


_DO = {"look": _look, "pairs": _pairs, "search": _search}

if __name__ == "__main__":
    sys.exit(main())
