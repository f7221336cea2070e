"""What a searching process holds and leaves, noted between trials; and a launcher that notes it and shortens windows.

Linux only: it reads /proc. Segments count where their name has the number of a process that is gone.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, process_time

from autotune.launch.launcher import Exit, Launch, notes_of
from autotune.launch.local import LocalLauncher
from autotune.note import Note
from benchmarks.measures.endurance.part import TORCHS_CACHE
from benchmarks.measures.endurance.short_windows import shorten

__all__ = ["Holding", "NotingLauncher", "columns", "holding_now"]

_OF_A_PROCESS = re.compile(r"_(\d+)_")  # torch_PID_..., as torch names its segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What this process holds at one moment."""

    pss_kib: float
    rss_kib: float
    descriptors: int
    threads: int
    children: int
    """Processes that it has started and not reaped."""
    segments: int
    """In /dev/shm, of processes that are gone."""
    temporary: int
    """Entries of the folder for temporary files, but for torch's own cache."""
    study_bytes: int
    """The study's file with its log."""
    trials_bytes: int
    """trials.jsonl."""
    apart_s: float = 0.0
    """Seconds from the end of the last trial to the start of this one."""
    apart_cpu_s: float = 0.0
    """CPU time that this process took for it."""
    server_rss_kib: float = 0.0
    """Of the server that forks trials, which lives as long; 0 where there is none."""
    server_descriptors: int = 0
    server_threads: int = 0


def holding_now(
    run_dir: Path, *, apart_s: float = 0.0, apart_cpu_s: float = 0.0, server: int | None = None
) -> Holding:
    """Read it; the run folder need not exist."""
    memory, of_server = _memory_kib("self"), {} if server is None else _memory_kib(f"{server}")
    return Holding(
        pss_kib=memory.get("Pss", 0.0),
        rss_kib=memory.get("Rss", 0.0),
        descriptors=_entries("/proc/self/fd") - 1,  # that of the listing itself
        threads=_entries("/proc/self/task"),
        children=sum(
            len(_text(task / "children").split()) for task in Path("/proc/self/task").iterdir()
        ),
        segments=sum(_is_left(path.name) for path in Path("/dev/shm").iterdir()),
        temporary=sum(
            not path.name.startswith(TORCHS_CACHE) for path in Path(tempfile.gettempdir()).iterdir()
        ),
        study_bytes=sum(path.stat().st_size for path in run_dir.glob("study.db*")),
        trials_bytes=sum(path.stat().st_size for path in run_dir.glob("trials.jsonl")),
        apart_s=apart_s,
        apart_cpu_s=apart_cpu_s,
        server_rss_kib=of_server.get("Rss", 0.0),
        server_descriptors=0 if server is None else _entries(f"/proc/{server}/fd"),
        server_threads=0 if server is None else _entries(f"/proc/{server}/task"),
    )


@dataclass(slots=True)
class NotingLauncher:
    """Shortens trials' windows, leaves out what would follow them, and notes what this process holds before each."""

    inner: LocalLauncher
    run_dir: Path
    held: list[Holding] = field(default_factory=list)
    _ended: tuple[float, float] | None = None

    def launch(self, launch: Launch) -> Exit:
        """Launch what is left of the job; the time of noting counts for nobody."""
        now, cpu = monotonic(), process_time()
        if self._ended is not None and launch.log.stem.startswith("trial-"):
            since_s, since_cpu_s = now - self._ended[0], cpu - self._ended[1]
            server = self.inner._server  # noqa: SLF001 - no public way to its number
            pid = None if server is None else server.process.pid
            self.held.append(
                holding_now(self.run_dir, apart_s=since_s, apart_cpu_s=since_cpu_s, server=pid)
            )
        shorten(launch)
        ended = self.inner.launch(launch)
        self._ended = monotonic(), process_time()
        return ended

    @property
    def notes(self) -> tuple[Note, ...]:
        """The other one's."""
        return notes_of(self.inner)

    def close(self) -> None:
        """Close the other one."""
        self.inner.close()


def columns(held: Sequence[Holding]) -> dict[str, list[float]]:
    """What was noted, by the name of the figure."""
    rows = [asdict(one) for one in held]
    return {name: [float(row[name]) for row in rows] for name in (rows[0] if rows else ())}


def _memory_kib(process: str) -> dict[str, float]:
    lines = (line.split() for line in _text(Path("/proc", process, "smaps_rollup")).splitlines())
    return {line[0].rstrip(":"): float(line[1]) for line in lines if line[-1] == "kB"}


def _entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def _is_left(name: str) -> bool:
    known = _OF_A_PROCESS.search(name)
    return known is not None and not Path("/proc", known[1]).exists()


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""
