"""Which calls that read files make an item: of np.loadtxt, Pillow and pyarrow, by whatever name the user calls them.

Watches this thread for a while; hands on the calls that were made in it, with their seconds. A profile function sees
calls by their code, so that `from numpy import loadtxt` or another library in between hides none. It sees every call of
Python, which slows down Python's own work: an item's time is not measured here, and these functions work in C.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import CodeType, FrameType
from typing import Any, Literal

__all__ = ["Call", "Watch", "image_bytes", "watched"]

_Reader = Literal["text", "decode", "resize", "table"]
_MOST_BYTES = 64 * 2**20
"""Of an encoded image that is kept to be decoded again: our own convention."""


@dataclass(slots=True)
class Call:
    """A call that was watched."""

    reader: _Reader
    arguments: dict[str, Any]
    """By name, as it was called."""
    item: int
    """Which of the watched items it made."""
    encoded: bytes | None = None
    """Of an image that is decoded: its file."""
    is_inside: bool = False
    """Another one that is watched has made it."""
    result: Any = None
    """What it returned; None where it raised."""
    seconds: float = 0.0


@dataclass(slots=True)
class Watch:
    """The calls so far."""

    codes: dict[CodeType, _Reader]
    calls: list[Call] = field(default_factory=list)
    item: int = 0
    """Items that were made."""
    spent_s: float = 0.0
    """Seconds of all of them."""
    _open: list[tuple[FrameType, Call, float]] = field(default_factory=list)

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Take one of Python's profile events."""
        if event == "call" and frame.f_code in self.codes:
            self._begin(frame, self.codes[frame.f_code])
        elif event == "return" and self._open and self._open[-1][0] is frame:
            _, call, begun = self._open.pop()
            call.seconds, call.result = perf_counter() - begun, value
            self.calls.append(call)

    def _begin(self, frame: FrameType, reader: _Reader) -> None:
        if any(call.reader == reader for _, call, _ in self._open):
            return  # one of its own
        call = Call(reader, dict(frame.f_locals), self.item, is_inside=bool(self._open))
        if reader == "decode":
            image = call.arguments["self"]
            if not getattr(image, "tile", None):
                return  # it was decoded before
            with suppress(Exception):  # it may have come from anything; what is raised here would end the user's item
                call.encoded = image_bytes(image)
        self._open.append((frame, call, perf_counter()))


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
        ("read_table", "ParquetFile.read", "ParquetFile.read_row_group", "ParquetFile.read_row_groups"),
    ),
)


def image_bytes(image: Any) -> bytes | None:
    """The file that an image is decoded from, read beside what the user's code reads; None where it is too large."""
    path = Path(image.filename) if image.filename else None
    if path is not None and path.is_file():
        return path.read_bytes() if path.stat().st_size <= _MOST_BYTES else None
    place = image.fp.tell()
    image.fp.seek(0)
    try:
        encoded: bytes = image.fp.read(_MOST_BYTES + 1)
    finally:
        image.fp.seek(place)
    return encoded if len(encoded) <= _MOST_BYTES else None
