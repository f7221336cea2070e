"""A small real search by the command line in a folder of its own, and what of it can be seen from outside.

Comes in: a folder. Goes out: its processes by their roles, how far it is, and what is wrong with what it has left.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

import psutil

import autotune
from benchmarks import ROOT
from benchmarks.measures.endurance.part import TORCHS_CACHE

__all__ = [
    "ROLES",
    "STAGES",
    "WORKLOAD",
    "HungError",
    "LiveSearch",
    "Role",
    "Stage",
    "ended_trials",
    "fault_of_files",
    "fault_of_folder",
    "fault_of_result",
    "left_of",
    "segments_now",
    "send",
    "start_search",
]

Role = Literal["parent", "server", "rank", "worker", "all"]
ROLES: tuple[Role, ...] = ("parent", "server", "rank", "worker", "all")
Stage = Literal["start", "probe", "baseline", "trials", "repeats", "end"]
STAGES: tuple[Stage, ...] = ("start", "probe", "baseline", "trials", "repeats", "end")

WORKLOAD = """
import time
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2000
    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.full((8,), float(index)), index % 2

def model():
    return torch.nn.Linear(8, 2)

def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs / 1e6, targets)

def dataset():
    return Data()
"""
_CONFIG = """
workload: {model: "work.py:model", dataset: "work.py:dataset", loss: "work.py:loss"}
baseline: {num_workers: 1}
space: {num_workers: [1, 4], micro_batch_size: 32, grad_accum_steps: 1, amp_dtype: float32, prefetch_factor: [2, 4],
        persistent_workers: true, intra_op_threads: null, pin_memory: false, in_order: true}
search: {method: random}
budget: {n_trials: 3, timeout_s: 120}
device: cpu
run_dir: run
"""
TRIALS = 3
_FILES: Mapping[Stage, str] = {
    "probe": "logs/probe*.log",
    "baseline": "logs/trial-000.log",
    "trials": "logs/trial-00[1-9].log",
    "repeats": "logs/trial-*-again.log",
    "end": "summary.json",
}
"""What a stage writes first."""
_SEGMENT = re.compile(r"torch_(\d+)_")
_TICK_S = 0.005
_SOCKETS = "pymp-"
_ENDS_WITHIN_S = 240.0
_GONE_WITHIN_S = 5.0


class HungError(Exception):
    """A search does not go on; the message has what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSearch:
    """A search that runs; its temporary files lie in `temporary`."""

    folder: Path
    process: subprocess.Popen[bytes]
    begun: float
    """By the clock that dates files."""

    @property
    def run(self) -> Path:
        """Its run folder."""
        return self.folder / "run"

    @property
    def temporary(self) -> Path:
        """What TMPDIR is to it."""
        return self.folder / "temporary"

    def processes(self, role: Role) -> list[psutil.Process]:
        """Its living processes in a role; the parent's launcher forks ranks from the server."""
        if self.process.poll() is not None:
            return []
        parent = psutil.Process(self.process.pid)
        servers = [one for one in _children(parent) if _is_worker(one)]
        ranks = [one for server in servers for one in _children(server)]
        workers = [one for rank in ranks for one in _children(rank)]
        everything = [parent, *_children(parent, recursive=True)]
        return {
            "parent": [parent],
            "server": servers,
            "rank": ranks,
            "worker": workers,
            "all": everything,
        }[role]

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until something holds; False where the search ended before.

        Raises:
            HungError: neither came in time.
        """
        begun = monotonic()
        while not condition():
            if self.process.poll() is not None:
                return False
            if monotonic() - begun > _ENDS_WITHIN_S:
                raise HungError(f"the search hangs: {self.said}")
            sleep(_TICK_S)
        return True

    def is_at(self, stage: Stage) -> bool:
        """Whether this process has come to a stage, or beyond it."""
        if stage == "start":
            return True
        stages = [name for name in STAGES[STAGES.index(stage) :] if name in _FILES]
        files = (file for name in stages for file in self.run.glob(_FILES[name]))
        return any(self._has_written(file) for file in files)

    def _has_written(self, file: Path) -> bool:
        with suppress(FileNotFoundError):
            return file.stat().st_mtime >= self.begun
        return False

    def end(self) -> int:
        """Wait for its end; its exit code.

        Raises:
            HungError: it did not come in time.
        """
        self.wait_for(lambda: False)
        return self.process.wait()

    @property
    def said(self) -> str:
        """The end of what it has printed."""
        return (self.folder / "output").read_text(errors="replace")[-600:]


def start_search(
    folder: Path,
    environment: Mapping[str, str] | None = None,
    script: str = "",
    settings: Sequence[str] = (),
) -> LiveSearch:
    """Start the search in a folder, or go on with it; `script` is run in its process before."""
    (folder / "work.py").write_text(WORKLOAD)
    (folder / "tune.yaml").write_text(_CONFIG)
    (folder / "temporary").mkdir(exist_ok=True)
    command = (
        ["-c", f"{script}\nfrom autotune.cli import main\nmain()"] if script else ["-m", "autotune"]
    )
    begun = (folder / "tune.yaml").stat().st_mtime
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *command, "run", "tune.yaml", "--quiet", *settings],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TMPDIR": str(folder / "temporary"),
                "XDG_CACHE_HOME": str(folder / "cache"),
                **(environment or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return LiveSearch(folder=folder, process=process, begun=begun)


def send(processes: Iterable[psutil.Process], number: int) -> list[int]:
    """Send a signal to those that are still there; their pids."""
    reached = []
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
            reached.append(process.pid)
    return reached


def ended_trials(run: Path) -> dict[int, str]:
    """The lines of trials.jsonl that are whole, by their numbers, without further runs, which come later."""
    found = {}
    with suppress(FileNotFoundError):
        for line in (run / "trials.jsonl").read_bytes().split(b"\n")[:-1]:
            trial = json.loads(line)
            del trial["results"][1:]
            found[int(trial["number"])] = json.dumps(trial, sort_keys=True)
    return found


def fault_of_result(search: LiveSearch) -> str | None:
    """What is wrong with what a search has come to; None where all its trials are there, and ended well."""
    trials = [json.loads(line) for line in (search.run / "trials.jsonl").read_text().splitlines()]
    outcomes = [trial["results"][0]["outcome"] for trial in trials]
    if len(outcomes) != TRIALS or not {*outcomes} <= {"ok", "pruned"}:
        return f"there must be {TRIALS} trials that ended well, but there are {outcomes}"
    autotune.load(search.run / "recommended.yaml")
    return None


def left_of(folder: Path, segments: Collection[str]) -> str | None:
    """What of a search in a folder is left 5 s after its parent's end; None where it is gone.

    `segments`: names in /dev/shm before the search.
    """
    begun = monotonic()
    while (running := _running_in(folder)) and monotonic() - begun < _GONE_WITHIN_S:
        sleep(0.05)
    if running:
        return f"processes are left: {running}"
    left = sorted(name for name in segments_now() - {*segments} if _is_of_the_dead(name))
    return f"shared memory is left: {left}" if left else None


def segments_now() -> set[str]:
    """Names in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def _is_torchs_try(path: Path) -> bool:
    """An empty file, by which torch tries whether it may open more, and which its own signal handler makes it forget.

    Source: torch/utils/data/dataloader.py, _try_get_data.
    """
    return path.name.startswith("tmp") and path.is_file() and path.stat().st_size == 0


