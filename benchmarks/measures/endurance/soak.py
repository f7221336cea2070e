"""The soak: many trials in one search, and many searches in one process; nothing that they hold may grow.

The trials are real processes of the real fork server, with windows of 0.2 s. The parent's memory may grow by what a
trial's record takes; all else that it holds is the same after the last trial as after the first quarter of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import autotune
from autotune import SearchResult
from autotune.launch.local.fork_server import ForkServerLauncher
from benchmarks.measures.endurance.parent_notes import Holding, NotingLauncher, columns, holding_now
from benchmarks.measures.endurance.part import Part
from benchmarks.measures.endurance.soak_workload import data, model
from benchmarks.measures.endurance.trend import trend_of
from benchmarks.measures.part_guard import Figures

__all__ = ["SOAK"]

_MOST_KIB = 30.0
"""That a trial may add to the parent's resident memory: its record, once as an object and once as text in Optuna's
study. Its PSS is kept beside, which grows as well where other processes give up pages that they have shared with it."""
_MOST_PAGE_BYTES, _MOST_REPORT_S = 5_000_000, 3.0
_MOST_SLOWER_S = 0.05
"""CPU seconds between two trials that may come on top over a whole search: our own convention."""
_SEARCH_S = 36_000.0
_COUNTS = ("descriptors", "threads", "children", "segments", "temporary")
_QUICK = ("one_search_of_60", "model_of_20", "5_searches")
_ALL = ("one_search_of_2000", "model_of_300", "200_searches")
_SPACE: dict[str, Any] = {
    "micro_batch_size": list(range(1, 129)),
    "num_workers": 0,
    "prefetch_factor": 2,
    "persistent_workers": False,
    "pin_memory": False,
    "grad_accum_steps": list(range(1, 33)),
    "intra_op_threads": 1,
    "amp_dtype": "float32",
    "channels_last": False,
    "compile": False,
    "fused": False,
}
_SMALL = {**_SPACE, "micro_batch_size": [16, 32], "grad_accum_steps": 1}


def _run(case: str, folder: Path) -> Figures:
    temporary = folder / "temporary"
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)  # so that its entries are ours
    count = int("".join(filter(str.isdigit, case)))
    if case.endswith("searches"):
        return _many_searches(count, folder)
    return _one_search(count, folder, "model" if case.startswith("model") else "random")


def _one_search(count: int, folder: Path, method: str) -> Figures:
    run_dir = folder / "run"
    before = holding_now(run_dir)
    with closing(ForkServerLauncher(folder / "server.log", device="cpu")) as server:
        launcher = NotingLauncher(server, run_dir)
        result = _search(run_dir, _SPACE, count, method=method, launcher=launcher, timeout_s=_SEARCH_S)
    after = holding_now(run_dir)
    held = launcher.held
    found = _told(held, len(result.trials)) | {"left": _left(before, after)}
    del result
    found |= _report(run_dir) | {"left_names": _temporary_names()}
    return found | _fault_of(found)


def _many_searches(count: int, folder: Path) -> Figures:
    held, before = list[Holding](), holding_now(folder)
    for number in range(count):
        run_dir, begun = folder / f"run-{number}", perf_counter()
        _search(run_dir, _SMALL, 2, method="random", timeout_s=8.0)
        held.append(holding_now(run_dir, apart_s=perf_counter() - begun))
    found = _told(held, 2 * count) | {"left": _left(before, held[-1]), "left_names": _temporary_names()}
    return found | _fault_of(found)


def _search(run_dir: Path, space: Mapping[str, Any], count: int, **options: Any) -> SearchResult:
    return autotune.search(
        model,
        data,
        baseline={"micro_batch_size": 16, "intra_op_threads": 1},
        space=space,
        n_trials=count,
        device="cpu",
        run_dir=run_dir,
        progress=False,
        **options,
    )


def _told(held: Sequence[Holding], trials: int) -> Figures:
    """Trends of all that was noted, by name, and the first and last notes."""
    noted = columns(held)
    return {
        "trials": trials,
        "notes": len(held),
        "trends": {name: trend_of(values).figures() for name, values in noted.items()},
        "first": {name: values[0] for name, values in noted.items()},
        "last": {name: values[-1] for name, values in noted.items()},
        "trials_bytes_each": noted["trials_bytes"][-1] / max(1, trials),
    }


def _left(before: Holding, after: Holding) -> Figures:
    """What is there after the end that was not there before, but for memory and what imports keep open."""
    return {name: getattr(after, name) - getattr(before, name) for name in ("children", "segments", "temporary")}


def _temporary_names() -> list[str]:
    """Of a few entries of the folder for temporary files, so that it can be seen whose they are."""
    return sorted(path.name for path in Path(tempfile.gettempdir()).iterdir())[:10]


def _report(run_dir: Path) -> Figures:
    """The report of a run folder, made anew by the command line: how long, and how large the page is."""
    begun, before = perf_counter(), os.times()
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "report", str(run_dir)], capture_output=True, text=True, check=False
    )
    after = os.times()
    return {
        "report_exit": done.returncode,
        "report_s": perf_counter() - begun,
        "report_cpu_s": after.children_user + after.children_system - before.children_user - before.children_system,
        "page_bytes": (run_dir / "report.html").stat().st_size,
    }


def _fault_of(found: Figures) -> Figures:
    trends, is_long = found["trends"], found["notes"] >= 100
    faults = [f"{name} grew by {trends[name]['grown']:g}" for name in _COUNTS if trends[name]["grown"] > 0]
    faults += [f"{count:g} {name} are left" for name, count in found["left"].items() if count > 0]
    searches = 2 if found["notes"] * 2 == found["trials"] else 1
    if is_long and trends["rss_kib"]["high"] > searches * _MOST_KIB:
        faults.append(f"the parent grows by up to {trends['pss_kib']['high']:.0f} KiB a trial")
    if is_long and trends["apart_cpu_s"]["low"] * found["notes"] > _MOST_SLOWER_S:
        faults.append(f"the time between trials grows by {trends['apart_cpu_s']['slope'] * 1e6:.0f} us a trial")
    if found.get("page_bytes", 0) > _MOST_PAGE_BYTES:
        faults.append(f"report.html has {found['page_bytes']:,} bytes")
    if found.get("report_exit", 0):
        faults.append(f"autotune report ended with {found['report_exit']}")
    return {"fault": "; ".join(faults)} if faults else {}


def _judge(cases: Mapping[str, Figures]) -> Figures:
    searches = [found for found in cases.values() if "report_s" in found]
    long = [found for found in cases.values() if found["notes"] >= 100]
    most_kib = {name: found["trends"]["rss_kib"]["high"] for name, found in cases.items()}
    quickest = None if not searches else all(found["report_s"] <= _MOST_REPORT_S for found in searches)
    return {
        "kib_a_note": most_kib,
        "promises": {
            "nothing_is_left": all(not any(found["left"].values()) for found in cases.values()) if cases else None,
            "memory_is_constant": all("grows by up to" not in found.get("fault", "") for found in long)
            if long
            else None,
            "time_is_constant": all("between trials" not in found.get("fault", "") for found in long) if long else None,
            "the_report_opens": quickest,
            "the_page_is_small": all(found["page_bytes"] <= _MOST_PAGE_BYTES for found in searches)
            if searches
            else None,
        },
    }


SOAK = Part(
    proves="after thousands of trials a search holds no more than after the first hundreds, and its report opens",
    cases=lambda is_quick: _QUICK if is_quick else _ALL,
    run=_run,
    judge=_judge,
    limit_s=_SEARCH_S,
)
"""2,000 trials of one search, 300 of a search that a model leads, and 200 searches of two trials."""
