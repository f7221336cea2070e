"""Map the script's paths to scratch: what exists stays unchanged, what the trial changes is a copy."""

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
from autotune.worker.script.files.real import opened, real_os

# Paths as scripts give them, and the errors that are raised about them.


AnyPath = str | bytes | os.PathLike[Any]


class ErrorsName:
    """Have OSErrors within a block name the paths that the script gave."""

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
    return isinstance(path, int) or (
        hasattr(path, "__index__") and not isinstance(path, str | bytes)
    )


def parent_of(logical: str) -> str:
    """Return the folder of a logical path; the root is the empty text."""
    return logical[: logical.rfind("/")] if logical else ""


def error_of(number: int) -> OSError:
    """Return the exception that the system's call would raise."""
    return OSError(number, os.strerror(number))


def is_dots(text: str) -> bool:
    """Return whether a path ends in no name: `/`, `.` or `..`."""
    return text.rstrip("/").rpartition("/")[2] in {"", ".", ".."}


# What a trial's processes have redirected so far, on disk: lines that each of them appends and the
# others read.
#
# The journal's length lies in a small file that every process maps, so that seeing whether there
# are new lines is cheap. Changes hold a lock, reads none.


STAMP_BYTES = 8
Record = list[str | int | None]


class Journal:
    """A trial's journal, as one process sees it."""

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
                    fcntl.lockf(
                        descriptor, fcntl.LOCK_EX
                    )  # a fork does not inherit it, as it would flock's
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
        """Write records whole or not at all; needs the lock, and everything read.

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
        with opened(
            self._stamp_path, os.O_WRONLY
        ) as descriptor:  # through the map, a full disk would be a SIGBUS
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


# What a trial has redirected so far: a map from logical paths to physical ones, and what it has
# made itself.
#
# Comes in: the records of the journal, in their order. Goes out: where a logical path is, whether
# the trial has made it.


class Redirections:
    """The state to which a journal leads; read without a lock, each read being one step of a dict."""

    def __init__(self) -> None:
        self._map: dict[str, str | None] = {}
        self._made = Made()

    def __bool__(self) -> bool:
        return bool(self._map)

    def __contains__(self, logical: str) -> bool:
        return logical in self._map

    def physical(self, logical: str) -> str | None:
        """Return where a logical path is or would be; None where it or a folder above was removed."""
        head = logical
        redirected = self._map
        while head and head not in redirected:
            head = head[: head.rfind("/")]
        if not head:
            return logical
        to = redirected[head]
        return None if to is None else f"{to}{logical[len(head) :]}"

    def is_made(self, physical: str) -> bool:
        """Return whether the trial has made it, or a folder above it."""
        while physical and physical not in self._made:
            physical = physical[: physical.rfind("/")]
        return bool(physical)

    def inside(self, folder: str) -> dict[str, bool]:
        """Return the names in a folder that are redirected, and whether they are to be seen."""
        placed = ((key.rpartition("/"), value) for key, value in list(self._map.items()))
        return {name: value is not None for (above, _, name), value in placed if above == folder}

    def apply(self, records: list[Record]) -> None:
        """Learn what was redirected, in the order in which it was."""
        for kind, first, *rest in records:
            path = str(first)
            if kind == "map":
                self._map[path] = None if rest[0] is None else str(rest[0])
            elif kind == "unmap":
                self._map.pop(path, None)
            elif kind == "unmap_below":
                for key in self._below(path):
                    del self._map[key]
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


# Copies a file to scratch, sharing its blocks where the file system can.


_COPY_BYTES = 1 << 30
_CANT_SHARE = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
)  # copy_file_range(2), of two file systems, or of one that can't


def copy_file(source: str, to: str, *, is_empty: bool = False) -> None:
    """Copy a file's bytes, permissions and times to a physical path where there is nothing.

    Args:
        source: The file's physical path.
        to: That of the copy.
        is_empty: Copy the permissions alone, since the script truncates it anyway.

    Raises:
        OSError: As the system says.
    """
    status = real_os.stat(source)
    with opened(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as out:
        if not is_empty:
            with opened(source, os.O_RDONLY) as read:
                _copy_bytes(read, out)
        with suppress(OSError):  # only root may give it to another
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


# Where a path of the script really lies, and which paths the trial may change there.
#
# Comes in: paths as the script gives them. Goes out: *logical* paths (absolute, without symbolic
# links, as the script sees the tree) and *physical* ones (where the bytes are). What was redirected
# is mapped: a file to its copy in scratch, a renamed file or folder to where it has always been, a
# removed one to None; what lies below a mapped folder follows. The trial's own are paths in
# scratch, what it has made itself, and what lies below a folder that it has made.


class View:
    """The map of a trial, as one process sees it."""

    def __init__(self, scratch: str, free: tuple[str, ...], caches: tuple[str, ...] = ()) -> None:
        self.scratch = scratch
        self._store = f"{scratch}/files"
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
        """Whether every path is where it is: the one thing that a read asks first."""
        return self._stamp[:STAMP_BYTES] == self._idle or self._synced()

    def forked(self) -> None:
        """In a child: another thread of the parent may have been amidst a change."""
        self._journal.forked()
        self._reading = threading.RLock()
        self._redirected = Redirections()
        self._links = {}
        self._read = b""
        self._idle = b""

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Alone in the trial, and with all that was changed before."""
        with self._journal.locked():
            self._synced()
            yield

    def commit(self, records: list[Record]) -> None:
        """Make a change known to the trial's processes, this one too; needs `changing`, and what is new to be there."""
        for record in records:
            if record[0] in {"journal", "new", "kept"}:
                status = _status(str(record[1]))
                record[2:] = (
                    () if status is None else (status.st_dev, status.st_ino, status.st_mtime_ns)
                )
        if records:
            with self._reading:
                self._journal.append(records)
                self._learn(records, self._stamp[:STAMP_BYTES])

    def _synced(self) -> bool:
        if self._stamp[:STAMP_BYTES] != self._read:
            with self._reading:
                stamp = self._stamp[
                    :STAMP_BYTES
                ]  # before the records: a later one is seen at the next look
                self._learn(self._journal.unread(), stamp)
        return not self._redirected

    def _learn(self, records: list[Record], stamp: bytes) -> None:
        self._redirected.apply(records)
        self._links = {}
        self._read = stamp
        self._idle = b"" if self._redirected else stamp

    def logical(self, path: str, dir_fd: int | None = None, *, follow: bool = True) -> str:
        """A path as the script sees the tree; the last name's symbolic link is followed where that is wanted.

        Raises:
            OSError: symbolic links lead in a circle, or `..` leaves what is no folder.
        """
        if not path.startswith("/"):
            path = f"{self.cwd() if dir_fd is None else real_os.readlink(f'/proc/self/fd/{dir_fd}')}/{path}"
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
        """Where a logical path is or would be; None where it or a folder above was removed."""
        return self._redirected.physical(logical)

    def seen(self, path: AnyPath, dir_fd: int | None = None, *, follow: bool = True) -> str:
        """The path on which a read really works; where the script sees none, one that does not exist."""
        text = text_of(path)
        if not text:
            return text
        logical = self.logical(text, dir_fd, follow=follow)
        found = self.physical(logical)
        end = "/" if text.endswith("/") else ""
        return f"{self.scratch}/none" if found is None else f"{found or '/'}{end}"

    def is_own(self, physical: str) -> bool:
        """Whether the trial may change what lies there."""
        return self.is_free(physical) or self._redirected.is_made(physical)

    def is_free(self, physical: str) -> bool:
        """Whether it lies in a folder of the trial's own, where nothing is recorded."""
        return f"{physical}/".startswith(self._free)

    def is_stored(self, physical: str) -> bool:
        """Whether it lies in scratch."""
        return f"{physical}/".startswith(self._free[0])

    def beneath(self, logical: str) -> str | None:
        """Where a logical path would be if it were not redirected itself."""
        parent = self.physical(parent_of(logical))
        return None if parent is None else f"{parent}/{logical.rpartition('/')[2]}"

    def status(self, logical: str) -> os.stat_result | None:
        """What lies at a logical path, symbolic links not followed; None where there is nothing."""
        physical = self.physical(logical)
        return None if physical is None else _status(physical or "/")

    def names(self, logical: str) -> list[str]:
        """What the script sees in a folder."""
        physical = self.physical(logical)
        names = dict.fromkeys(
            real_os.listdir(f"{self.scratch}/none" if physical is None else physical or "/")
        )
        for name, is_seen in self._redirected.inside(logical).items():
            if is_seen:
                names[name] = None
            else:
                names.pop(name, None)
        return list(names)

    def is_plain(self, logical: str) -> bool:
        """Whether a folder is where it is, with everything in it."""
        return self.physical(logical) == logical and not self._redirected.inside(logical)

    def create(self, logical: str, make: Callable[[str], Any]) -> Any:
        """Make something where there is nothing; needs `changing`.

        Raises:
            OSError: as `make` does; or scratch can't be written, and nothing is made.
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
        """Where something new is to lie (where the script wants it, if that is free), and what is then to be known."""
        parent = self.folder_of(logical)
        beneath = f"{parent}/{logical.rpartition('/')[2]}"
        if _status(beneath) is None and (beneath == logical or self.is_own(parent)):
            records: list[Record] = [["unmap", logical]] if logical in self._redirected else []
            return beneath, [*records, *self.made(beneath)]
        at = self._slot(logical)
        return at, [["map", logical, at]]

    def made(self, physical: str) -> list[Record]:
        """What is to be known of something that the trial has made there: whether it is to be removed or kept."""
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
        """The physical folder in which something new is to appear.

        Raises:
            OSError: there is none, or it can't be written.
        """
        self.check_folder(parent_of(logical))
        parent = self.physical(parent_of(logical)) or ""
        if not real_os.access(parent or "/", os.W_OK | os.X_OK, effective_ids=True):
            raise error_of(errno.EACCES)
        return parent

    def check_folder(self, logical: str) -> None:
        """Raise what the system would where a folder is none."""
        is_there = True
        while (status := self.status(logical)) is None:
            logical = parent_of(logical)
            is_there = False
        if not stat.S_ISDIR(status.st_mode):
            raise error_of(errno.ENOTDIR)
        if not is_there:
            raise error_of(errno.ENOENT)

    def copy(self, logical: str, physical: str, *, is_empty: bool = False) -> str:
        """Redirect a file to a copy in scratch; needs `changing`.

        Raises:
            OSError: the file can't be read, or scratch can't be written or is full.
        """
        at = self._slot(logical)
        try:
            copy_file(physical, at, is_empty=is_empty)
            self.commit([["map", logical, at]])
        except OSError:
            with suppress(OSError):
                real_os.unlink(at)
            raise
        return at

    def hide(self, logical: str) -> Record:
        """What is to be known once nothing is to be seen at a logical path any more."""
        beneath = self.beneath(logical)
        is_there = beneath is not None and _status(beneath) is not None
        return ["map", logical, None] if is_there else ["unmap", logical]

    def stow(self, logical: str, physical: str) -> str:
        """Move something of the trial's own to scratch; a folder on another disk stays where it is."""
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
        """The current folder as the script sees it."""
        real: str = real_os.getcwd()
        return self._cwd[1] if self._cwd is not None and self._cwd[0] == real else real

    def enter(self, logical: str, physical: str) -> None:
        """Change to a folder that may lie elsewhere."""
        real_os.chdir(physical or "/")
        self._cwd = None if logical == physical else (real_os.getcwd(), logical or "/")

    def _slot(self, logical: str) -> str:
        number = self._journal.position
        while True:
            folder = f"{self._store}/{number}"
            try:
                real_os.mkdir(folder, 0o700)
            except FileExistsError:
                number += 1
            else:
                return f"{folder}/{logical.rpartition('/')[2]}"

    def _target(self, logical: str) -> str | None:
        if f"{logical}/".startswith("/proc/"):  # its links are no paths: pipe:[1]
            return None
        physical = self.physical(logical)
        try:
            return None if physical is None else real_os.readlink(physical)
        except OSError:
            return None

    def _walk(self, path: str) -> str:
        """An absolute path with its symbolic links resolved in the view."""
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
