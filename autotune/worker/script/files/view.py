"""Map the script's paths to those that exist: files from before stay, the trial's changes are copies.

In: paths as the script gives them. Out: *logical* paths (absolute, without symbolic links, as the
script sees the tree) and *physical* ones (the location of the bytes). The map lives in a journal in
the trial's scratch folder, shared by all of its processes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from autotune.protocol.disk import Made
from autotune.worker.script.patching import opened, real_os

# Paths as scripts give them, and errors about them


AnyPath = str | bytes | os.PathLike[Any]


class ErrorsName:
    """Let OSErrors within a block name the paths that the script gave."""

    def __init__(self, path: AnyPath | None, other: AnyPath | None = None) -> None:
        self._paths = path, other

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            error.filename, error.filename2 = self._paths


def text_of(path: AnyPath) -> str:
    """Return a path as text."""
    return os.fsdecode(path)


def is_descriptor(path: object) -> bool:
    """Return whether a file is given by its descriptor."""
    return hasattr(path, "__index__")


def parent_of(logical: str) -> str:
    """Return the folder of a logical path; the root is the empty text."""
    return logical[: logical.rfind("/")] if logical else ""


def error_of(number: int) -> OSError:
    """Return the exception that the system's call would raise."""
    return OSError(number, os.strerror(number))


def is_dots(text: str) -> bool:
    """Return whether a path ends in no name: `/`, `.` or `..`."""
    return text.rstrip("/").rpartition("/")[2] in {"", ".", ".."}


# The journal on disk. Its length lies in a small file that every process maps, so that a check for
# new lines is cheap. Changes hold a lock, reads do not.


STAMP_BYTES = 8
Record = list[str | int | None]
"""A line of the journal: its kind, a path, and more."""


class Journal:
    """Append to a trial's journal, and read what its other processes have appended."""

    def __init__(self, scratch: str) -> None:
        self.path = f"{scratch}/journal"
        self._stamp_path = f"{scratch}/stamp"
        self._lock_path = f"{scratch}/lock"
        self._thread_lock = threading.RLock()
        self._depth = 0
        self.position = 0
        with self.locked():
            with opened(self.path, os.O_WRONLY | os.O_CREAT):
                pass
            with opened(self._stamp_path, os.O_RDWR | os.O_CREAT) as descriptor:
                if real_os.fstat(descriptor).st_size < STAMP_BYTES:
                    _write_all(descriptor, bytes(STAMP_BYTES))
                self.stamp = mmap.mmap(descriptor, STAMP_BYTES, prot=mmap.PROT_READ)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the trial's other processes and threads from changing anything; may be nested."""
        with self._thread_lock:
            if self._depth == 0:
                descriptor = real_os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    # A forked process does not inherit this lock, as it would flock's.
                    fcntl.lockf(descriptor, fcntl.LOCK_EX)
                except OSError:
                    real_os.close(descriptor)
                    raise
                self._held = descriptor
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    real_os.close(self._held)

    def forked(self) -> None:
        """Begin again in a child: another thread of the parent may have held the lock."""
        self._thread_lock = threading.RLock()
        self._depth = 0
        self.position = 0

    def append(self, records: Sequence[Record]) -> None:
        """Append records, all or none; needs the lock, and all records read.

        Raises:
            OSError: Scratch is full or can't be written.
        """
        data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        with opened(self.path, os.O_WRONLY | os.O_APPEND) as descriptor:
            before = real_os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, data)
            except OSError:
                real_os.ftruncate(descriptor, before)
                raise
        self.position = before + len(data)
        # Through the memory map a full disk would raise SIGBUS.
        with opened(self._stamp_path, os.O_WRONLY) as descriptor:
            real_os.pwrite(descriptor, self.position.to_bytes(STAMP_BYTES, "little"), 0)

    def unread(self) -> list[Record]:
        """Return the whole lines that were written since the last call."""
        parts = []
        with opened(self.path, os.O_RDONLY) as descriptor:
            os.lseek(descriptor, self.position, os.SEEK_SET)
            while part := real_os.read(descriptor, 1 << 20):
                parts.append(part)
        data = b"".join(parts)
        data = data[: data.rfind(b"\n") + 1]
        self.position += len(data)
        return [json.loads(line) for line in data.splitlines()]


