"""Find which file formats items are read from, and what a faster format would cost for the same input."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from types import CodeType, FrameType
from typing import Any, Literal, TypeVar

import numpy as np
from torch.utils.data import DataLoader

from autotune.records.breakdown import FormatCost
from autotune.worker.extras.item_costs import draws_of
from autotune.worker.step import torch_threads

# Which calls that read files make an item: of np.loadtxt, Pillow and pyarrow, by whatever name they
# have.
#
# Watches this thread for a while; hands on the calls that were made in it, with their seconds. A
# profile function sees calls by their code, so that `from numpy import loadtxt` or another library
# in between hides none. It sees every call of Python, which slows down Python's own work: an item's
# time is not measured here, and these functions work in C.
#
# What the calls return is the user's: of most only sizes are kept, and little of what is timed
# again.


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
            begun = perf_counter()
            open_before = len(self._open)
            with suppress(
                Exception
            ):  # objects may be anything; what is raised here would end the user's item
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
            call.size = arguments["self"].size
            call.resample = arguments["resample"]
            call.to_size = (
                None
                if arguments.get("box")
                else (int(arguments["size"][0]), int(arguments["size"][1]))
            )
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
            call.rows = value.num_rows
            call.columns = value.num_columns
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


# What the formats that items are read from cost here, beside a better one for the same input.
#
# Takes a trial's loader after its items were timed; returns FormatCosts. A few items are made while
# their calls are watched; then each kind of call is timed on what the user's own calls have read,
# and so is the better way. Nothing of the user's is written: copies lie in memory, or in the
# trial's scratch. What can't be timed is left out, and noted in the debug log: it is not the user's
# fault, and never a trial's end.


_Found = TypeVar("_Found")
_LOG = logging.getLogger(__name__)
# What names no source is our own convention.
_ITEMS = 8  # watched, within _WATCH_S
_WATCH_S = 0.5
_SLOWEST_ITEM_S = 1.0  # of items that take longer nothing is measured
_TIMED = 3  # calls of each kind, and repeats of each way
_WAY_S = 0.15  # of repeats of one way, beyond the first
_KIND_S = 1.0  # of all images, or all texts, together
_REDUCING_GAP = 2.0  # times the wanted size: what Pillow's own thumbnail() drafts to, lest it shows
_CALLS_AN_ITEM = 0.5  # from so many on, an item reads its table for itself


def measure_formats(
    loader: DataLoader[Any], item_s: float, scratch: Path, ends_at: float
) -> tuple[FormatCost, ...]:
    """Time the calls that make items, and better ways, for about a second.

    Args:
        loader: What the trial has trained on; it is not iterated.
        item_s: Mean seconds of an item, as they were timed before.
        scratch: Where a copy may lie for a moment.
        ends_at: Time of perf_counter after which nothing is begun.
    """
    if item_s > _SLOWEST_ITEM_S or perf_counter() > ends_at:
        return ()
    found = list[FormatCost]()
    with torch_threads(1):
        watch = _tried(lambda: _watch_items(loader, min(ends_at, perf_counter() + _WATCH_S)))
        for way in (_texts, _images, _tables):
            if watch is None or perf_counter() > ends_at:
                break
            found += _tried(partial(way, watch, scratch)) or []
    return tuple(found)


def _tried(work: Callable[[], _Found]) -> _Found | None:
    """What the work finds; None where it raises."""
    try:
        return work()
    except Exception:  # noqa: BLE001 - the user's formats and objects may raise anything
        _LOG.debug("a format could not be timed", exc_info=True)
        return None


def _watch_items(loader: DataLoader[Any], until: float) -> Watch | None:
    """The calls of a few items; None without any. The first item, which may open files, is left out.

    The last one is made twice, also by a dataset that makes whole batches: what it does anew, it
    does at random.
    """
    draws = draws_of(loader, 1)
    draw = next(draws)
    draw()
    with watched() as watch:
        if watch is None:
            return None
        while not watch.item or (watch.item < _ITEMS and perf_counter() < until):
            draw = next(draws)
            begun = perf_counter()
            draw()
            watch.spent_s += perf_counter() - begun
            watch.item += 1
        watch.spent_s = max(watch.spent_s - watch.own_s, 0.0)
        draw()
    return watch if any(call.item < watch.item for call in watch.calls) else None


def _calls(watch: Watch, reader: str) -> list[Call]:
    """The calls that have made the items, without those of the last one's repetition."""
    return [call for call in watch.calls if call.reader == reader and call.item < watch.item]


