"""Files of a trial and of a run folder: private, whole or absent, locked, removed after a trial; and the clock."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from select import select
from typing import Any, TypeVar

import psutil
from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from autotune.errors import RunFolderError
from autotune.frozen import FrozenModel

# The clock that a search and its launchers read, and the longest deadline: one seam, so that tests
# can move both.
#
# What is measured inside a trial has a finer clock of its own (time.perf_counter). Neither follows
# the time of day: a clock that is set forward or back, by hand or by NTP, changes no deadline and
# no figure.


LONGEST_DEADLINE = "AUTOTUNE_TEST_LONGEST_DEADLINE_S"
"""Environment variable, for tests alone: no deadline is longer than so many seconds, so that a hang
costs seconds."""


def monotonic() -> float:
    """Return the seconds of a clock that never goes back, and stands still while the machine sleeps."""
    return _read()


def deadline_within(seconds: float) -> float:
    """Return a deadline as it counts here: as it is, or the longest one that a test allows."""
    longest = os.environ.get(LONGEST_DEADLINE)
    return seconds if longest is None else min(seconds, float(longest))


def _read() -> float:
    return time.monotonic()


# Keep what a search writes to its user alone: folders of mode 0700 that belong to them, files of
# mode 0600.
#
# Comes in: paths that autotune is about to write to. Goes out: folders made so, or a RunFolderError
# that says what is in the way.


_PRIVATE = 0o700


def make_private(path: Path) -> None:
    """Make a folder that its owner alone may enter, if it is not there, with those above it.

    Raises:
        OSError: it can't be made.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o755, exist_ok=True)  # less the umask, and never for others to write
    path.mkdir(mode=_PRIVATE, exist_ok=True)


def private_file(path: str, flags: int) -> int:
    """Open a file that its owner alone may read, and follow no link: an opener for `open`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def refuse_foreign(path: Path) -> None:
    """Refuse a folder that belongs to another user, or in which anybody may write.

    Others could have put files there that trials would run. Its mode is not changed: it may be
    shared on purpose, as /tmp is. Accepted is one that others may read, since the files in it are
    private, and one that the user's group may write: its members can change the user's code as
    well.

    Raises:
        RunFolderError: it belongs to another user, or anybody may write in it.
        OSError: it can't be asked.
    """
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise RunFolderError(
            f"a run folder must belong to the user who runs autotune (user id {os.geteuid()}), but "
            f"{path} belongs to "
            f"user id {status.st_uid}; name another folder by run_dir"
        )
    if status.st_mode & stat.S_IWOTH:
        raise RunFolderError(
            f"others must not be able to write in a run folder, but {path} has mode "
            f"{stat.S_IMODE(status.st_mode):04o}; name another folder by run_dir, or close it with "
            f"chmod 700"
        )


def refuse_unfit(path: Path) -> None:
    """Raise where trials can't be told the folder's name, or where the umask would lock its owner out.

    Raises:
        RunFolderError: a name is no UTF-8, or the umask takes the owner's own rights away.
    """
    for name, what in ((path, "the run folder"), (Path.cwd(), "the working directory")):
        try:
            str(name).encode()
        except UnicodeEncodeError:
            raise RunFolderError(
                f"the names of folders must be UTF-8, but that of {what} is {os.fsencode(name)!r}; "
                f"rename it"
            ) from None
    umask = os.umask(
        0o077
    )  # there is no way to read it alone; for a moment others of this process write privately
    os.umask(umask)
    if umask & stat.S_IRWXU:
        raise RunFolderError(
            f"the umask must leave you your own files, but it is {umask:04o}; set it to 0077 or "
            f"0022 (umask 0077)"
        )


# Name a trial's files; write files whole or not at all.
#
# The one message for a place that can't be written stands here as well.


Model = TypeVar("Model", bound=BaseModel)


class TrialFolder:
    """The names of the files which the parent and a trial's ranks exchange; only this class knows them.

    Attributes:
        job: What the ranks are to do.
        report: What rank 0 answers.
        rendezvous: Where the ranks of a group meet: the file of torch.distributed's FileStore.
        sockets: A link to where the trial's processes put sockets, whose paths must be short:
            multiprocessing's, and the one at which the parent listens.
        overlay: Where a script's writes to files that existed before go.
        measured: Exists once a script was measured that can't reach the parent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job = path / "job.json"
        self.report = path / "report.json"
        self.rendezvous = path / "rendezvous"
        self.sockets = path / "sockets"
        self.overlay = path / "overlay"
        self.measured = path / "measured"

    def report_of(self, rank: int) -> Path:
        """Return the file of what a rank answers."""
        return self.path / f"report-{rank}.json" if rank else self.report

    def stack_of(self, rank: int) -> Path:
        """Return the file of a rank's stack shortly before its group's end, as faulthandler writes it."""
        return self.path / f"stack-{rank}.txt"

    def has_stacks(self) -> bool:
        """Return whether a rank of a group has written its stack."""
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
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(
            missing_ok=True
        )  # of a process that was killed; or a link that leads elsewhere
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def sync_folder(path: Path) -> None:
    """Wait until the names of a folder's files are on the disk, where the system can be asked for that.

    Source: fsync(2): that of a file does not cover the entry in its folder.
    """
    with suppress(
        OSError
    ):  # some network file systems refuse it for a folder; Windows does not open one
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove files that `write_atomic` was writing in a folder when its process was killed."""
    for temporary in folder.glob(".?*.*"):
        number = temporary.suffix[1:]
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            with suppress(OSError):  # another call has removed it
                temporary.unlink()


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
    """Return the first bytes of what a user names, a file or a pipe such as <(...); None: nothing came any more.

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
    """Return the error for a file or folder that autotune must write but can't; the system may name one below it."""
    if isinstance(error.filename, str) and error.filename2 is None:
        path = Path(error.filename)
    if path.is_symlink():
        return RunFolderError(
            f"autotune follows no link in its run folder, but {path} is one; move it away, or name "
            f"another folder by "
            "run_dir"
        )
    reason = error.strerror or error
    return RunFolderError(
        f"autotune must be able to write to its run folder, but {path} can't be written "
        f"({reason}). "
        "Free space there, or name another folder by run_dir (a search) or TMPDIR (anything else)."
    )