def _write_all(descriptor: int, data: bytes) -> None:
    if real_os.write(descriptor, data) != len(data):
        raise error_of(errno.ENOSPC)


# The map that a journal leads to


class Redirections:
    """Map logical paths to physical ones, and know the paths that the trial has made.

    A file maps to its copy in scratch, a renamed file or folder to its old location, a removed one
    to None; paths below a mapped folder follow. Reads need no lock: each is one dict operation.
    """

    def __init__(self) -> None:
        self._map: dict[str, str | None] = {}
        self._made = Made()
        self.stores: dict[int, str] = {}
        """By device: the hidden folder that holds copies of its files."""
        self.store_prefixes: tuple[str, ...] = ()
        """Beginnings of all paths in these folders."""
        self.elsewhere: set[str] = set()
        """Logical paths of files whose copies lie on another file system than they do."""

    def __bool__(self) -> bool:
        return bool(self._map or self.stores)

    def __contains__(self, logical: str) -> bool:
        return logical in self._map

    def physical(self, logical: str) -> str | None:
        """Return the physical path; None if the path or a folder above it was removed."""
        head = logical
        redirected = self._map
        while head and head not in redirected:
            head = head[: head.rfind("/")]
        if not head:
            return logical
        to = redirected[head]
        return None if to is None else f"{to}{logical[len(head) :]}"

    def is_made(self, physical: str) -> bool:
        """Return whether the trial has made a path, or a folder above it."""
        while physical and physical not in self._made:
            physical = physical[: physical.rfind("/")]
        return bool(physical)

    def inside(self, folder: str) -> dict[str, bool]:
        """Return the redirected names in a folder, each with whether it is visible."""
        found: dict[str, bool] = {}
        for key, value in list(self._map.items()):
            above, _, name = key.rpartition("/")
            if above == folder:
                found[name] = value is not None
        return found

    def apply(self, records: list[Record]) -> None:  # noqa: C901 - one branch for each kind
        """Apply records of the journal, in order."""
        for kind, first, *rest in records:
            path = str(first)
            if kind == "map":
                self._map[path] = None if rest[0] is None else str(rest[0])
            elif kind == "unmap":
                self._map.pop(path, None)
            elif kind == "unmap_below":
                for key in self._below(path):
                    del self._map[key]
            elif kind == "store":
                self.stores[int(str(rest[0]))] = path
                self.store_prefixes = (*self.store_prefixes, f"{path}/")
            elif kind == "elsewhere":
                self.elsewhere.add(path)
            elif kind == "renamed":
                for key in self._below(path):
                    self._map[f"{rest[0]}{key[len(path) :]}"] = self._map.pop(key)
            else:
                self._made.learn(str(kind), path, rest)
                if kind == "moved":
                    self._follow(path, str(rest[0]))

    def _below(self, path: str) -> list[str]:
        return [key for key in list(self._map) if key.startswith(f"{path}/")]

    def _follow(self, source: str, to: str) -> None:
        for key, value in list(self._map.items()):
            if value is not None and f"{value}/".startswith(f"{source}/"):
                self._map[key] = f"{to}{value[len(source) :]}"


# Copies in scratch, which share a file's blocks if the file system can


_COPY_BYTES = 1 << 30
_STORE_NAME = ".autotune-"
"""Beginning of a store's name; random digits follow."""
_ROOM = 2
"""Sizes of a file that its file system must have free for a copy there: the copy, and one more
that the script may write before it replaces it. Source: our convention."""
_CANT_SHARE = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
)
"""Errors of two file systems, or of one that can't share blocks. Source: copy_file_range(2)."""


