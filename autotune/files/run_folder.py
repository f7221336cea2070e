"""The run folder: its file names, its lock, and what is written there.

Comes in: a path, the records and models of a search. Goes out: a RunFolder that is locked while a
search works in it, and the summary of a finished one. Only the user may read its files (folders 0700,
files 0600). A search that is continued reads its trials only from study.db.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from os.path import isdir
from pathlib import Path

from pydantic import ValidationError

from autotune.errors import ConfigError
from autotune.messages.search import file_damaged
from autotune.note import Note
from autotune.protocol.disk import (
    TrialFolder,
    disk_error,
    held_lock,
    make_private,
    private_file,
    refuse_foreign,
    refuse_unfit,
    remove_made,
    remove_unfinished,
    sync_folder,
    write_atomic,
)
from autotune.records.result import Curves, RunSummary
from autotune.records.trial import TrialRecord

_OF_SQLITE = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite keeps next to a database. Source: sqlite.org/tempfiles.html."""


class RunFolder:
    """The paths of all files of a run; `open_run_folder` makes it and holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study = path / "study.db"
        """Optuna study in SQLite."""
        self.trials = path / "trials.jsonl"
        """One TrialRecord per line, for people and scripts; autotune never reads it."""
        self.recommended = path / "recommended.yaml"
        """The configuration to use."""
        self.patch = path / "recommended.patch"
        """The same as a diff of the script, if its DataLoader call has literals."""
        self.report = path / "report.md"
        """The report in Markdown."""
        self.page = path / "report.html"
        """The report with its plots, for a browser."""
        self.environment = path / "environment.json"
        """The machine and the versions."""
        self.summary = path / "summary.json"
        """Data of all reports."""
        self.curves = path / "curves.json"
        """Measurements of loader and device alone, for a search that is continued."""
        self.logs = path / "logs"
        """Output of trials."""
        self.payload = path / "payload"
        """The workload for trials; removed when the search ends."""
        self.scratch = path / "scratch"
        """Folders of trials; removed when the search ends."""
        self.lock = path / ".lock"
        """Lock of the search that works here."""
        self.holder = path / ".holder"
        """Process that holds the lock."""

    def read_curves(self) -> Curves | Note | None:
        """Read the measurements of loader and device alone; None or a note if they must be repeated."""
        try:
            return Curves.model_validate_json(self.curves.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            return file_damaged(self.curves.name, reason=str(error.strerror))
        except ValidationError as error:
            return file_damaged(self.curves.name, reason=_first_of(error))

    def append_trial(self, record: TrialRecord) -> None:
        """Add a trial to trials.jsonl, after the study has it."""
        try:
            with open(self.trials, "ab", opener=private_file) as file:
                file.write(record.model_dump_json().encode() + b"\n")
        except OSError as error:
            raise disk_error(self.trials, error) from error

    def write_trials(self, records: Sequence[TrialRecord]) -> None:
        """Replace trials.jsonl by the study's records, in this order."""
        if records:
            write_atomic(
                self.trials, "".join(f"{record.model_dump_json()}\n" for record in records).encode()
            )
        else:
            self.trials.unlink(missing_ok=True)

    def write_summary(self, summary: RunSummary) -> None:
        """Write the data of reports."""
        self.write_trials(summary.trials)
        write_atomic(self.environment, summary.environment.model_dump_json(indent=2).encode())
        write_atomic(self.summary, summary.model_dump_json().encode())

    def has_reports(self) -> bool:
        """Return True if both reports were written after the summary."""
        with suppress(FileNotFoundError):
            written = self.summary.stat().st_mtime_ns
            return all(path.stat().st_mtime_ns >= written for path in (self.report, self.page))
        return False

    def clear(self) -> None:
        """Remove an earlier run: only the files named here."""
        self.remove_temporary()
        _remove_folder(self.logs)
        reports = (self.recommended, self.patch, self.report, self.page)
        data = (self.study, self.trials, self.environment, self.summary, self.curves)
        beside_study = [self.study.with_name(f"{self.study.name}{end}") for end in _OF_SQLITE]
        for file in (*reports, *data, *beside_study):
            file.unlink(missing_ok=True)

    def remove_temporary(self) -> None:
        """Remove files of trials and unfinished files, which a killed search leaves."""
        remove_unfinished(self.path)
        if self.scratch.is_dir() and not self.scratch.is_symlink():
            for trial in self.scratch.iterdir():
                overlay = TrialFolder(trial).overlay
                signs = [
                    path.lstat().st_mtime_ns for path in (*trial.glob("*"), *overlay.glob("*"))
                ]
                remove_made(overlay, until_ns=max(signs, default=0))
        for folder in (self.payload, self.scratch):
            _remove_folder(folder)


def _remove_folder(path: Path) -> None:
    """Remove a folder with its contents; a link or a file is removed itself."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def new_run_dir() -> Path:
    """Return the path of a new folder in ./runs, named by the time."""
    stem = Path("runs", datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S"))
    candidates = (
        stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        for number in range(1, 1000)
    )
    return next(path for path in candidates if not path.exists())


@contextmanager
def open_run_folder(path: Path, *, fresh: bool) -> Iterator[RunFolder]:
    """Make or open a run folder and hold its lock; `fresh` removes an earlier run.

    Raises:
        RunFolderError: It belongs to another user, others may write in it, it can't be written, or
            another search works in it.
    """
    folder = RunFolder(path.absolute())
    refuse_unfit(folder.path)
    try:
        make_private(folder.path)
        refuse_foreign(folder.path)
    except OSError as error:
        raise disk_error(path, error) from error
    with held_lock(folder.lock, folder.holder):
        try:
            _prepare(folder, fresh=fresh)
            yield folder
        finally:
            # Keep the search's own exception; the next search removes what remains.
            with suppress(OSError):
                folder.remove_temporary()


def read_summary(path: Path) -> RunSummary:
    """Read the summary of a finished run from its folder.

    Raises:
        ConfigError: The folder has no finished run, or it can't be read; the message names the
            file.
    """
    file = RunFolder(path).summary
    try:
        return RunSummary.model_validate_json(file.read_bytes())
    except ValidationError as error:
        rule = f"{path} must be a run folder of this version of autotune, but {file.name}: {_first_of(error)}"
        raise ConfigError(
            f"{rule}; run the same search again, which writes it again from study.db"
        ) from error
    except (OSError, ValueError) as error:  # a ValueError where the path is none
        reason = getattr(error, "strerror", None) or error
        rule = f"a run folder must hold a readable {file.name}, but {file}: {reason}"
        raise ConfigError(f"{rule}; name that of a finished search") from error


def _first_of(error: ValidationError) -> str:
    """Return where and how data first breaks a rule."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def recommended_of(path: Path) -> Path:
    """Return the recommended.yaml of a run folder; any other path as it is."""
    is_folder = isdir(path)  # noqa: PTH112 - unlike Path.is_dir, no error for a name that no file system takes
    return RunFolder(path).recommended if is_folder else path


def _prepare(folder: RunFolder, *, fresh: bool) -> None:
    try:
        if fresh:
            folder.clear()
        folder.remove_temporary()
        for kept in (folder.logs, folder.scratch):
            kept.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(kept, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
        # SQLite would create it readable for others.
        os.close(os.open(folder.study, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        sync_folder(folder.path)
        # One may be allowed to create a folder in another, but not to read that.
        with suppress(PermissionError):
            sync_folder(folder.path.parent)
    except OSError as error:
        raise disk_error(folder.path, error) from error
