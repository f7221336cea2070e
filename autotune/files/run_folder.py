"""The run folder: its file names, its lock, and what is written there.

Comes in: a path, the records and models of a search. Goes out: a RunFolder that is locked while a search works in it,
and the summary of a finished one. Only the user may read what lies there (0700, files 0600).
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

from autotune.files.run_files.summary_file import first_of, read_summary_files, record_of, whole_lines
from autotune.messages.search import file_damaged, trials_lost
from autotune.note import Note
from autotune.protocol.disk import TrialFolder, disk_error, read_own, remove_unfinished, sync_folder, write_atomic
from autotune.protocol.made_files import remove_made
from autotune.protocol.private_folder import make_private, refuse_foreign, refuse_unfit
from autotune.protocol.run_lock import held_lock
from autotune.records.diagnosis import Curves
from autotune.records.run_summary import RunSummary
from autotune.records.trial import TrialRecord

__all__ = ["RunFolder", "new_run_dir", "open_run_folder", "read_summary", "recommended_of"]

_OF_SQLITE = ("-wal", "-shm", "-journal")
"""How the names of the files end that SQLite has beside a database. Source: sqlite.org/tempfiles.html."""


class RunFolder:
    """Names every file of a run. Made by `open_run_folder`, which holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study = path / "study.db"
        """An ordinary Optuna SQLite study."""
        self.trials = path / "trials.jsonl"
        """One TrialRecord a line."""
        self.lost = path / "trials.lost.jsonl"
        """The same of trials that the study has lost; mostly there is none."""
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

    @property
    def files(self) -> tuple[Path, ...]:
        """What a search leaves, but for the logs and the lock."""
        reports = (self.recommended, self.patch, self.report, self.page)
        return (self.study, self.trials, self.lost, *reports, self.environment, self.summary, self.curves)

    @property
    def sqlite_files(self) -> tuple[Path, ...]:
        """Files that SQLite writes next to the study."""
        return tuple(self.study.with_name(f"{self.study.name}{end}") for end in _OF_SQLITE)

    def read_curves(self) -> Curves | Note | None:
        """What an earlier call measured of loader and device alone, or why that can't be read: it is measured again."""
        try:
            return Curves.model_validate_json(read_own(self.curves))
        except FileNotFoundError:
            return None
        except OSError as error:
            return file_damaged(self.curves.name, reason=str(error.strerror))
        except ValidationError as error:
            return file_damaged(self.curves.name, reason=first_of(error))

    def restore_trials(self, records: Sequence[TrialRecord]) -> list[Note]:
        """Write trials.jsonl anew, as the study has it; notes of what was damaged in it, or in it alone and is kept."""
        found: list[Note] = []
        try:
            lines = whole_lines(read_own(self.trials))
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise disk_error(self.trials, error) from error
        read = [record_of(line) for line in lines]
        known, told = {one.number for one in records}, {one.number for one in read if one is not None}
        broken = next((place for place, one in enumerate(read, start=1) if one is None), None)
        if broken is not None:
            found.append(file_damaged(self.trials.name, reason=f"line {broken} is no trial"))
        elif (lacking := known - told) and lacking != {records[-1].number}:  # which a kill may keep from being added
            reason = f"it lacked {len(lacking)} of the study's {len(known)} trials"
            found.append(file_damaged(self.trials.name, reason))
        is_begun_anew = (
            not known and read and (read[0] is None or read[0].outcome != "ok")
        )  # after a baseline that failed
        lost = [line for line, one in zip(lines, read, strict=True) if one is not None and one.number not in known]
        if lost and not is_begun_anew:
            _append(self.lost, lost)
            found.append(trials_lost(count=len(lost), kept=self.lost.name))
        self.write_trials(records)
        return found

    def append_trial(self, record: TrialRecord) -> None:
        """Add a trial's record as a line, which outlasts a power cut; the study holds the record as well."""
        _append(self.trials, [record.model_dump_json().encode()])

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

    def has_reports(self) -> bool:
        """Whether both reports were written after the summary."""
        with suppress(FileNotFoundError):
            written = self.summary.stat().st_mtime_ns
            return all(path.stat().st_mtime_ns >= written for path in (self.report, self.page))
        return False

    def clear(self) -> None:
        """Remove a former run: the files named here, and no other."""
        self.remove_temporary()
        _remove_folder(self.logs)
        for file in (*self.files, *self.sqlite_files):
            file.unlink(missing_ok=True)

    def remove_temporary(self) -> None:
        """Remove what only trials need, and files half written: a search that was killed has left them."""
        remove_unfinished(self.path)
        if self.scratch.is_dir() and not self.scratch.is_symlink():
            for trial in self.scratch.iterdir():
                overlay = TrialFolder(trial).overlay
                signs = [path.lstat().st_mtime_ns for path in (*trial.glob("*"), *overlay.glob("*"))]
                remove_made(overlay, until_ns=max(signs, default=0))
        for folder in (self.payload, self.scratch):
            _remove_folder(folder)


def _remove_folder(path: Path) -> None:
    """Remove a folder with what is in it; of a link the link alone, and a file in its place."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def new_run_dir() -> Path:
    """A folder below ./runs that does not exist yet, named by the time."""
    stem = Path("runs", datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S"))
    candidates = (stem if number == 1 else stem.with_name(f"{stem.name}-{number}") for number in range(1, 1000))
    return next(path for path in candidates if not path.exists())


@contextmanager
def open_run_folder(path: Path, *, fresh: bool) -> Iterator[RunFolder]:
    """Make or open a run folder and hold its lock; `fresh` removes a former run.

    Raises:
        RunFolderError: it belongs to somebody else, anybody may write in it, it can't be written, or another search
            works there.
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
            with suppress(OSError):  # what the search has raised comes first; the next search removes what is left
                folder.remove_temporary()


def read_summary(path: Path) -> RunSummary:
    """Read a finished run back from its folder alone.

    Raises:
        ConfigError: the folder holds no finished run, or one that can't be read; the message names the file.
    """
    folder = RunFolder(path)
    return read_summary_files(folder.summary, folder.trials)


def recommended_of(path: Path) -> Path:
    """Return the recommended.yaml of a run folder; the path itself where it is no folder."""
    is_folder = isdir(path)  # noqa: PTH112 - unlike Path.is_dir, no error for a name that no file system takes
    return RunFolder(path).recommended if is_folder else path


def _append(path: Path, lines: Sequence[bytes]) -> None:
    """Add lines to a file, which outlast a power cut."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with open(os.open(path, flags, 0o600), "ab") as file:  # noqa: PTH123 - a descriptor
            file.write(b"".join(line + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(path, error) from error


def _prepare(folder: RunFolder, *, fresh: bool) -> None:
    try:
        if fresh:
            folder.clear()
        folder.remove_temporary()
        for file in folder.sqlite_files:  # SQLite would follow a link there
            with suppress(FileNotFoundError):
                os.close(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
        for kept in (folder.logs, folder.scratch):
            kept.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(kept, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
        os.close(os.open(folder.study, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))  # SQLite would let others read
        sync_folder(folder.path)
        with suppress(PermissionError):  # whoever may make a folder in another may not always read that
            sync_folder(folder.path.parent)
    except OSError as error:
        raise disk_error(folder.path, error) from error