def _is_of_the_dead(name: str) -> bool:
    """Whether it is torch's, of a process that is gone; others' searches may run beside."""
    known = _SEGMENT.match(name)
    return known is not None and not psutil.pid_exists(int(known[1]))


def fault_of_folder(search: LiveSearch, *, may_leave_sockets: bool = False) -> str | None:
    """What is wrong with the files of a search that has ended; None where nothing is.

    Args:
        search: It has ended.
        may_leave_sockets: Parent and server were killed, which alone know the folder of the loader workers' sockets.
    """
    if fault := fault_of_files(search.run):
        return fault
    unwanted = [name for name in ("scratch", "payload") if (search.run / name).exists()]
    spared = (TORCHS_CACHE, *([_SOCKETS] if may_leave_sockets else []))
    temporary = [
        path.name
        for path in search.temporary.iterdir()
        if not path.name.startswith(spared) and not _is_torchs_try(path)
    ]
    left = [*unwanted, *temporary]
    return f"files are left: {left}" if left else None


def fault_of_files(run: Path) -> str | None:
    """What is wrong with the files of a run folder whose search has ended; None where nothing is."""
    with closing(sqlite3.connect(run / "study.db")) as connection:
        integrity = connection.execute("pragma integrity_check").fetchone()[0]
    if integrity != "ok":
        return f"study.db: {integrity}"
    numbers = [
        json.loads(line)["number"] for line in (run / "trials.jsonl").read_text().splitlines()
    ]
    if len(set(numbers)) != len(numbers):
        return f"trials.jsonl holds a number twice: {numbers}"
    for name in ("summary.json", "environment.json"):
        json.loads((run / name).read_text())
    half = [path.name for path in run.iterdir() if path.suffix[1:].isdecimal()]
    return f"half-written files are left: {half}" if half else None


def _children(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    with suppress(psutil.Error):  # it has ended
        return process.children(recursive=recursive)
    return []


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "autotune.worker" in process.cmdline()
    return False


def _running_in(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_living = process.status() != psutil.STATUS_ZOMBIE
            if is_living and Path(process.cwd()) == folder and process.pid != os.getpid():
                found.append(" ".join(process.cmdline()))
    return found