# The lock of a run folder: one search at a time works there, and who it is can be read.
#
# Comes in: the folder's names. Goes out: a lock that is held inside a context, or the sentence that
# says who holds it.


_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""What a file system answers that has no locks. Source: man 2 flock, man 5 nfs (nolock,
local_lock)."""


class _Holder(FrozenModel):
    """The process of a search that works in a run folder."""

    pid: int
    host: str


@contextmanager
def held_lock(lock: Path, holder: Path) -> Iterator[None]:
    """Hold a run folder's lock; the file `holder` says meanwhile by which process.

    Raises:
        RunFolderError: another search holds it, or the folder can't be written or has no file
            locks.
    """
    held = FileLock(lock, timeout=0, mode=0o600)
    try:
        os.close(
            os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        )  # FileLock may follow a link
        held.acquire()
    except Timeout:
        holds = ""
        with suppress(OSError, ValidationError):
            found = read_model(holder, _Holder)
            holds = f" (process {found.pid} on {found.host})"
        raise RunFolderError(
            f"one search at a time may use a run folder, but another works in "
            f"{lock.parent}{holds}; wait for "
            "its end, or name another run_dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise disk_error(lock.parent, error) from error
        raise RunFolderError(
            f"a run folder must lie where files can be locked, which keeps two searches apart and "
            f"the study whole, but "
            f"{lock.parent} is on a file system without locks ({error.strerror}); name a run_dir "
            f"on a local disk"
        ) from error
    try:
        write_model(holder, _Holder(pid=os.getpid(), host=socket.gethostname()))
        yield
    finally:
        with suppress(OSError):
            holder.unlink(missing_ok=True)
        held.release()


# Removes what a script has made in its user's folders during a trial, once all processes of the
# trial have ended.
#
# Comes in: the trial's overlay, in whose journal the script's processes have recorded what they
# made (see `autotune.worker.script.files`). Goes out: the folders as the trial has found them, and
# the paths that had to stay.
#
# Removed are the files and folders that a record names and that are still the same ones, by device
# and inode. In such a folder, files that no record names are removed as well, as native code or
# another program of the trial writes them: those that are younger than the folder. A folder that no
# record names stays, and so does an older file, which was moved there. What was recorded as kept,
# in a cache or by a download, stays, but for the lock of a build of an extension: torch waits for
# as long as that file exists, so after a trial that was killed amidst the build, all later ones
# would.


_SQLITE = b"SQLite format 3\0"
_OF_SQLITE = ("-wal", "-shm", "-journal")
"""Endings of the files that SQLite keeps with a database. Source: sqlite.org, "Temporary files used
by SQLite"."""
_Entries = dict[str, tuple[int, ...]]
"""Paths with the device, the inode and the time of change, in nanoseconds, of what was made there
when it was recorded; empty where it was gone by then."""
_EXTENSIONS = "/torch_extensions/"
_MOST_NAMES = 5000
"""In all folders that are looked at for what native code has left there; one of data has more. Our
own convention."""


