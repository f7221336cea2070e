"""What the product costs beside training: starting a trial, the search around its windows, the parent's memory.

trial_start  from a trial's end through tell, ask and launch to the next trial's first batch, on a workload that builds
             and loads next to nothing; with the fork server and with a fresh interpreter. At most 0.25 s with the fork
             server, less the workload's own build. And from the report's being written to the launcher's return.
share        of a whole search's wall time, how much lies inside timed windows (configs/sleeping_vectors.yaml and
             configs/digits.yaml), and what is left behind afterwards: processes, shared memory.
memory       the parent's memory over 200 trials of a fake workload (autotune.testing.FakeLauncher): anonymous pages,
             and USS, which also moves as other programs start and stop sharing libraries with this one.

Some six minutes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

import autotune
from autotune import SearchResult
from autotune.api import search as api
from autotune.files.plan_file import read_plan
from autotune.launch.launcher import Exit, Launch, Launcher
from autotune.launch.local import LocalLauncher
from autotune.testing import FakeLauncher
from benchmarks import ROOT
from benchmarks.cases.cpu import nothing_to_do
from benchmarks.measures.recording import (
    describe_machine,
    make_parser,
    print_table,
    say,
    start_recording,
)
from benchmarks.yardsticks.product_run import (
    LaunchTimes,
    TimedLauncher,
    only,
    search,
    search_figures,
    window_s,
)

__all__ = ["measure_trial_start"]

_TARGET_S = 0.25
_TRIALS = 12  # of those after the baseline, whose start holds the study's
_WINDOW_S = 1.0  # of a trial whose start alone counts
_SLOWER_BATCHES = range(1, 17)  # all slower than the baseline's
_CONFIGS = ROOT / "configs"
_SEARCHES = ("sleeping_vectors", "digits")
_MEMORY_TRIALS = 200
_SETTLED_AFTER = 50  # trials in which imports and caches fill
_GONE_WITHIN_S = 3.0
_MARK = "AUTOTUNE_BENCHMARK"
_SHARED_MEMORY = Path("/dev/shm")


def main() -> None:
    parser = make_parser(
        __doc__ or "", "three trials a launcher, searches of 15 s, and 40 fake trials"
    )
    arguments = parser.parse_args()
    recording = start_recording("overhead", arguments, describe_machine("cpu"))
    recording.add("trial_start", _measure_starts(trials=3 if arguments.quick else _TRIALS))
    recording.add("share", _measure_shares(timeout_s=15.0 if arguments.quick else None))
    recording.add("memory", _measure_memory(40 if arguments.quick else _MEMORY_TRIALS))
    _print_starts(recording.results["trial_start"])
    _print_shares(recording.results["share"])
    _print_memory(recording.results["memory"])
    print(f"\n{recording.path}")


def measure_trial_start(
    make_launcher: Callable[[Path], Launcher], *, trials: int, device: str
) -> dict[str, Any]:
    """Times of so many trials' starts and ends; `make_launcher` gets a folder for logs."""
    with TemporaryDirectory(prefix="autotune-benchmark-") as folder:
        notes = Path(folder) / "notes"
        launcher = TimedLauncher(make_launcher(Path(folder)), notes, _WINDOW_S)
        case = nothing_to_do(notes)
        baseline_batch = case.settings["micro_batch_size"]
        space = only(case.settings, micro_batch_size=[baseline_batch, *_SLOWER_BATCHES])
        try:
            result = search(
                case,
                space=space,
                n_trials=trials + 1,
                device=device,
                launcher=launcher,
                method="grid",
            )  # every trial to its end, and nothing else launched
        finally:
            launcher.close()
    return _start_figures(result, launcher.launches)


