"""Whether a search outlasts a power cut at any moment: what it wrote is replayed up to there, and the search goes on.

A case records one search with made-up trials, call by call. Some cases try a few of its moments, drawn by the case's
number, half of them right after a sync or a rename, each with each Loss; the others try every moment of an eighth of
the search, with all lost that was not synced.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random

import autotune
from autotune.errors import AutotuneError
from autotune.files.run_folder import read_summary
from autotune.launch.launcher import Exit, Launch
from autotune.records.trial import TrialRecord
from autotune.testing import FakeLauncher
from benchmarks import ROOT
from benchmarks.measures.endurance.disk_log import (
    LOSSES,
    Loss,
    Step,
    left_by_power_cut,
    record_steps,
)
from benchmarks.measures.endurance.live_search import fault_of_files
from benchmarks.measures.endurance.part import Part
from benchmarks.measures.endurance.short_windows import without_drawings
from benchmarks.measures.part_guard import Figures

__all__ = ["POWER_LOSS", "TellingLauncher", "fault_after_cut", "search_in"]

_CASES, _MOMENTS = 25, 10
_EVERY, _PARTS = "every_moment", 8
"""Name and number of the cases that leave out no moment."""
_TRIALS = 5
_SPACE = {
    "num_workers": [0, 2, 4],
    "micro_batch_size": [32, 64, 128],
    "amp_dtype": "float32",
    "pin_memory": False,
}
_BOUNDARIES = {"sync", "sync names", "rename", "told"}


@dataclass(slots=True)
class TellingLauncher(FakeLauncher):
    """Tells on standard output how many trials have ended before each one, and notes which it launches."""

    names: list[str] = field(default_factory=list)
    tells: bool = False

    def launch(self, launch: Launch) -> Exit:
        """Launch a made-up trial."""
        ended = [name for name in self.names if name.removeprefix("trial-").isdecimal()]
        if self.tells:
            os.write(1, f"{len(ended)}\n".encode())
        self.names.append(launch.log.stem)
        return FakeLauncher.launch(self, launch)


def search_in(folder: Path, launcher: FakeLauncher, seed: int) -> autotune.SearchResult:
    """A small search with made-up trials."""
    return autotune.search(
        object,
        list,
        space=_SPACE,
        n_trials=_TRIALS,
        timeout_s=600.0,
        method="random",
        seed=seed,
        launcher=launcher,
        run_dir=folder,
        progress=False,
    )


def fault_after_cut(folder: Path, told: Mapping[int, str], seed: int) -> str | None:
    """What is lost in a folder that a cut has left, or goes wrong with it; None where all goes on as it should."""
    try:
        read_summary(folder)
    except AutotuneError as error:
        if len(str(error).splitlines()) > 1:
            return f"a report refuses the folder in more than a line: {error}"
    launcher = TellingLauncher()
    try:
        result = search_in(folder, launcher, seed)
    except AutotuneError as error:
        return f"the search does not go on: {error}"
    found = {trial.number: _essence(trial) for trial in result.trials}
    lost = sorted(number for number, essence in told.items() if found.get(number) != essence)
    again = sorted({int(name[6:9]) for name in launcher.names if name[6:].isdecimal()} & {*told})
    if lost or again or len(found) != _TRIALS:
        return f"trials that had ended: lost {lost}, run again {again}; {len(found)} in all"
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # that it was found on another machine: a made-up one
        autotune.load(folder / "recommended.yaml")
    return fault_of_files(folder)


def _essence(trial: TrialRecord) -> str:
    """A trial without the further runs of it, which come later."""
    return trial.model_copy(update={"results": trial.results[:1]}).model_dump_json()


def _cases(is_quick: bool) -> Sequence[str]:
    drawn = [f"power_{number:03d}" for number in range(1 if is_quick else _CASES)]
    return drawn if is_quick else [*drawn, *(f"{_EVERY}_{number:03d}" for number in range(_PARTS))]


def _run(case: str, folder: Path) -> Figures:
    if shutil.which("strace") is None:
        return {"skipped": "strace is not there"}
    without_drawings()
    kind, number = case[:-4], int(case[-3:])
    seed = number if kind != _EVERY else 0
    command = [sys.executable, "-m", __name__, str(folder / "run"), str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    steps = record_steps(command, folder / "run", folder / "calls", environment)
    whole = {record.number: _essence(record) for record in read_summary(folder / "run").trials}
    moments = _part(steps, number) if kind == _EVERY else _moments(steps, Random(seed))
    losses: Sequence[Loss] = ("all unsynced",) if kind == _EVERY else LOSSES
    cuts, faults = list(product(moments, losses)), list[str]()
    for place, (end, loss) in enumerate(cuts):
        fault = _try(steps[:end], folder / f"cut-{place}", loss, whole, seed)
        if fault is not None:
            faults.append(f"{loss} lost after step {end} ({_say(steps[end - 1])}): {fault}")
    found: Figures = {"steps": len(steps), "tried": len(cuts), "faults": faults}
    return found if not faults else {**found, "fault": faults[0]}


def _try(
    steps: Sequence[Step], folder: Path, loss: Loss, whole: Mapping[int, str], seed: int
) -> str | None:
    left_by_power_cut(steps, folder, loss, Random(len(steps)))
    ended = max((int(step.name) for step in steps if step.kind == "told"), default=0)
    told = dict(
        sorted(whole.items())[:ended]
    )  # numbers are left out where a sample was known already
    try:
        return fault_after_cut(folder, told, seed)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this moment's fault
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _moments(steps: Sequence[Step], random: Random) -> list[int]:
    """Numbers of steps after which the power is cut."""
    boundaries = [end for end in range(1, len(steps) + 1) if steps[end - 1].kind in _BOUNDARIES]
    half = _MOMENTS // 2
    return sorted(
        {
            *random.sample(boundaries, half),
            *random.sample(range(1, len(steps) + 1), _MOMENTS - half),
        }
    )


def _part(steps: Sequence[Step], number: int) -> list[int]:
    """Numbers of all steps of one part of a search; all parts together leave out none."""
    return [end for end in range(1, len(steps) + 1) if end % _PARTS == number]


def _say(step: Step) -> str:
    return f"{step.kind} {step.name} {step.to}".strip()


def _judge(cases: Mapping[str, Figures]) -> Figures:
    tried = sum(case.get("tried", 0) for case in cases.values())
    faults = sum(len(case.get("faults", [])) for case in cases.values())
    kept = None if tried == 0 else faults == 0
    return {
        "cuts": tried,
        "cuts_with_faults": faults,
        "promises": {"no finished trial is lost to a power cut": kept},
    }


POWER_LOSS = Part(
    proves="after a power cut at any moment, the same search goes on, and no trial that had ended is lost or run again",
    cases=_cases,
    run=_run,
    judge=_judge,
    limit_s=900.0,
)
"""What was not synced is dropped, whole or in part."""

if __name__ == "__main__":
    search_in(Path(sys.argv[1]), TellingLauncher(tells=True), int(sys.argv[2]))
