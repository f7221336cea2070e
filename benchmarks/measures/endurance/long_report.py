"""A report of thousands of trials: how soon it opens, how long all of it takes, and how large its page is.

The run folder is written by the product; its trials are those of a small search with made-up figures, over and over,
each with a batch and an accumulation of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from time import perf_counter

import autotune
from autotune.files.run_folder import RunFolder
from autotune.records.trial import TrialRecord
from autotune.testing import FakeLauncher
from benchmarks import ROOT
from benchmarks.measures.endurance.part import Part
from benchmarks.measures.part_guard import Figures

__all__ = ["LONG_REPORT", "make_long_folder", "time_report"]

_MOST_SHOWN_S, _MOST_PAGE_BYTES = 3.0, 5_000_000
_BATCHES, _ACCUMULATIONS = 256, 32
_SMALL = 40
"""Trials of the search that is repeated."""
_REPORTS = 5
"""Of which the shortest counts: whatever else runs makes a report longer."""


def make_long_folder(count: int, folder: Path) -> Path:
    """A run folder of so many trials."""
    found = autotune.search(
        object,
        list,
        n_trials=_SMALL,
        timeout_s=3600.0,
        launcher=FakeLauncher(),
        run_dir=folder / "small",
        progress=False,
    ).summary
    trials = list(found.trials)
    for number, record in zip(range(len(trials), count), cycle(found.trials), strict=False):
        batch, steps = 1 + number % _BATCHES, 1 + number // _BATCHES % _ACCUMULATIONS
        config = record.config.model_copy(
            update={"micro_batch_size": batch, "grad_accum_steps": steps}
        )
        trials.append(
            TrialRecord.model_validate({**dict(record), "number": number, "config": config})
        )
    run_folder = RunFolder(folder / "long")
    run_folder.path.mkdir(mode=0o700)
    run_folder.write_summary(found.model_copy(update={"trials": tuple(trials)}))
    return run_folder.path


def time_report(run_dir: Path) -> Figures:
    """`autotune report` of a folder: seconds until its text stands there, in all, and the size of the page."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = []
    for _ in range(_REPORTS):
        begun, shown_s = perf_counter(), 0.0
        with subprocess.Popen(
            [sys.executable, "-m", "autotune", "report", str(run_dir)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        ) as process:
            assert process.stdout is not None
            while os.read(process.stdout.fileno(), 1 << 20):
                shown_s = perf_counter() - begun
        found.append(
            {"exit": process.returncode, "shown_s": shown_s, "report_s": perf_counter() - begun}
        )
    shortest = min(found, key=lambda one: (-abs(one["exit"]), one["shown_s"]))
    return {**shortest, "page_bytes": (run_dir / "report.html").stat().st_size}


def _run(case: str, folder: Path) -> Figures:
    count = int("".join(filter(str.isdigit, case)))
    found = {"trials": count, **time_report(make_long_folder(count, folder))}
    faults = []
    if found["exit"]:
        faults.append(f"autotune report ended with {found['exit']}")
    if found["shown_s"] > _MOST_SHOWN_S:
        faults.append(f"the report opens after {found['shown_s']:.1f} s")
    if found["page_bytes"] > _MOST_PAGE_BYTES:
        faults.append(f"report.html has {found['page_bytes']:,} bytes")
    return found | ({"fault": "; ".join(faults)} if faults else {})


def _judge(cases: Mapping[str, Figures]) -> Figures:
    kept = not any("fault" in found for found in cases.values())
    return {"promises": {"the report opens within 3 s, and is small": kept if cases else None}}


LONG_REPORT = Part(
    proves="the report of thousands of trials opens, and is small",
    cases=lambda is_quick: ("report_of_200",) if is_quick else ("report_of_2000",),
    run=_run,
    judge=_judge,
    limit_s=900.0,
)
"""A report of 2,000 trials."""