def remove_made(
    overlay: Path, *, until_ns: float = inf, before: Mapping[str, frozenset[str]] | None = None
) -> tuple[str, ...]:
    """Remove what a trial has made outside its own folder.

    Args:
        overlay: The trial's, whose journal is read; if there is none, nothing was made.
        until_ns: The trial's last sign of life, which may have ended long ago: a file that has
            changed since stays.
        before: What some folders held before the trial, as `list_names` lists it. What else is in
            them by now native code has made, which no journal names, or another program: it stays.

    Returns:
        What is still there and was not to be kept, sorted.
    """
    records = _recorded(overlay / "journal")
    left = [path for path in records.stores if not _remove_store(path, records.stores[path])]
    for path in sorted(records.made, reverse=True):  # what lies in a folder before the folder
        left += _remove(path, records.made, records.kept, until_ns)
    # The existence of a lock of torch.utils.cpp_extension (`FileBaton`) is the lock.
    extensions = (os.environ.get("TORCH_EXTENSIONS_DIR") or _EXTENSIONS, _EXTENSIONS)
    for path in records.kept:
        if path.endswith("/lock") and any(root in path for root in extensions):
            _remove(path, records.kept, {}, until_ns)
    for folder, known in (before or {}).items():
        appeared = (_names(Path(folder)) or known) - known - {"__pycache__"}
        left += [f"{folder}/{name}" for name in appeared]
    left = [path for path in left if os.path.lexists(path) and path not in records.kept]
    return tuple(
        sorted(path for path in {*left} if not any(one.startswith(f"{path}/") for one in left))
    )


def list_names(folder: Path) -> dict[str, frozenset[str]]:
    """List what a folder and the folders right in it hold; those with very many names are left out."""
    folders = [folder]
    with suppress(OSError), os.scandir(folder) as entries:
        folders += [
            Path(entry.path)
            for entry in islice(entries, _MOST_NAMES)
            if entry.is_dir(follow_symlinks=False)
        ]
    found = dict[str, frozenset[str]]()
    left = _MOST_NAMES
    for path in folders:
        names = _names(path) if left > 0 else None
        if names is not None:
            found[str(path)] = names
            left = left - len(names)
    return found


def _names(folder: Path) -> frozenset[str] | None:
    """Return the names in a folder; None if there are very many, or it can't be read."""
    try:
        with os.scandir(folder) as entries:
            names = frozenset(entry.name for entry in islice(entries, _MOST_NAMES + 1))
    except OSError:
        return None
    return names if len(names) <= _MOST_NAMES else None


