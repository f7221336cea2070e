"""What a process has done to the files of a folder, call by call, and the folder that a power cut would have left.

Comes in: a command, which runs under strace, and the folder it writes. Goes out: Steps, and folders that are made from
the first so many of them. What was not synced may be there, gone, or torn; so may names, until their folder is synced.
Source: man 2 fsync, rename; man 1 strace.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

__all__ = ["LOSSES", "Loss", "Step", "left_by_power_cut", "record_steps"]

Kind = Literal["create", "write", "truncate", "sync", "sync names", "rename", "unlink", "told"]
Loss = Literal["nothing", "all unsynced", "unsynced data", "torn"]
LOSSES: tuple[Loss, ...] = ("nothing", "all unsynced", "unsynced data", "torn")
"""nothing: the process was killed, the machine ran on. unsynced data: names are there, as after a rename without a sync
before it. torn: of what was not synced, some is there, and one write as far as a byte within."""

_UNREAD = (
    "creat",
    "writev",
    "pwritev",
    "pwritev2",
    "truncate",
    "copy_file_range",
    "sendfile",
    "link",
    "linkat",
)
"""Calls that would change a file as well: none is made today."""
_CALLS = (
    "open,openat,lseek,write,pwrite64,fsync,fdatasync,ftruncate,rename,renameat,renameat2,unlink,unlinkat,"
    f"{','.join(_UNREAD)}"
)
_LINE = re.compile(r"^(?P<at>\d+\.\d+) (?P<call>\w+)\((?P<given>.*)\) += (?P<answer>-?\d+)")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"^(\d+)<")
_LARGEST = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call that changes a file of the folder, or what was told on standard output."""

    kind: Kind
    name: str = ""
    """Relative to the folder; of "told" what was written."""
    to: str = ""
    """The new name of a "rename"."""
    offset: int = 0
    """Of a "write"; of a "truncate" the new length."""
    data: bytes = b""


@dataclass(slots=True)
class _File:
    """A file without its name."""

    synced: bytes = b""
    pending: list[Step] = field(default_factory=list)

    def content(self, loss: Loss, random: Random) -> bytes:
        """Its bytes after a power cut."""
        if loss in {"all unsynced", "unsynced data"}:
            return self.synced
        kept = self.pending
        if loss == "torn" and kept:
            kept = [step for step in kept if random.random() < 0.5]
            if kept and kept[-1].kind == "write":
                last = kept[-1]
                cut = last.data[: random.randrange(len(last.data) + 1)]
                kept[-1] = Step(kind="write", name=last.name, offset=last.offset, data=cut)
        return _applied(self.synced, kept)