def _start_figures(result: SearchResult, launches: list[LaunchTimes]) -> dict[str, Any]:
    """The trials after the baseline, each with the launch before it."""
    builds = {
        f"trial-{one.number:03d}": one.measurement.build_s
        for one in result.trials
        if one.measurement
    }
    trials: list[dict[str, Any]] = []
    for before, launch in pairwise(launches):
        if (
            launch.name not in builds
            or launch.name == "trial-000"
            or "first_batch" not in launch.noted
        ):
            continue
        between_s = launch.called_s - before.returned_s
        start_s = launch.noted["first_batch"] - launch.called_s
        trials.append(
            {
                "name": launch.name,
                "tell_and_ask_s": between_s,
                "launch_to_first_batch_s": start_s,
                "build_s": builds[launch.name],
                "overhead_s": between_s + start_s - builds[launch.name],
                "first_batch_to_first_step_s": launch.noted["first_step"]
                - launch.noted["first_batch"],
                "report_to_return_s": launch.after_report_s,
                "launch_s": launch.returned_s - launch.called_s,
            }
        )
    names = [name for name in (trials[0] if trials else {}) if name != "name"]
    medians = {name: median(trial[name] for trial in trials) for name in names}
    return {"medians": medians, "trials": trials}


def _measure_starts(trials: int) -> dict[str, Any]:
    launchers: dict[str, Callable[[Path], Launcher]] = {
        "fork server": lambda folder: LocalLauncher(folder / "server.log"),
        "fresh interpreter": lambda _: LocalLauncher(None),
    }
    figures = {}
    for name, make_launcher in launchers.items():
        say(f"trial start: {name}")
        figures[name] = measure_trial_start(make_launcher, trials=trials, device="cpu")
    return figures


def _measure_shares(timeout_s: float | None) -> dict[str, Any]:
    figures = {}
    for name in _SEARCHES:
        say(f"share of the windows: configs/{name}.yaml")
        overrides = [] if timeout_s is None else [f"budget.timeout_s={timeout_s}"]
        plan = read_plan(_CONFIGS / f"{name}.yaml", overrides)
        with TemporaryDirectory(prefix="autotune-benchmark-") as folder, _watched() as left:
            begun = time.perf_counter()
            result = api.run_plan(replace(plan, run_dir=Path(folder) / "run"), progress=False)
            wall_s = time.perf_counter() - begun
        figures[name] = {
            **_share(result, wall_s),
            "left_behind": left,
            "search": search_figures(result),
        }
    return figures


def _share(result: SearchResult, wall_s: float) -> dict[str, Any]:
    """Seconds of a search's wall time by phase, repeats included."""
    runs = [run for one in result.trials for run in one.runs]
    again = [run for one in result.trials for run in one.repeats if run.measurement is not None]
    windows_s = sum(window_s(run) for run in runs)
    warm_up_s = sum(run.window.warm_up_s for run in runs)
    startup_s = sum(run.startup_s for run in runs)
    return {
        "wall_s": wall_s,
        "trials": len(result.trials),
        "repeats": len(again),
        "windows_s": windows_s,
        "windows_share": windows_s / wall_s,
        "warm_up_s": warm_up_s,
        "startup_s": startup_s,
        "rest_s": wall_s - windows_s - warm_up_s - startup_s,
    }


@contextmanager
def _watched() -> Iterator[dict[str, list[str]]]:
    """What the block leaves behind: processes that it has started, and shared-memory segments that were not there."""
    left: dict[str, list[str]] = {}
    mark, before = uuid.uuid4().hex, _segments()
    os.environ[_MARK] = mark
    try:
        yield left
    finally:
        del os.environ[_MARK]
    left["processes"] = [
        f"{process.pid} {process.name()}"
        for process in psutil.process_iter()
        if _environment_of(process) == mark
    ]
    left["shared_memory"] = sorted(_lasting(before))


def _lasting(before: set[str]) -> set[str]:
    """Segments that were not there before and stay; those of other programs come and go."""
    new = _segments() - before
    ends_at = time.monotonic() + _GONE_WITHIN_S
    while new and time.monotonic() < ends_at:
        time.sleep(0.1)
        new &= _segments()
    return new


def _environment_of(process: psutil.Process) -> str | None:
    with suppress(psutil.Error, OSError):
        return process.environ().get(_MARK)
    return None


def _segments() -> set[str]:
    """Names in /dev/shm that are ours; other users' come and go."""
    found = set()
    for path in _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.is_dir() else ():
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                found.add(path.name)
    return found


