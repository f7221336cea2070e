"""Name a trial's files; write files whole or not at all.

The one message for a place that can't be written stands here as well.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import TypeVar

import psutil
from pydantic import BaseModel

from autotune.errors import RunFolderError

__all__ = [
    "TrialFolder",
    "disk_error",
    "read_model",
    "read_some",
    "remove_unfinished",
    "sync_folder",
    "write_atomic",
    "write_model",
]

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """The names of the files which the parent and a trial's ranks exchange; only this class knows them."""

    path: Path

    @property
    def job(self) -> Path:
        """What the ranks are to do."""
        return self.path / "job.json"

    @property
    def report(self) -> Path:
        """What rank 0 answers."""
        return self.path / "report.json"

    @property
    def blocks(self) -> Path:
        """Where rank 0 writes each block of its window as soon as it has ended, a line each."""
        return self.path / "blocks.jsonl"

    @property
    def rendezvous(self) -> Path:
        """Where the ranks of a group meet: the file of torch.distributed's FileStore."""
        return self.path / "rendezvous"

    @property
    def sockets(self) -> Path:
        """A link to where the trial's processes put multiprocessing's sockets; their paths must be short."""
        return self.path / "sockets"

    @property
    def overlay(self) -> Path:
        """Where a script's writes to files that existed before go."""
        return self.path / "overlay"

    @property
    def done(self) -> Path:
        """There once a script has been measured: whatever of it still runs is to be ended."""
        return self.path / "done"

    @property
    def begun(self) -> Path:
        """There once the process of a series has begun."""
        return self.path / "begun"

    @property
    def next(self) -> Path:
        """Of a series: names the folder of the job to do; there until that is done."""
        return self.path / "next"

    @property
    def enough(self) -> Path:
        """There once a trial that shares a process is to be ended early: its process lives on."""
        return self.path / "enough"

    def report_of(self, rank: int) -> Path:
        """What a rank answers."""
        return self.report if rank == 0 else self.path / f"report-{rank}.json"

    def stack_of(self, rank: int) -> Path:
        """The stack of a rank of a group shortly before its end, as faulthandler writes it."""
        return self.path / f"stack-{rank}.txt"

    def has_stacks(self) -> bool:
        """Whether a rank of a group has written its stack."""
        with suppress(OSError):  # the user's code may remove it
            return any(path.stat().st_size > 0 for path in self.path.glob("stack-*.txt"))
        return False


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, readable by its owner alone; once this returns, a power cut leaves it.

    Raises:
        RunFolderError: the folder can't be written or its disk is full.
    """
    _replace(path, data)
    sync_folder(path.parent)


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.unlink(missing_ok=True)  # of a process that was killed; or a link that leads elsewhere
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def sync_folder(path: Path) -> None:
    """Wait until the names of a folder's files are on the disk, where the system can be asked for that.

    Source: fsync(2): that of a file does not cover the entry in its folder.
    """
    with suppress(OSError):  # some network file systems refuse it for a folder; Windows does not open one
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove files that `write_atomic` was writing in a folder when its process was killed."""
    for beside in folder.glob(".?*.*"):
        number = beside.suffix[1:]
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            with suppress(OSError):  # another call has removed it
                beside.unlink()


def write_model(path: Path, model: BaseModel) -> None:
    """Write a model as JSON, whole or not at all; the folder is not waited for, since a trial's goes with it."""
    _replace(path, model.model_dump_json().encode())


def read_model(path: Path, model_type: type[Model]) -> Model:
    """Read what `write_model` wrote.

    Raises:
        OSError, pydantic.ValidationError: the file is missing, or not of this kind and version.
    """
    return model_type.model_validate_json(path.read_bytes())


def read_some(path: Path, most_bytes: int, longest_wait_s: float) -> bytes | None:
    """The first bytes of what a user names, a file or a pipe such as a shell's <(...); None: nothing came any more.

    Raises:
        OSError, ValueError: it can't be read, or is no path.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor
        taken = b""
        while len(taken) < most_bytes:
            if not select([file], [], [], longest_wait_s)[0]:
                return None
            chunk = file.read(most_bytes - len(taken))
            if not chunk:
                break
            taken += chunk
        return taken


def disk_error(path: Path, error: OSError) -> RunFolderError:
    """The error for a file or folder that autotune must write but can't; the system may name one below it."""
    if isinstance(error.filename, str) and error.filename2 is None:
        path = Path(error.filename)
    if path.is_symlink():
        return RunFolderError(
            f"autotune follows no link in its run folder, but {path} is one; move it away, or name another folder by "
            "run_dir"
        )
    reason = error.strerror or error
    return RunFolderError(
        f"autotune must be able to write to its run folder, but {path} can't be written ({reason}). "
        "Free space there, or name another folder by run_dir (a search) or TMPDIR (anything else)."
    )
