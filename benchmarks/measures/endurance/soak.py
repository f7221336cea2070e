"""The soak: many trials in one search, and many searches in one process; nothing that they hold may grow.

The trials are real processes of the real fork server, with windows of 0.2 s. The parent's memory may grow by what a
trial's record takes; all else that it holds is the same after the last trial as after the first quarter of them.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import autotune
from autotune import SearchResult
from autotune.launch.local import LocalLauncher
from autotune.records.trial import TrialRecord
from benchmarks.measures.endurance.parent_notes import Holding, NotingLauncher, columns, holding_now
from benchmarks.measures.endurance.part import Part
from benchmarks.measures.endurance.short_windows import shorten_all
from benchmarks.measures.endurance.soak_workload import data, model
from benchmarks.measures.endurance.trend import trend_of
from benchmarks.measures.part_guard import Figures

__all__ = ["SOAK"]

_MOST_KIB = 30.0
"""That a trial may add to the parent's resident memory: its record, once as an object and once as text in Optuna's
study. Its PSS is kept beside, which grows as well where other processes give up pages that they have shared with it."""
_MOST_SLOWER_S, _MOST_SLOWER = 0.05, 0.1
"""CPU seconds between two trials, or their share where a whole search lies between two notes, that may come on top
over all of them: our own conventions."""
_SEARCH_S = 36_000.0
_LONG = 100
"""Notes from which on a trend says something."""
_APART = 0.5
"""Share of the notes between the two stretches whose medians tell how much has grown (trend.py)."""
_FEW = 2
_COUNTS = (
    *("descriptors", "threads", "children", "segments", "temporary"),
    *("server_descriptors", "server_threads"),
)
_MOST_STUDY_BYTES = 20_000
"""Of the study, a trial."""
_QUICK = ("one_search_of_60", "model_of_20", "5_searches")
_ALL = ("one_search_of_2000", "model_of_300", "200_searches")
_SPACE: dict[
    str, Any
] = {  # far more combinations than trials: a sample that was measured before is answered at once
    "micro_batch_size": list(range(1, 257)),
    "num_workers": 0,
    "prefetch_factor": 2,
    "persistent_workers": False,
    "pin_memory": False,
    "grad_accum_steps": list(range(1, 33)),
    "intra_op_threads": [1, 2],
    "amp_dtype": "float32",
    "channels_last": False,
    "compile": False,
    "fused": [False, True],
}
_FOR_A_MODEL = {
    **_SPACE,
    "micro_batch_size": list(range(1, 129)),
    "intra_op_threads": 1,
    "fused": False,
}
"""A model forecasts each combination from each trial, each time: what that takes grows with both."""
_SMALL = {
    **_SPACE,
    "micro_batch_size": [16, 32],
    "grad_accum_steps": 1,
    "intra_op_threads": 1,
    "fused": False,
}


def _run(case: str, folder: Path) -> Figures:
    temporary = folder / "temporary"
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)  # so that its entries are ours
    count = int("".join(filter(str.isdigit, case)))
    if case.endswith("searches"):
        return _many_searches(count, folder)
    if case.startswith("model"):
        return _one_search(count, folder, "model", _FOR_A_MODEL)
    return _one_search(count, folder, "random", _SPACE)


def _one_search(count: int, folder: Path, method: str, space: Mapping[str, Any]) -> Figures:
    run_dir = folder / "run"
    before = holding_now(run_dir)
    with closing(LocalLauncher(folder / "server.log", device="cpu")) as server:
        launcher = NotingLauncher(server, run_dir)
        result = _search(
            run_dir, space, count, method=method, launcher=launcher, timeout_s=_SEARCH_S
        )
    after = holding_now(run_dir)
    held = launcher.held
    found = _told(held, count, result.trials) | {"method": method, "left": _left(before, after)}
    del result
    found |= {"left_names": _temporary_names()}
    return found | _fault_of(found)


def _many_searches(count: int, folder: Path) -> Figures:
    shorten_all()
    held, before, trials = list[Holding](), holding_now(folder), list[TrialRecord]()
    for number in range(count):
        run_dir, begun, cpu = folder / f"run-{number}", perf_counter(), process_time()
        trials += _search(run_dir, _SMALL, _FEW, method="random").trials
        held.append(
            holding_now(run_dir, apart_s=perf_counter() - begun, apart_cpu_s=process_time() - cpu)
        )
    found = _told(held, _FEW * count, trials) | {
        "left": _left(before, held[-1]),
        "left_names": _temporary_names(),
    }
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


def _told(held: Sequence[Holding], wanted: int, trials: Sequence[TrialRecord]) -> Figures:
    """How the trials ended; trends of all that was noted, by name, and the first and last notes."""
    noted = columns(held)
    return {
        "wanted": wanted,
        "trials": len(trials),
        "outcomes": dict(Counter(trial.outcome for trial in trials)),
        "notes": len(held),
        "trends": {name: trend_of(values).figures() for name, values in noted.items()},
        "first": {name: values[0] for name, values in noted.items()},
        "last": {name: values[-1] for name, values in noted.items()},
        "trials_bytes_each": noted["trials_bytes"][-1] / max(1, len(trials)),
    }


def _left(before: Holding, after: Holding) -> Figures:
    """What is there after the end that was not there before, but for memory and what imports keep open."""
    return {
        name: getattr(after, name) - getattr(before, name)
        for name in ("children", "segments", "temporary")
    }


def _temporary_names() -> list[str]:
    """Of a few entries of the folder for temporary files, so that it can be seen whose they are."""
    return sorted(path.name for path in Path(tempfile.gettempdir()).iterdir())[:10]


def _fault_of(found: Figures) -> Figures:
    faults = [fault for each in _PROMISES.values() for fault in each(found)]
    return {"fault": "; ".join(faults)} if faults else {}


def _of_trials(found: Figures) -> Iterator[str]:
    if found["trials"] < found["wanted"] or {*found["outcomes"]} - {"ok", "pruned"}:
        yield f"{found['wanted']} trials must end well, but {found['outcomes']} did"


def _of_counts(found: Figures) -> Iterator[str]:
    trends = found["trends"]
    yield from (
        f"{name} grew by {trends[name]['grown']:g}" for name in _COUNTS if trends[name]["grown"] > 0
    )
    yield from (f"{count:g} {name} are left" for name, count in found["left"].items() if count > 0)


def _of_memory(found: Figures) -> Iterator[str]:
    most_kib = _MOST_KIB * found["trials"] / found["notes"]
    for who, name in (("parent", "rss_kib"), ("server", "server_rss_kib")):
        if _is_long(found) and (most := _grows_kib(found, name)) > most_kib:
            yield f"the {who} grows by up to {most:.0f} KiB from note to note"
    if (study := found["last"]["study_bytes"]) > _MOST_STUDY_BYTES * found["trials"]:
        yield f"the study has {study:,} bytes"


def _grows_kib(found: Figures, name: str) -> float:
    """By how much memory grows from note to note, at the most; of a model, whose arrays come and go, all in all."""
    trend = found["trends"][name]
    if found.get("method") == "model":
        return float(trend["grown"] / (_APART * found["notes"]))
    return float(trend["high"])


def _of_time(found: Figures) -> Iterator[str]:
    apart = found["trends"]["apart_cpu_s"]
    most_s = max(_MOST_SLOWER_S, _MOST_SLOWER * found["last"]["apart_cpu_s"])
    if (
        found.get("method") != "model"
        and _is_long(found)
        and apart["high"] * found["notes"] > most_s
    ):
        yield f"the time between trials grows by {apart['slope'] * 1e6:.0f} us a trial"


def _is_long(found: Figures) -> bool:
    return int(found["notes"]) >= _LONG


_PROMISES: Mapping[str, Callable[[Figures], Iterator[str]]] = {
    "all trials end well": _of_trials,
    "nothing is left, and nothing but memory grows": _of_counts,
    "memory grows by no more than a trial's record": _of_memory,
    "the time between trials is constant": _of_time,
}


def _judge(cases: Mapping[str, Figures]) -> Figures:
    long = [found for found in cases.values() if _is_long(found)]
    kept = {
        name: not any(fault for found in long for fault in each(found))
        for name, each in _PROMISES.items()
    }
    return {
        "kib_a_note": {name: found["trends"]["rss_kib"]["high"] for name, found in cases.items()},
        "promises": kept if long else dict.fromkeys(kept),
    }


SOAK = Part(
    proves="after thousands of trials a search holds no more but its records",
    cases=lambda is_quick: _QUICK if is_quick else _ALL,
    run=_run,
    judge=_judge,
    limit_s=_SEARCH_S,
)
"""2,000 trials of one search, 300 of a search that a model leads, and 200 searches of two trials."""