def _measure_memory(trials: int) -> dict[str, Any]:
    """In a fresh process, whose memory holds nothing of the other parts."""
    say(f"memory: {trials} fake trials")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run_fake_trials, trials).result()


def _run_fake_trials(trials: int) -> dict[str, Any]:
    launcher = _WeighingLauncher()
    with TemporaryDirectory(prefix="autotune-benchmark-") as folder:
        begun = time.perf_counter()
        result = autotune.search(
            _no_model,
            _no_model,
            launcher=launcher,
            n_trials=trials,
            device="cpu",
            run_dir=Path(folder) / "run",
            progress=False,
            method="tpe",
        )
        wall_s = time.perf_counter() - begun
    settled = min(_SETTLED_AFTER, trials // 2)
    weights = launcher.anonymous_bytes
    return {
        "trials": len(result.trials),
        "wall_s": wall_s,
        "settled_after": settled,
        "growth_bytes": weights[trials - 1] - weights[settled],
        "growth_bytes_per_trial": (weights[trials - 1] - weights[settled]) / (trials - 1 - settled),
        "anonymous_bytes": weights,
        "uss_bytes": launcher.uss_bytes,
    }


@dataclass(slots=True)
class _WeighingLauncher:
    """A fake launcher that notes the memory of its own process before each trial."""

    inner: FakeLauncher = field(default_factory=FakeLauncher)
    anonymous_bytes: list[int] = field(default_factory=list)
    uss_bytes: list[int] = field(default_factory=list)

    def launch(self, launch: Launch) -> Exit:
        if launch.log.stem.startswith("trial-"):
            gc.collect()
            self.anonymous_bytes.append(_anonymous_bytes())
            self.uss_bytes.append(int(psutil.Process().memory_full_info().uss))
        return self.inner.launch(launch)

    def close(self) -> None:
        self.inner.close()


def _anonymous_bytes() -> int:
    """Resident pages of this process that belong to no file: RssAnon of man 5 proc; 0 where the kernel has none."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _no_model() -> None:
    """Stands for a model and a dataset, which a fake launcher never builds."""


def _print_starts(figures: dict[str, Any]) -> None:
    keys = (
        "overhead_s",
        "tell_and_ask_s",
        "launch_to_first_batch_s",
        "build_s",
        "report_to_return_s",
    )
    rows = [
        [name, str(len(part["trials"])), *(f"{part['medians'][key]:.3f}" for key in keys)]
        for name, part in figures.items()
        if part["trials"]
    ]
    head = ["launcher", "trials", "overhead", "tell+ask", "1st batch", "build", "after end"]
    print_table(
        f"Start of a trial, medians in seconds; overhead is to be {_TARGET_S} at most.", head, rows
    )


def _print_shares(figures: dict[str, Any]) -> None:
    keys = ("wall_s", "windows_s", "warm_up_s", "startup_s", "rest_s")
    rows = [
        [
            name,
            *(f"{part[key]:.1f}" for key in keys),
            f"{part['windows_share']:.0%}",
            _left(part["left_behind"]),
        ]
        for name, part in figures.items()
    ]
    head = ["search", "wall", "windows", "warm-up", "start-up", "rest", "share", "left"]
    print_table(
        "Where a search's seconds go, confirmations included; left: processes and segments.",
        head,
        rows,
    )


def _left(left: dict[str, list[str]]) -> str:
    return str(sum(len(what) for what in left.values()))


def _print_memory(figures: dict[str, Any]) -> None:
    weights = figures["anonymous_bytes"]
    first, last = weights[figures["settled_after"]], weights[figures["trials"] - 1]
    row = [
        str(figures["trials"]),
        f"{first / 2**20:.1f}",
        f"{last / 2**20:.1f}",
        f"{figures['growth_bytes_per_trial'] / 2**10:.1f}",
        f"{figures['wall_s']:.1f}",
    ]
    head = [
        "fake trials",
        f"MiB at {figures['settled_after']}",
        "MiB at the end",
        "KiB a trial",
        "seconds",
    ]
    print_table("The parent's own memory (anonymous pages).", head, [row])


if __name__ == "__main__":
    main()