def _texts(watch: Watch, scratch: Path) -> list[FormatCost]:
    """Text that is parsed, against the same array in a file that is mapped; both from files that lie in RAM.

    Waiting for a disk is not counted: an array may have to wait for it as well.
    """
    now = list[float]()
    better = list[float]()
    until = perf_counter() + _KIND_S
    calls = [call for call in _calls(watch, "text") if call.again is not None]
    for call in (call for call in calls if call.array is not None):
        if len(now) == _TIMED or (now and perf_counter() > until):
            break
        now.append(min(call.seconds, _usual_s(call.again, is_warm=True)))  # type: ignore[arg-type] # not None, see above
        better.append(_mapped_s(call.array, scratch))  # type: ignore[arg-type] # as above
    if not now or min(now) <= max(better):
        return []
    spent = [min(call.seconds, max(now)) for call in calls]
    return [_cost("text", watch, spent, fmean(now), fmean(better))]


def _mapped_s(array: np.ndarray[Any, Any], scratch: Path) -> float:
    """Seconds of reading all of an array from a file that is mapped."""
    with TemporaryDirectory(prefix="format-", dir=scratch) as folder:
        path = Path(folder, "array.npy")
        np.save(path, array, allow_pickle=False)
        return _usual_s(lambda: np.array(np.load(path, mmap_mode="r", allow_pickle=False)))


def _images(watch: Watch, _: Path) -> list[FormatCost]:
    """Images that are decoded whole and then made smaller, against decoding them smaller, and against small copies."""
    shrunk = list(_shrunk(watch))
    pairs = [pair for pair in shrunk if pair[0].item < watch.item and pair[0].encoded is not None]
    pairs = list(islice(filter(_is_whole, pairs), _TIMED))
    if not pairs:
        return []
    now, drafted, copied = (list[float]() for _ in range(3))
    can_draft = all(_can_draft(*pair) for pair in pairs)
    is_copied = _has_one_size(shrunk, watch.item)
    until = perf_counter() + _KIND_S
    for decoded, resized in pairs:
        encoded = decoded.encoded or b""
        size = resized.to_size or (1, 1)
        resample = resized.resample
        if now and perf_counter() > until:
            break
        now.append(_usual_s(partial(_decoded, encoded, size, resample)))
        if can_draft:
            drafted.append(_usual_s(partial(_decoded, encoded, size, resample, is_draft=True)))
        if is_copied:
            copied.append(_usual_s(partial(_decoded, _small_copy(encoded, size, resample))))
    spent = [
        both.seconds + (0.0 if one.is_inside else one.seconds)
        for one, both in shrunk
        if one.item < watch.item
    ]
    (width, height), (to_width, to_height) = pairs[0][0].size, pairs[0][1].to_size or (1, 1)
    figures = {"width": width, "height": height, "to_width": to_width, "to_height": to_height}
    return [
        _cost(kind, watch, spent, fmean(now), fmean(better), **figures)
        for kind, better in (("image_draft", drafted), ("image_copy", copied))
        if better and min(now) > max(better)
    ]


def _shrunk(watch: Watch) -> Iterator[tuple[Call, Call]]:
    """Calls that decode an image and, in the same item, make all of it smaller."""
    for decoded in watch.calls:
        if decoded.reader != "decode":
            continue
        for resized in watch.calls:
            if (
                resized.reader != "resize"
                or resized.item != decoded.item
                or resized.size != decoded.size
            ):
                continue
            to = resized.to_size
            if to is not None and to[0] * to[1] < decoded.size[0] * decoded.size[1]:
                yield decoded, resized
                break


