"""Which calls that read files make an item: of np.loadtxt, Pillow and pyarrow, by whatever name they have.

Watches this thread for a while; hands on the calls that were made in it, with their seconds. A profile function sees
calls by their code, so that `from numpy import loadtxt` or another library in between hides none. It sees every call of
Python, which slows down Python's own work: an item's time is not measured here, and these functions work in C.

What the calls return is the user's: of most only sizes are kept, and little of what is timed again.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from types import CodeType, FrameType
from typing import Any, Literal

import numpy as np

__all__ = ["Call", "Size", "Watch", "image_bytes", "watched"]

_Reader = Literal["text", "decode", "resize", "table"]
Size = tuple[int, int]
"""Width and height."""
_MOST_BYTES = 64 * 2**20
"""Of all images' files and arrays that are kept to be timed again: our own convention."""


@dataclass(slots=True, kw_only=True)
class Call:
    """A call that was watched."""

    reader: _Reader
    item: int
    """Which of the watched items it made."""
    is_inside: bool = False
    """Another one that is watched has made it."""
    seconds: float = 0.0

    again: Callable[[], Any] | None = None
    """Of a text's file: reads it once more."""
    array: np.ndarray[Any, Any] | None = None
    """What was read of it."""

    encoded: bytes | None = None
    """Of an image that is decoded: its file."""
    size: Size = (0, 0)
    """Of an image: decoded, or before it is resized."""
    to_size: Size | None = None
    """Of an image that is resized as a whole: what it becomes."""
    resample: Any = None
    """How."""

    source: Hashable = None
    """Which part of which file a table was read from; None where that is not known."""
    rows: int = 0
    columns: int = 0
    row_s: float | None = None
    """Seconds of taking a row out of the table; None where it was not timed."""


@dataclass(slots=True)
class Watch:
    """The calls so far."""

    codes: dict[CodeType, _Reader]
    calls: list[Call] = field(default_factory=list)
    item: int = 0
    """Items that were made."""
    spent_s: float = 0.0
    """Seconds of all of them."""
    own_s: float = 0.0
    """Seconds of those that watching itself took."""
    _kept_bytes: int = 0
    _open: list[tuple[FrameType, Call, float, float]] = field(default_factory=list)
    """Calls under way, when each began, and what watching itself had taken by then."""
    _sources: dict[int, Hashable] = field(default_factory=dict)
    """Files of the ParquetFiles that were opened, by their id."""

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Take one of Python's profile events."""
        if event == "call" and frame.f_code in self.codes:
            begun, open_before = perf_counter(), len(self._open)
            with suppress(Exception):  # objects may be anything; what is raised here would end the user's item
                self._begin(frame, self.codes[frame.f_code])
            now = perf_counter()
            self.own_s += now - begun
            if len(self._open) > open_before:  # its time begins where looking at it has ended
                self._open[-1] = (frame, self._open[-1][1], now, self.own_s)
        elif event == "return" and self._open and self._open[-1][0] is frame:
            ended = perf_counter()
            _, call, begun, own_s = self._open.pop()
            call.seconds = ended - begun - (self.own_s - own_s)
            self.calls.append(call)
            with suppress(Exception):  # as above
                self._end(call, frame, value)
            self.own_s += perf_counter() - ended

    def _begin(self, frame: FrameType, reader: _Reader) -> None:
        arguments = frame.f_locals
        if frame.f_code.co_name == "__init__":
            self._sources[id(arguments["self"])] = None  # one that is gone may have had its id
            self._sources[id(arguments["self"])] = _path_of(arguments["source"])
            return
        if any(call.reader == reader for _, call, *_ in self._open):
            return  # one of its own
        call = Call(reader=reader, item=self.item, is_inside=bool(self._open))
        if reader == "decode" and not getattr(arguments["self"], "tile", None):
            return  # it was decoded before
        with suppress(Exception):  # what is not known of it stays so
            self._look(call, frame.f_code.co_name, arguments)
        self._open.append((frame, call, perf_counter(), self.own_s))

    def _look(self, call: Call, name: str, arguments: dict[str, Any]) -> None:
        """Note what a call is given."""
        if call.reader == "text":
            path = _path_of(arguments["fname"])
            if path is not None:
                call.again = partial(getattr(np, name), **(arguments | {"fname": path}))
        elif call.reader == "decode":
            call.encoded = image_bytes(arguments["self"], _MOST_BYTES - self._kept_bytes)
            self._kept_bytes += len(call.encoded or b"")
        elif call.reader == "resize":
            call.size, call.resample = arguments["self"].size, arguments["resample"]
            call.to_size = None if arguments.get("box") else (int(arguments["size"][0]), int(arguments["size"][1]))
        elif "source" in arguments:
            path = _path_of(arguments["source"])
            call.source = None if path is None else (path, repr(arguments.get("filters")))
        else:  # a ParquetFile that was open before has no other that could be mistaken for it
            file = self._sources.get(id(arguments["self"]), id(arguments["self"]))
            part = arguments.get("i", arguments.get("row_groups"))
            call.source = None if file is None else (file, repr(part))

    def _end(self, call: Call, frame: FrameType, value: Any) -> None:
        """Note what a call has come to."""
        if call.reader == "text" and isinstance(value, np.ndarray):
            if call.again is not None and self._kept_bytes + value.nbytes <= _MOST_BYTES:
                call.array = value.copy()  # the user's code may change its own
                self._kept_bytes += value.nbytes
        elif call.reader == "decode":
            call.size = frame.f_locals["self"].size
        elif call.reader == "table" and value is not None:
            call.rows, call.columns = value.num_rows, value.num_columns
            if call.rows > 1 and sum(one.row_s is not None for one in self.calls) < 3:
                call.row_s = min(_row_s(value), _row_s(value))