def copy_file(source: str, to: str, *, is_empty: bool = False) -> None:
    """Copy a file's bytes, permissions and times to a physical path where there is nothing.

    Args:
        source: The file's physical path.
        to: The copy's physical path.
        is_empty: Copy the permissions only, since the script truncates the file anyway.

    Raises:
        OSError: The file can't be read, or the copy can't be written.
    """
    status = real_os.stat(source)
    with opened(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as out:
        if not is_empty:
            with opened(source, os.O_RDONLY) as read:
                _copy_bytes(read, out)
        with suppress(OSError):  # only root may change the owner
            real_os.fchown(out, status.st_uid, status.st_gid)
        real_os.fchmod(out, stat.S_IMODE(status.st_mode))
        if not is_empty:
            real_os.utime(out, ns=(status.st_atime_ns, status.st_mtime_ns))


def _copy_bytes(read: int, out: int) -> None:
    try:
        while real_os.copy_file_range(read, out, _COPY_BYTES):
            pass
    except OSError as error:
        if error.errno not in _CANT_SHARE:
            raise
    while part := real_os.read(read, 1 << 20):  # the rest, or all of it
        while part:
            part = part[real_os.write(out, part) :]


# The view: the map and the file system together


class View:
    """Resolve the script's paths, and record the trial's changes.

    Copies lie in scratch if that is on the same file system as the original, else in a *store*, a
    hidden folder there: writing them must cost what writing the original would. Both the trial's
    processes and its parent know it from the journal; the script does not see it.

    The trial's *own* paths, which it may change, are those in scratch or in a free folder, those
    that it has made itself, and those below a folder that it has made.

    Args:
        scratch: The trial's scratch folder.
        free: Folders whose files the trial may change, and whose changes are not recorded.
        caches: Folders whose new files are kept for later trials.
    """

    def __init__(self, scratch: str, free: tuple[str, ...], caches: tuple[str, ...] = ()) -> None:
        self.scratch = scratch
        self._store = f"{scratch}/files"
        self._device = real_os.stat(scratch).st_dev
        self._free = tuple(f"{folder}/" for folder in (scratch, *free, "/proc", "/sys"))
        self._caches = tuple(f"{folder}/" for folder in caches)
        self._keeping = threading.local()
        self._redirected = Redirections()
        self._links: dict[str, str] = {}
        self._read = b""
        self._idle = b""
        self._cwd: tuple[str, str] | None = None
        self._reading = threading.RLock()
        self._journal = Journal(scratch)
        self._stamp = self._journal.stamp
        with self.changing():
            if self._journal.position == 0:
                self.commit([["journal", self._journal.path]])
            with suppress(FileExistsError):
                real_os.mkdir(self._store, 0o700)

    def is_idle(self) -> bool:
        """Return whether nothing is redirected; each read checks this first."""
        return self._stamp[:STAMP_BYTES] == self._idle or self._synced()

    def forked(self) -> None:
        """Begin again in a child: another thread of the parent may have been within a change."""
        self._journal.forked()
        self._reading = threading.RLock()
        self._redirected = Redirections()
        self._links = {}
        self._read = b""
        self._idle = b""

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Lock the trial's other processes out of changes, with all earlier changes read."""
        with self._journal.locked():
            self._synced()
            yield

    def commit(self, records: list[Record]) -> None:
        """Publish a change to all of the trial's processes, this one included.

        Needs `changing`. New files must exist by now: their identity is recorded.
        """
        for record in records:
            if record[0] in {"journal", "new", "kept", "store"}:
                status = _status(str(record[1]))
                record[2:] = []
                if status is not None:
                    record += [status.st_dev, status.st_ino, status.st_mtime_ns]
        if records:
            with self._reading:
                self._journal.append(records)
                self._learn(records, self._stamp[:STAMP_BYTES])

    def _synced(self) -> bool:
        if self._stamp[:STAMP_BYTES] != self._read:
            with self._reading:
                # Read the stamp before the records: later ones are then found the next time.
                stamp = self._stamp[:STAMP_BYTES]
                self._learn(self._journal.unread(), stamp)
        return not self._redirected

    def _learn(self, records: list[Record], stamp: bytes) -> None:
        self._redirected.apply(records)
        self._links = {}
        self._read = stamp
        self._idle = b"" if self._redirected else stamp

    def logical(self, path: str, dir_fd: int | None = None, *, follow: bool = True) -> str:
        """Return the logical path: absolute, without symbolic links, as the script sees the tree.

        Args:
            path: The path as the script gave it.
            dir_fd: Descriptor of the folder that it is relative to; None for the current folder.
            follow: Follow a symbolic link in the last name too.

        Raises:
            OSError: Symbolic links form a circle, or `..` follows a name that is no folder.
        """
        if not path.startswith("/"):
            base = self.cwd() if dir_fd is None else real_os.readlink(f"/proc/self/fd/{dir_fd}")
            path = f"{base}/{path}"
        folder, _, name = path.rpartition("/")
        if name in {"", ".", ".."}:
            return self._walk(path)
        known = self._links.get(folder)
        if known is None:
            known = self._links[folder] = self._walk(folder)
        found = f"{known}/{name}"
        if follow and (target := self._target(found)) is not None:
            return self._walk(target if target.startswith("/") else f"{known}/{target}")
        return found

    def physical(self, logical: str) -> str | None:
        """Return the physical path; None if the path or a folder above it was removed."""
        return self._redirected.physical(logical)

    def seen(self, path: AnyPath, dir_fd: int | None = None, *, follow: bool = True) -> str:
        """Return the path to read; if the script sees nothing there, one that does not exist."""
        text = text_of(path)
        if not text:
            return text
        logical = self.logical(text, dir_fd, follow=follow)
        found = self.physical(logical)
        end = "/" if text.endswith("/") else ""
        return f"{self.scratch}/none" if found is None else f"{found or '/'}{end}"

    def is_own(self, physical: str) -> bool:
        """Return whether the trial may change a physical path."""
        return self.is_free(physical) or self._redirected.is_made(physical)

    def is_free(self, physical: str) -> bool:
        """Return whether a physical path lies in a folder where changes are not recorded."""
        return f"{physical}/".startswith((*self._free, *self._redirected.store_prefixes))

    def is_stored(self, physical: str) -> bool:
        """Return whether a physical path lies in scratch or in a store."""
        return f"{physical}/".startswith((self._free[0], *self._redirected.store_prefixes))

    def elsewhere(self) -> tuple[str, ...]:
        """Return the files whose writes go to another file system, where they may cost less."""
        self.is_idle()  # reads the changes of other processes
        return tuple(sorted(self._redirected.elsewhere))

    def beneath(self, logical: str) -> str | None:
        """Return the physical path that a logical one would have without its own redirection."""
        parent = self.physical(parent_of(logical))
        return None if parent is None else f"{parent}/{logical.rpartition('/')[2]}"

    def status(self, logical: str) -> os.stat_result | None:
        """Return the status at a logical path, as lstat does; None if there is nothing."""
        physical = self.physical(logical)
        return None if physical is None else _status(physical or "/")

    def names(self, logical: str) -> list[str]:
        """Return the names that the script sees in a folder."""
        physical = self.physical(logical)
        names = dict.fromkeys(
            real_os.listdir(f"{self.scratch}/none" if physical is None else physical or "/")
        )
        for name, is_seen in self._redirected.inside(logical).items():
            if is_seen:
                names[name] = None
            else:
                names.pop(name, None)
        for store in self._redirected.stores.values():
            names.pop(store.rpartition("/")[2], None)
        return list(names)

    def is_plain(self, logical: str) -> bool:
        """Return whether neither a folder nor anything directly in it is redirected."""
        if any(parent_of(store) == logical for store in self._redirected.stores.values()):
            return False
        return self.physical(logical) == logical and not self._redirected.inside(logical)

    def create(self, logical: str, make: Callable[[str], Any]) -> Any:
        """Make something where there is nothing; needs `changing`.

        Args:
            logical: The new path.
            make: Function that makes it at a physical path.

        Returns:
            The result of `make`.

        Raises:
            OSError: `make` raised it; or scratch can't be written, and nothing is made.
        """
        at, records = self.place(logical)
        made = make(at)
        try:
            self.commit(records)
        except OSError:
            if isinstance(made, int):
                real_os.close(made)
            remove = real_os.rmdir if stat.S_ISDIR(real_os.lstat(at).st_mode) else real_os.unlink
            remove(at)
            raise
        return made

    def place(self, logical: str) -> tuple[str, list[Record]]:
        """Return the physical path for something new, and the records to commit afterwards.

        It is the path that the script wants if that is free, else one in scratch.
        """
        parent = self.folder_of(logical)
        beneath = f"{parent}/{logical.rpartition('/')[2]}"
        if _status(beneath) is None and (beneath == logical or self.is_own(parent)):
            records: list[Record] = [["unmap", logical]] if logical in self._redirected else []
            return beneath, [*records, *self.made(beneath)]
        at = self._slot(logical)
        return at, [["map", logical, at]]

    def made(self, physical: str) -> list[Record]:
        """Return the records of something that the trial has made: to be removed later, or kept."""
        if self.is_free(physical):
            return []
        is_kept = getattr(self._keeping, "depth", 0) or f"{physical}/".startswith(self._caches)
        return [["kept" if is_kept else "new", physical]]

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what this thread makes for later trials: a download."""
        self._keeping.depth = getattr(self._keeping, "depth", 0) + 1
        try:
            yield
        finally:
            self._keeping.depth -= 1

    def folder_of(self, logical: str) -> str:
        """Return the physical folder for something new.

        Raises:
            OSError: There is none, or it can't be written.
        """
        self.check_folder(parent_of(logical))
        parent = self.physical(parent_of(logical)) or ""
        if not real_os.access(parent or "/", os.W_OK | os.X_OK, effective_ids=True):
            raise error_of(errno.EACCES)
        return parent

    def check_folder(self, logical: str) -> None:
        """Raise the error that the system would if a logical path is no folder."""
        is_there = True
        while (status := self.status(logical)) is None:
            logical = parent_of(logical)
            is_there = False
        if not stat.S_ISDIR(status.st_mode):
            raise error_of(errno.ENOTDIR)
        if not is_there:
            raise error_of(errno.ENOENT)

    def copy(self, logical: str, physical: str, *, is_empty: bool = False) -> str:
        """Redirect a file to a copy; needs `changing`.

        Args:
            logical: The file's logical path.
            physical: Its physical path.
            is_empty: Copy the permissions only.

        Returns:
            The physical path of the copy.

        Raises:
            OSError: The file can't be read, or the copy can't be written.
        """
        at = self._slot(logical, real_os.stat(physical).st_size)
        try:
            copy_file(physical, at, is_empty=is_empty)
            self.commit([["map", logical, at]])
        except OSError:
            with suppress(OSError):
                real_os.unlink(at)
            raise
        return at

    def hide(self, logical: str) -> Record:
        """Return the record that makes a logical path invisible."""
        beneath = self.beneath(logical)
        is_there = beneath is not None and _status(beneath) is not None
        return ["map", logical, None] if is_there else ["unmap", logical]

    def stow(self, logical: str, physical: str) -> str:
        """Move one of the trial's own files to scratch or a store, and return its path there.

        A folder on another disk stays where it is.
        """
        at = self._slot(logical)
        try:
            real_os.rename(physical, at)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            kind = real_os.lstat(physical).st_mode
            if stat.S_ISDIR(kind):
                return physical
            if stat.S_ISLNK(kind):
                real_os.symlink(real_os.readlink(physical), at)
            else:
                copy_file(physical, at)
            real_os.unlink(physical)
        return at

    def cwd(self) -> str:
        """Return the current folder as the script sees it."""
        real: str = real_os.getcwd()
        return self._cwd[1] if self._cwd is not None and self._cwd[0] == real else real

    def enter(self, logical: str, physical: str) -> None:
        """Change to a folder that may lie elsewhere."""
        real_os.chdir(physical or "/")
        self._cwd = None if logical == physical else (real_os.getcwd(), logical or "/")

    def _slot(self, logical: str, size_bytes: int = 0) -> str:
        """Return an unused path for a copy, which ends in a logical path's name; needs `changing`.

        Args:
            logical: The path that will be redirected there.
            size_bytes: Size of the file that is copied; 0 if it is only moved.
        """
        store = self._store_of(logical, size_bytes)
        number = self._journal.position
        while True:
            folder = f"{store}/{number}"
            try:
                real_os.mkdir(folder, 0o700)
            except FileExistsError:
                number += 1
            else:
                return f"{folder}/{logical.rpartition('/')[2]}"

    def _store_of(self, logical: str, size_bytes: int) -> str:
        """Return the folder for a copy: on the file system where the path lies, if that is possible."""
        folder = self.physical(parent_of(logical)) or "/"
        try:
            device = real_os.stat(folder).st_dev
            if device == self._device:
                return self._store
            known = self._redirected.stores.get(device)
            if known is not None and _is_private(known):
                return known
            room = real_os.statvfs(folder)
            if room.f_bavail * room.f_frsize >= _ROOM * size_bytes:
                made = self._make_store(folder, device)
                if made is not None:
                    return made
        except OSError:
            pass
        self.commit([["elsewhere", logical]])
        return self._store

    def _make_store(self, folder: str, device: int) -> str | None:
        """Make a hidden folder in a folder or the nearest one above it; None if none can be written."""
        name = f"{_STORE_NAME}{real_os.urandom(8).hex()}"
        while folder and real_os.stat(folder).st_dev == device:
            store = f"{folder.rstrip('/')}/{name}"
            folder = parent_of(folder)
            if f"{store}/".startswith(self._caches):  # what lies there is kept
                continue
            try:
                real_os.mkdir(store, 0o700)
            except OSError:
                continue
            try:
                self.commit([["store", store]])
            except OSError:
                real_os.rmdir(store)
                raise
            return store
        return None

    def _target(self, logical: str) -> str | None:
        """Return the target of a symbolic link; None for anything else."""
        if f"{logical}/".startswith("/proc/"):  # links there are no paths: pipe:[1]
            return None
        physical = self.physical(logical)
        try:
            return None if physical is None else real_os.readlink(physical)
        except OSError:
            return None

    def _walk(self, path: str) -> str:
        """Resolve all symbolic links of an absolute path in the view."""
        left = path.split("/")[::-1]
        found = ""
        links = 0
        while left:
            name = left.pop()
            if name in {"", "."}:
                continue
            if name == "..":
                self.check_folder(found)
                found = parent_of(found)
                continue
            found = f"{found}/{name}"
            target = self._target(found)
            if target is None:
                continue
            links += 1
            if links > 40:  # as Linux: MAXSYMLINKS, path_resolution(7)
                raise error_of(errno.ELOOP)
            found = "" if target.startswith("/") else parent_of(found)
            left.extend(target.split("/")[::-1])
        return found


def _status(physical: str) -> os.stat_result | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return real_os.lstat(physical)
    return None


def _is_private(folder: str) -> bool:
    """Return whether a folder is still the one that was made: this user's, and nobody else's."""
    status = _status(folder)
    if status is None or not stat.S_ISDIR(status.st_mode):
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077