def record_steps(
    command: Sequence[str], folder: Path, notes: Path, environment: Mapping[str, str]
) -> list[Step]:
    """Run a command under strace; what it did to the files right below a folder, in order.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    notes.mkdir()
    trace = [
        "strace",
        "-ff",
        "-ttt",
        "-y",
        "-xx",
        "-s",
        str(_LARGEST),
        "-e",
        f"trace={_CALLS}",
        "-o",
        f"{notes}/calls",
    ]
    subprocess.run([*trace, *command], env=dict(environment), check=True, stdout=subprocess.DEVNULL)
    lines = [
        line
        for path in notes.glob("calls.*")
        for line in path.read_text(errors="replace").splitlines()
    ]
    calls = sorted(
        (found for line in lines if (found := _LINE.match(line))),
        key=lambda found: float(found["at"]),
    )
    reader = _Reader(folder.absolute())
    return [step for call in calls if int(call["answer"]) >= 0 for step in reader.steps(call)]


def left_by_power_cut(steps: Sequence[Step], folder: Path, loss: Loss, random: Random) -> None:
    """Make the folder that is left after these steps."""
    names: dict[str, _File] = {}
    synced_names: dict[str, _File] = {}
    for step in steps:
        if step.kind == "sync names":
            synced_names = dict(names)
        elif step.kind == "rename":
            names[step.to] = names.pop(step.name)
        elif step.kind == "unlink":
            names.pop(step.name, None)
        elif step.kind == "create":
            names.setdefault(step.name, _File())
        elif step.kind in {"write", "truncate"}:
            names[step.name].pending.append(step)
        elif step.kind == "sync":
            file = names[step.name]
            file.synced, file.pending = _applied(file.synced, file.pending), []
    folder.mkdir(parents=True)
    for name, file in (synced_names if loss == "all unsynced" else names).items():
        (folder / name).write_bytes(file.content(loss, random))


def _applied(content: bytes, steps: Sequence[Step]) -> bytes:
    known = bytearray(content)
    for step in steps:
        if step.kind == "truncate":
            known[step.offset :] = bytes(max(0, step.offset - len(known)))
        else:
            known.extend(bytes(max(0, step.offset - len(known))))
            known[step.offset : step.offset + len(step.data)] = step.data
    return bytes(known)


class _Reader:
    """Reads calls in order: knows which descriptor stands where in which file of the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}
        self._at: dict[int, int] = {}
        self._appends: set[int] = set()
        self._read: Mapping[str, Callable[[re.Match[str]], Iterator[Step]]] = {
            "open": self._open,
            "openat": self._open,
            "lseek": self._seek,
            "write": self._write,
            "pwrite64": self._write,
            "fsync": self._sync,
            "fdatasync": self._sync,
            "ftruncate": self._truncate,
            "rename": self._rename,
            "renameat": self._rename,
            "renameat2": self._rename,
            "unlink": self._unlink,
            "unlinkat": self._unlink,
        }

    def steps(self, call: re.Match[str]) -> Iterator[Step]:
        """What a call does to the folder's files: mostly nothing, since most calls are about others."""
        is_elsewhere = (
            str(self._folder) not in call["given"] and _hex(str(self._folder)) not in call["given"]
        )
        if call["call"] == "write" and call["given"].startswith("1<"):
            yield Step(kind="told", name=_strings(call["given"])[0].decode())
        elif not is_elsewhere and call["call"] in _UNREAD:
            raise NotImplementedError(f"{call['call']} changes a file, and is not replayed")
        elif not is_elsewhere:
            yield from self._read[call["call"]](call)

    def _open(self, call: re.Match[str]) -> Iterator[Step]:
        name, descriptor = self._name(_strings(call["given"])[0].decode()), int(call["answer"])
        if name is None or "O_DIRECTORY" in call["given"]:
            return
        self._at[descriptor] = 0
        (self._appends.add if "O_APPEND" in call["given"] else self._appends.discard)(descriptor)
        if "O_CREAT" in call["given"] and name not in self._sizes:
            self._sizes[name] = 0
            yield Step(kind="create", name=name)
        if "O_TRUNC" in call["given"] and self._sizes.get(name):
            self._sizes[name] = 0
            yield Step(kind="truncate", name=name)

    def _seek(self, call: re.Match[str]) -> Iterator[Step]:
        self._at[_descriptor(call)] = int(call["answer"])
        yield from ()

    def _write(self, call: re.Match[str]) -> Iterator[Step]:
        name = self._opened(call)
        if name is None:
            return
        descriptor, written = _descriptor(call), int(call["answer"])
        data = _strings(call["given"])[0][:written]
        if call["call"] == "pwrite64":
            offset = int(call["given"].rpartition(",")[2])
        else:
            offset = self._sizes[name] if descriptor in self._appends else self._at[descriptor]
            self._at[descriptor] = offset + written
        self._sizes[name] = max(self._sizes[name], offset + written)
        yield Step(kind="write", name=name, offset=offset, data=data)

    def _sync(self, call: re.Match[str]) -> Iterator[Step]:
        if _opened_path(call) == str(self._folder):
            yield Step(kind="sync names")
        elif (name := self._opened(call)) is not None:
            yield Step(kind="sync", name=name)

    def _truncate(self, call: re.Match[str]) -> Iterator[Step]:
        if (name := self._opened(call)) is not None:
            self._sizes[name] = length = int(call["given"].rpartition(",")[2])
            yield Step(kind="truncate", name=name, offset=length)

    def _rename(self, call: re.Match[str]) -> Iterator[Step]:
        name, to = (self._name(text.decode()) for text in _strings(call["given"])[:2])
        if name is not None and to is not None:
            self._sizes[to] = self._sizes.pop(name)
            yield Step(kind="rename", name=name, to=to)

    def _unlink(self, call: re.Match[str]) -> Iterator[Step]:
        name = self._name(_strings(call["given"])[0].decode())
        if name is not None and self._sizes.pop(name, None) is not None:
            yield Step(kind="unlink", name=name)

    def _opened(self, call: re.Match[str]) -> str | None:
        name = self._name(_opened_path(call))
        return name if name in self._sizes else None

    def _name(self, path: str) -> str | None:
        """Of a file right in the folder; SQLite's index of its log is memory, and is made anew after a cut."""
        known = Path(path)
        is_ours = known.parent == self._folder and not known.name.endswith("-shm")
        return known.name if is_ours else None


def _strings(given: str) -> list[bytes]:
    return [bytes.fromhex(text.replace("\\x", "")) for text in _STRING.findall(given)]


def _hex(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


def _descriptor(call: re.Match[str]) -> int:
    found = _DESCRIPTOR.match(call["given"])
    return int(found[1]) if found else -1


def _opened_path(call: re.Match[str]) -> str:
    """Of the descriptor that a call is given, as strace shows it in angle brackets."""
    text = call["given"].partition("<")[2].partition(">")[0]
    return bytes.fromhex(text.replace("\\x", "")).decode() if text.startswith("\\x") else text