@dataclass(slots=True)
class Made:
    """What a trial has made, as the records of its journal name it."""

    made: _Entries = field(default_factory=dict)
    """Files and folders to remove, by their last path."""
    kept: _Entries = field(default_factory=dict)
    """Files and folders to keep: caches and downloads."""
    stores: _Entries = field(default_factory=dict)
    """Hidden folders of the trial's own, to remove with all that they hold."""
    _gone: _Entries = field(default_factory=dict)
    """Entries that were removed or moved; a later record takes their first time of change."""

    def __contains__(self, path: str) -> bool:
        return path in self.made or path in self.kept

    def learn(self, kind: str, path: str, rest: list[Any]) -> None:
        """Apply one record, in the journal's order."""
        if kind in {"new", "kept", "old"}:
            before = (
                self.made.pop(path, None) or self.kept.pop(path, None) or self._gone.pop(path, None)
            )
            if kind != "old":
                entry = tuple(rest)
                if before and entry[:2] == before[:2]:  # it has only moved
                    entry = (*before[:2], min(before[2], entry[2]))
                (self.kept if kind == "kept" else self.made)[path] = entry
            elif before:
                self._gone[path] = before
        elif kind == "store":
            self.stores[path] = tuple(rest)
        elif kind == "moved":
            if path in self._gone:
                self._gone[rest[0]] = self._gone.pop(path)
            for known in (
                (self.made, self.kept) if rest[1] else ()
            ):  # a folder, with what was made in it
                for below in [one for one in known if one.startswith(f"{path}/")]:
                    known[f"{rest[0]}{below[len(path) :]}"] = known.pop(below)


def _recorded(journal: Path) -> Made:
    """Read a journal; of a copy of one, which somebody else may have written, nothing."""
    records = Made()
    is_own = False
    if not journal.is_file():
        return records
    status = journal.stat()
    for line in journal.read_text("utf-8", errors="replace").splitlines():
        try:
            kind, path, *rest = json.loads(line)
            records.learn(kind, path, rest)
        except (ValueError, TypeError, LookupError):  # a line that a process was killed in
            continue
        is_own |= kind == "journal" and rest[:2] == [status.st_dev, status.st_ino]
    return records if is_own else Made()


def _remove_store(path: str, made: tuple[int, ...]) -> bool:
    """Remove a hidden folder of the trial's own, if it is still the same one; return whether it is gone."""
    try:
        status = os.lstat(path)
    except OSError:
        return True
    if (status.st_dev, status.st_ino) != made[:2] or not stat.S_ISDIR(status.st_mode):
        return False
    shutil.rmtree(path, ignore_errors=True)  # follows no links
    return not os.path.lexists(path)


def _remove(path: str, made: _Entries, kept: _Entries, until_ns: float) -> list[str]:
    """Remove one file, or one folder with the files in it; return what had to stay and was not to be kept."""
    try:
        status = os.lstat(path)
        is_folder = stat.S_ISDIR(status.st_mode)
        if (status.st_dev, status.st_ino) != made[path][:2] or (
            not is_folder and status.st_mtime_ns > until_ns
        ):
            return [path]  # somebody else's by now
        if not is_folder:
            is_file = stat.S_ISREG(status.st_mode)
            own = _sides_of_database(path, made[path][2], until_ns) if is_file else []
            for one in (path, *own):
                Path(one).unlink()
            return []
        staying = _remove_strangers(path, made, kept, until_ns)
        if not staying:
            Path(path).rmdir()
    except FileNotFoundError:
        return []
    except OSError:
        return [path]
    return [one for one in staying if one not in made and one not in kept]


def _sides_of_database(path: str, since_ns: float, until_ns: float) -> list[str]:
    """Return SQLite's own files of a database that the trial has made; an older one of such a name is the user's."""
    found = list[str]()
    try:
        with Path(path).open("rb") as file:
            begin = file.read(len(_SQLITE))
    except OSError:  # it may be removed all the same
        return found
    if begin not in {_SQLITE, b""}:  # amid its first transaction it is empty
        return found
    for end in _OF_SQLITE:
        with suppress(FileNotFoundError):
            if since_ns <= os.lstat(f"{path}{end}").st_mtime_ns <= until_ns:
                found.append(f"{path}{end}")
    return found


def _remove_strangers(folder: str, made: _Entries, kept: _Entries, until_ns: float) -> list[str]:
    """Remove the files in a folder that no record names and that are younger than it; return what stays there."""
    with os.scandir(folder) as entries:
        inside = list(entries)
    staying = list[str]()
    for entry in inside:
        is_known = entry.path in made or entry.path in kept
        is_young = made[folder][2] <= entry.stat(follow_symlinks=False).st_mtime_ns <= until_ns
        if is_known or entry.is_dir(follow_symlinks=False) or not is_young:
            staying.append(entry.path)
        else:
            Path(entry.path).unlink()
    return staying