@contextmanager
def watched() -> Iterator[Watch | None]:
    """Watch this thread's calls; None where nothing that can be watched is loaded, or somebody else profiles."""
    codes = _codes()
    if not codes or sys.getprofile() is not None:
        yield None
        return
    watch = Watch(codes)
    sys.setprofile(watch)
    try:
        yield watch
    finally:
        sys.setprofile(None)


def _codes() -> dict[CodeType, _Reader]:
    """The code of what is watched, of the libraries that the user's code has loaded."""
    found: dict[CodeType, _Reader] = {}
    for reader, module, names in _READERS:
        loaded = sys.modules.get(module)
        for name in names if loaded is not None else ():
            value: Any = loaded
            for part in name.split("."):
                value = getattr(value, part, None)
            code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
            if code is not None:
                found[code] = reader
    return found


_READERS: Iterable[tuple[_Reader, str, tuple[str, ...]]] = (
    ("text", "numpy", ("loadtxt", "genfromtxt")),
    ("decode", "PIL.ImageFile", ("ImageFile.load",)),
    ("resize", "PIL.Image", ("Image.resize",)),
    (
        "table",
        "pyarrow.parquet",
        (
            "read_table",
            "ParquetFile.__init__",
            "ParquetFile.read",
            "ParquetFile.read_row_group",
            "ParquetFile.read_row_groups",
        ),
    ),
)


def _path_of(source: Any) -> str | None:
    """The file that is read from its beginning; None where that is not known."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) and Path(name).is_file() and source.tell() == 0 else None


def _row_s(table: Any) -> float:
    """Seconds of taking one row out of a table."""
    begun = perf_counter()
    table.slice(table.num_rows // 2, 1).to_pydict()
    return perf_counter() - begun


def image_bytes(image: Any, most: int = _MOST_BYTES) -> bytes | None:
    """The file that an image is decoded from, read beside what the user's code reads; None where it is too large."""
    path = Path(image.filename) if image.filename else None
    if path is not None and path.is_file():
        return path.read_bytes() if path.stat().st_size <= most else None
    place = image.fp.tell()
    image.fp.seek(0)
    try:
        encoded: bytes = image.fp.read(most + 1)
    finally:
        image.fp.seek(place)
    return encoded if len(encoded) <= most else None