def _has_one_size(shrunk: Sequence[tuple[Call, Call]], items: int) -> bool:
    """Whether the same rule gives each image its size, and an image has the same size each time.

    A rule is a whole size, the shorter or the longer side, or a part of the image's own size: else
    the size is drawn at random, or grows in the course of training, and a copy would have the wrong
    one.
    """
    sizes = [resized.to_size for _, resized in shrunk if resized.to_size is not None]
    parts = {
        round(16 * resized.size[0] / to[0]) for (_, resized), to in zip(shrunk, sizes, strict=True)
    }
    rules: list[set[Any]] = [{*sizes}, {min(to) for to in sizes}, {max(to) for to in sizes}, parts]
    last, again = ([r.to_size for _, r in shrunk if r.item == item] for item in (items - 1, items))
    return any(len(rule) == 1 for rule in rules) and (last == again or not again)


def _is_whole(pair: tuple[Call, Call]) -> bool:
    """Whether an image was decoded in its full size: draft() may have made it smaller already."""
    from PIL import Image

    decoded, _ = pair
    with Image.open(BytesIO(decoded.encoded or b"")) as image:
        return bool(image.size == decoded.size)


def _can_draft(decoded: Call, resized: Call) -> bool:
    """Whether an image's decoder makes it smaller for the size that is wanted."""
    from PIL import Image

    with Image.open(BytesIO(decoded.encoded or b"")) as image:
        image.draft(None, _draft_size(resized.to_size or (1, 1)))
        return bool(image.size != decoded.size)


def _draft_size(size: Size) -> Size:
    return int(size[0] * _REDUCING_GAP), int(size[1] * _REDUCING_GAP)


def _decoded(
    encoded: bytes, size: Size | None = None, resample: Any = None, *, is_draft: bool = False
) -> Any:
    from PIL import Image

    with Image.open(BytesIO(encoded)) as image:
        if size is None:
            image.load()
            return image
        if is_draft:
            image.draft(None, _draft_size(size))
        return image.resize(size, resample)


def _small_copy(encoded: bytes, size: Size, resample: Any) -> bytes:
    from PIL import Image

    with Image.open(BytesIO(encoded)) as image:
        kind = image.format
        smaller = image.resize(size, resample)
    copy = BytesIO()
    smaller.save(
        copy, kind, **({"quality": 95} if kind == "JPEG" else {})
    )  # Pillow's documentation calls more a waste
    return copy.getvalue()


def _tables(watch: Watch, _: Path) -> list[FormatCost]:
    """Tables of many rows that several items read, each for itself, against a row of a table that is read once.

    A table that one item alone reads may be all its own: a series of many steps.
    """
    read = [call for call in _calls(watch, "table") if call.rows > 1 and call.source is not None]
    items_of: dict[Any, set[int]] = {}
    for call in read:
        items_of.setdefault(call.source, set()).add(call.item)
    calls = [call for call in read if len(items_of[call.source]) > 1]
    timed = [(call, call.row_s) for call in calls if call.row_s is not None]
    if not timed or len(calls) / watch.item < _CALLS_AN_ITEM:
        return []
    now = [call.seconds for call, _ in timed]
    better = [call.seconds / call.rows + row_s for call, row_s in timed]
    if min(now) <= max(better):
        return []
    rows = timed[0][0].rows
    columns = timed[0][0].columns
    return [
        _cost(
            "parquet",
            watch,
            [call.seconds for call in calls],
            fmean(now),
            fmean(better),
            rows=rows,
            columns=columns,
        )
    ]


def _cost(
    kind: Any, watch: Watch, spent: Sequence[float], now_s: float, better_s: float, **figures: int
) -> FormatCost:
    """The cost of calls that took so long while they were watched."""
    return FormatCost(
        kind=kind,
        calls_per_item=len(spent) / watch.item,
        item_fraction=min(1.0, sum(spent) / watch.spent_s),
        now_s=now_s,
        better_s=better_s,
        figures=dict(figures),
    )


def _usual_s(work: Callable[[], object], *, is_warm: bool = False) -> float:
    """Median seconds of a few runs, after a first one that is left out; is_warm: the user's own call was that."""
    if not is_warm:
        work()
    seconds = list[float]()
    until = perf_counter() + _WAY_S
    while not seconds or (len(seconds) < _TIMED and perf_counter() < until):
        begun = perf_counter()
        work()
        seconds.append(perf_counter() - begun)
    return median(seconds)
