"""The run folder: its file names, its lock, and what is written there.

Comes in: a path, the records and models of a search. Goes out: a RunFolder that is locked while a search works in it,
and the summary of a finished one. Only the user may read what lies there (0700, files 0600).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from pydantic import ValidationError

from autotune.errors import ConfigError
from autotune.protocol.disk import disk_error, remove_unfinished, sync_folder, write_atomic
from autotune.protocol.private_folder import make_private, may_be_swapped, refuse_links, refuse_unfit
from autotune.protocol.run_lock import held_lock
from autotune.records.diagnosis import Curves
from autotune.records.run_summary import RunSummary
from autotune.records.trial import TrialRecord

__all__ = ["RunFolder", "new_run_dir", "open_run_folder", "read_summary"]


class RunFolder:
    """Names every file of a run. Made by `open_run_folder`, which holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study = path / "study.db"
        """An ordinary Optuna SQLite study."""
        self.trials = path / "trials.jsonl"
        """One TrialRecord a line."""
        self.recommended = path / "recommended.yaml"
        """The configuration to use."""
        self.patch = path / "recommended.patch"
        """The same as a change of the script to read, where its own call is literal."""
        self.report = path / "report.md"
        """The report in Markdown."""
        self.page = path / "report.html"
        """The report with its plots, for a browser."""
        self.environment = path / "environment.json"
        """The machine and the versions."""
        self.summary = path / "summary.json"
        """Everything that a report is made from, but for the trials."""
        self.curves = path / "curves.json"
        """What measuring loader and device alone has shown, for a search that goes on."""
        self.logs = path / "logs"
        """What trials have printed."""
        self.payload = path / "payload"
        """The workload as trials read it; gone when the search is over."""
        self.scratch = path / "scratch"
        """Trials' own folders; gone when the search is over."""
        self.lock = path / ".lock"
        """Held by the one search that works here."""
        self.holder = path / ".holder"
        """By which process, while it is held."""

    def keep_temporary_in(self, folder: Path) -> None:
        """Let what only trials need lie in another folder."""
        self.payload, self.scratch = folder / "payload", folder / "scratch"

    def read_curves(self) -> Curves | None:
        """What an earlier call measured of loader and device alone; None where it did not."""
        try:
            return Curves.model_validate_json(self.curves.read_bytes())
        except (OSError, ValidationError):  # not there, or of another version: then it is measured again
            return None

    def append_trial(self, record: TrialRecord) -> None:
        """Add a trial's record as a line, which outlasts a power cut; the study holds the record as well."""
        try:
            with open(os.open(self.trials, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:  # noqa: PTH123 - a descriptor
                file.write(f"{record.model_dump_json()}\n".encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise disk_error(self.path, error) from error

    def write_trials(self, records: Sequence[TrialRecord]) -> None:
        """Have trials.jsonl hold these records and no other, in this order: those of the study, which decides."""
        lines = "".join(f"{record.model_dump_json()}\n" for record in records).encode()
        if (self.trials.read_bytes() if self.trials.exists() else b"") != lines:
            write_atomic(self.trials, lines)

    def write_summary(self, summary: RunSummary) -> None:
        """Write what reports are made from."""
        self.write_trials(summary.trials)
        write_atomic(self.environment, summary.environment.model_dump_json(indent=2).encode())
        write_atomic(self.summary, summary.model_dump_json(indent=2, exclude={"trials"}).encode())

    def names(self) -> list[Path]:
        """All that autotune writes here, and the folder."""
        logs_of_sqlite = [self.study.with_name(f"{self.study.name}-{end}") for end in ("wal", "shm", "journal")]
        return [*vars(self).values(), *logs_of_sqlite]

    def has_reports(self) -> bool:
        """Whether both reports were written after the summary."""
        with suppress(FileNotFoundError):
            written = self.summary.stat().st_mtime_ns
            return all(path.stat().st_mtime_ns >= written for path in (self.report, self.page))
        return False

    def clear(self) -> None:
        """Remove a former run: the files named here, and no other."""
        self.remove_temporary()
        shutil.rmtree(self.logs, ignore_errors=True)
        reports = (self.recommended, self.patch, self.report, self.page)
        for file in (self.study, self.trials, *reports, self.environment, self.summary, self.curves):
            file.unlink(missing_ok=True)

    def remove_temporary(self) -> None:
        """Remove what only trials need, and files half written: a search that was killed has left them."""
        remove_unfinished(self.path)
        for folder in (self.payload, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)


def new_run_dir() -> Path:
    """A folder below ./runs that does not exist yet, named by the time."""
    stem = Path("runs", datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S"))
    candidates = (stem if number == 1 else stem.with_name(f"{stem.name}-{number}") for number in range(1, 1000))
    return next(path for path in candidates if not path.exists())


@contextmanager
def open_run_folder(path: Path, *, fresh: bool) -> Iterator[RunFolder]:
    """Make or open a run folder and hold its lock; `fresh` removes a former run.

    What trials read and run lies in a temporary folder where anybody could put a folder of his own in its place.

    Raises:
        RunFolderError: it can't be written, holds links, or another search works there.
    """
    folder = RunFolder(path.absolute())
    refuse_unfit(folder.path)
    try:
        make_private(folder.path)
        is_open = may_be_swapped(folder.path.resolve())
    except OSError as error:
        raise disk_error(path, error) from error
    with ExitStack() as held:
        held.enter_context(held_lock(folder.lock, folder.holder))
        refuse_links(own for own in folder.names() if own != folder.path)
        if is_open:
            folder.remove_temporary()  # of a search before others could write here
            folder.keep_temporary_in(Path(held.enter_context(_temporary())))
        held.callback(folder.remove_temporary)
        _prepare(folder, fresh=fresh)
        yield folder


@contextmanager
def _temporary() -> Iterator[str]:
    try:
        folder = TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True)
    except OSError as error:
        raise disk_error(Path(gettempdir()), error) from error
    with folder as path:
        yield path


def read_summary(path: Path) -> RunSummary:
    """Read a finished run back from its folder alone.

    Raises:
        ConfigError: the folder holds no finished run, or one that can't be read.
    """
    folder = RunFolder(path)
    try:
        head = folder.summary.read_bytes()
        lines = _whole_lines(folder.trials.read_bytes())
    except OSError as error:
        missing = Path(error.filename or path).name
        raise ConfigError(
            f"a run folder must hold {missing}, but {path} does not ({error.strerror}); name that of a finished search"
        ) from error
    joined = head.strip().removesuffix(b"}") + b', "trials": [' + b",".join(lines) + b"]}"  # which lie in trials.jsonl
    try:
        return RunSummary.model_validate_json(joined)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{path} must be a run folder of this version of autotune, but {place}: {first['msg']}"
        ) from error


def _whole_lines(written: bytes) -> list[bytes]:
    """The lines of a file of JSON but for a last one that a kill has torn."""
    *lines, last = written.split(b"\n")
    with suppress(ValueError):
        json.loads(last)
        lines.append(last)
    return lines


def _prepare(folder: RunFolder, *, fresh: bool) -> None:
    try:
        if fresh:
            folder.clear()
        elif folder.trials.exists():
            lines = _whole_lines(written := folder.trials.read_bytes())
            if (whole := b"".join(line + b"\n" for line in lines)) != written:
                write_atomic(folder.trials, whole)
        folder.remove_temporary()
        for kept in (folder.logs, folder.scratch):
            kept.mkdir(mode=0o700, exist_ok=True)
        os.close(os.open(folder.study, os.O_WRONLY | os.O_CREAT, 0o600))  # SQLite would make it readable by others
        sync_folder(folder.path)
    except OSError as error:
        raise disk_error(folder.path, error) from error
