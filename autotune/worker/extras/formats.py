"""Find the file formats that items are read from, and time a faster format on the same input.

In: a trial's loader, after its items were timed. Out: FormatCosts. A few items are made while their
calls to np.loadtxt, Pillow and pyarrow are watched; then each kind of call is timed on the data
that the user's own calls have read, and so is the better format. Nothing of the user's is written:
copies lie in memory, or in the trial's scratch folder. Calls that can't be timed are left out and
noted in the debug log; they never end a trial.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import islice
from math import prod
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from types import CodeType, FrameType
from typing import Any, Literal, TypeVar

import numpy as np
from torch.utils.data import DataLoader

from autotune.records.breakdown import FormatCost
from autotune.worker.extras.item_costs import item_fetchers
from autotune.worker.step import torch_threads

# The watch: a profile function identifies calls by their code object, so that `from numpy import
# loadtxt`, or another library in between, hides none. It slows down Python code, so items are not
# timed here; the watched functions work in C.


_Reader = Literal["text", "decode", "resize", "table"]
Size = tuple[int, int]
"""Width and height in pixels."""
_MOST_BYTES = 64 * 2**20
"""Bytes of all image files and arrays that are kept to be timed again. Source: our convention."""
_READERS: tuple[tuple[_Reader, str, tuple[str, ...]], ...] = (
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
"""Functions that read or decode files: each with the module that must be imported, and its names."""


@dataclass(slots=True, kw_only=True)
class Call:
    """A call that was watched; only its sizes and a little of its data are kept."""

    reader: _Reader
    item: int
    """Number of the watched item that it belongs to."""
    is_inside: bool = False
    """True if another watched call made it."""
    seconds: float = 0.0

    again: Callable[[], Any] | None = None
    """Text: function that reads the file again."""
    array: np.ndarray[Any, Any] | None = None
    """Text: the array that was read."""

    encoded: bytes = b""
    """Decoded image: the bytes of its file; empty if they are too many."""
    size: Size = (0, 0)
    """Image: its size after decoding, or before resizing."""
    to_size: Size = (0, 0)
    """Image resized as a whole: its new size."""
    resample: Any = None
    """Resized image: the resampling filter."""

    source: Hashable = None
    """Table: file and part of it that was read; None if unknown."""
    rows: int = 0
    columns: int = 0
    row_s: float | None = None
    """Table: seconds to take out one row; None if not timed."""


@dataclass(slots=True)
class Watch:
    """Record the watched calls of a thread; a profile function for sys.setprofile."""

    codes: dict[CodeType, _Reader]
    calls: list[Call] = field(default_factory=list)
    item: int = 0
    """Number of items made."""
    spent_s: float = 0.0
    """Seconds of all items."""
    own_s: float = 0.0
    """Seconds of these that the watch itself took."""
    _kept_bytes: int = 0
    _open: list[tuple[FrameType, Call, float, float]] = field(default_factory=list)
    """Calls under way, with the start time of each and `own_s` at that time."""
    _sources: dict[int, Hashable] = field(default_factory=dict)
    """Files of the open ParquetFiles, by id."""

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Handle one of Python's profile events."""
        if event == "call" and frame.f_code in self.codes:
            begun = perf_counter()
            open_before = len(self._open)
            with suppress(Exception):  # an exception here would end the user's item
                self._begin(frame, self.codes[frame.f_code])
            now = perf_counter()
            self.own_s += now - begun
            if len(self._open) > open_before:  # the call's time begins after the watch's own
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
            self._sources[id(arguments["self"])] = None  # an earlier object may have had this id
            self._sources[id(arguments["self"])] = _path_of(arguments["source"])
            return
        if any(call.reader == reader for _, call, *_ in self._open):
            return  # a call that the reader makes to itself
        call = Call(reader=reader, item=self.item, is_inside=bool(self._open))
        if reader == "decode" and not getattr(arguments["self"], "tile", None):
            return  # the image was decoded before
        with suppress(Exception):  # fields that can't be read stay empty
            self._look(call, frame.f_code.co_name, arguments)
        self._open.append((frame, call, perf_counter(), self.own_s))

    def _look(self, call: Call, name: str, arguments: dict[str, Any]) -> None:
        """Record the arguments of a call."""
        if call.reader == "text":
            path = _path_of(arguments["fname"])
            if path is not None:
                call.again = partial(getattr(np, name), **(arguments | {"fname": path}))
        elif call.reader == "decode":
            call.encoded = _image_bytes(arguments["self"], _MOST_BYTES - self._kept_bytes)
            self._kept_bytes += len(call.encoded)
        elif call.reader == "resize":
            call.size = arguments["self"].size
            call.resample = arguments["resample"]
            if not arguments.get("box"):  # with a box it is not resized as a whole
                width, height, *_ = arguments["size"]
                call.to_size = (int(width), int(height))
        elif "source" in arguments:
            path = _path_of(arguments["source"])
            call.source = None if path is None else (path, repr(arguments.get("filters")))
        else:  # a ParquetFile opened before the watch is identified by its id
            file = self._sources.get(id(arguments["self"]), id(arguments["self"]))
            part = arguments.get("i", arguments.get("row_groups"))
            call.source = None if file is None else (file, repr(part))

    def _end(self, call: Call, frame: FrameType, value: Any) -> None:
        """Record the result of a call."""
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
    """Watch this thread's calls; yield None if no reader is imported, or another profiler runs."""
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
    """Return the code objects of the readers in libraries that the user's code has imported."""
    found: dict[CodeType, _Reader] = {}
    for reader, module, names in _READERS:
        if sys.modules.get(module) is None:
            continue
        for name in names:
            value: Any = sys.modules[module]
            for part in name.split("."):
                value = getattr(value, part, None)
            if not callable(value):
                continue
            code = getattr(inspect.unwrap(value), "__code__", None)
            if code is not None:
                found[code] = reader
    return found


def _path_of(source: Any) -> str | None:
    """Return the path of a file that is read from its beginning; None if unknown."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    name = getattr(source, "name", None)
    if isinstance(name, str) and Path(name).is_file() and source.tell() == 0:
        return name
    return None


def _row_s(table: Any) -> float:
    """Measure the seconds to take one row out of a table."""
    begun = perf_counter()
    table.slice(table.num_rows // 2, 1).to_pydict()
    return perf_counter() - begun


def _image_bytes(image: Any, most: int) -> bytes:
    """Return the bytes of an image's file, leaving its position as it is; none above `most` bytes."""
    path = Path(image.filename) if image.filename else None
    if path is not None and path.is_file():
        return path.read_bytes() if path.stat().st_size <= most else b""
    place = image.fp.tell()
    image.fp.seek(0)
    try:
        encoded: bytes = image.fp.read(most + 1)
    finally:
        image.fp.seek(place)
    return encoded if len(encoded) <= most else b""


# The comparison with a better format


_Found = TypeVar("_Found")
_LOG = logging.getLogger(__name__)
# Numbers without a source are our convention.
_ITEMS = 8
"""Number of items to watch, within `_WATCH_S`."""
_WATCH_S = 0.5
"""Seconds to watch items for."""
_SLOWEST_ITEM_S = 1.0
"""Seconds of an item from which nothing is measured."""
_TIMED = 3
"""Number of calls of each kind, and of repeats of each format."""
_WAY_S = 0.15
"""Seconds of repeats of one format, without the first."""
_KIND_S = 1.0
"""Seconds for all images, or for all texts."""
_REDUCING_GAP = 2.0
"""Ratio of the drafted size to the wanted size at which quality does not suffer. Source: Pillow,
Image.thumbnail (reducing_gap)."""
_CALLS_AN_ITEM = 0.5
"""Table reads per item from which each item reads its own table."""


def measure_formats(
    loader: DataLoader[Any], item_s: float, scratch: Path, ends_at: float
) -> tuple[FormatCost, ...]:
    """Time the calls that make items, and better formats, for about a second.

    Args:
        loader: The trial's loader; it is not iterated.
        item_s: Mean seconds of an item, as timed before.
        scratch: A folder for temporary copies.
        ends_at: Time of perf_counter after which nothing is begun.

    Returns:
        One cost for each better format that was found to be faster.
    """
    if item_s > _SLOWEST_ITEM_S or perf_counter() > ends_at:
        return ()
    found = list[FormatCost]()
    with torch_threads(1):
        watch = _tried(lambda: _watch_items(loader, min(ends_at, perf_counter() + _WATCH_S)))
        for compare in (_texts, _images, _tables):
            if watch is None or perf_counter() > ends_at:
                break
            found += _tried(partial(compare, watch, scratch)) or []
    return tuple(found)


def _tried(work: Callable[[], _Found]) -> _Found | None:
    """Return the result of the work; None if it raises."""
    try:
        return work()
    except Exception:  # noqa: BLE001 - the user's formats and objects may raise anything
        _LOG.debug("a format could not be timed", exc_info=True)
        return None


def _watch_items(loader: DataLoader[Any], until: float) -> Watch | None:
    """Watch the calls of a few items; return None if there are none.

    The first item, which may open files, is left out. The last item is made twice, so that calls
    with random arguments show up as different.
    """
    draws = item_fetchers(loader, 1)
    next(draws)()
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
    """Return the calls of one reader, without those of the repeated last item."""
    return [call for call in watch.calls if call.reader == reader and call.item < watch.item]


def _texts(watch: Watch, scratch: Path) -> list[FormatCost]:
    """Compare parsing text with mapping a file of the same array; both files lie in RAM.

    Waits for a disk are left out: an array would have to wait for it as well.
    """
    now = list[float]()
    better = list[float]()
    until = perf_counter() + _KIND_S
    calls = [call for call in _calls(watch, "text") if call.again is not None]
    for call in calls:
        if len(now) == _TIMED or (now and perf_counter() > until):
            break
        if call.again is not None and call.array is not None:
            now.append(min(call.seconds, _usual_s(call.again, is_warm=True)))
            better.append(_mapped_s(call.array, scratch))
    spent = [min(call.seconds, max(now, default=0.0)) for call in calls]
    return _costs("text", watch, spent, now, better)


def _mapped_s(array: np.ndarray[Any, Any], scratch: Path) -> float:
    """Measure the seconds to read a whole array from a mapped file."""
    with TemporaryDirectory(prefix="format-", dir=scratch) as folder:
        path = Path(folder, "array.npy")
        np.save(path, array, allow_pickle=False)
        return _usual_s(lambda: np.array(np.load(path, mmap_mode="r", allow_pickle=False)))


def _images(watch: Watch, _: Path) -> list[FormatCost]:
    """Compare decoding images in full size with decoding them smaller, and with smaller copies."""
    # Choose some images that were decoded in full size and then made smaller.
    shrunk = list(_shrunk(watch))
    pairs = [pair for pair in shrunk if pair[0].item < watch.item and pair[0].encoded]
    pairs = list(islice(filter(_is_whole, pairs), _TIMED))
    if not pairs:
        return []

    # Time the present way, and those of the two better ones that are possible.
    now = list[float]()
    drafted = list[float]()
    copied = list[float]()
    can_draft = all(_can_draft(*pair) for pair in pairs)
    is_copied = _has_one_size(shrunk, watch.item)
    until = perf_counter() + _KIND_S
    for decoded, resized in pairs:
        if now and perf_counter() > until:
            break
        shrink = partial(_decoded, decoded.encoded, resized.to_size, resized.resample)
        now.append(_usual_s(shrink))
        if can_draft:
            drafted.append(_usual_s(partial(shrink, is_draft=True)))
        if is_copied:
            copied.append(_usual_s(partial(_decoded, _small_copy(decoded.encoded, shrink()))))

    # Add up the seconds of all such calls; resizing may contain decoding.
    spent = [
        resized.seconds + (0.0 if decoded.is_inside else decoded.seconds)
        for decoded, resized in shrunk
        if decoded.item < watch.item
    ]
    decoded, resized = pairs[0]
    width, height = decoded.size
    to_width, to_height = resized.to_size
    figures = {"width": width, "height": height, "to_width": to_width, "to_height": to_height}
    return [
        *_costs("image_draft", watch, spent, now, drafted, **figures),
        *_costs("image_copy", watch, spent, now, copied, **figures),
    ]


def _shrunk(watch: Watch) -> Iterator[tuple[Call, Call]]:
    """Yield calls that decode an image, each with the call of its item that makes it smaller."""
    resizing = [call for call in watch.calls if call.reader == "resize"]
    for decoded in watch.calls:
        if decoded.reader != "decode":
            continue
        for resized in resizing:
            is_same = (resized.item, resized.size) == (decoded.item, decoded.size)
            if is_same and 0 < prod(resized.to_size) < prod(decoded.size):
                yield decoded, resized
                break


def _has_one_size(shrunk: Sequence[tuple[Call, Call]], items: int) -> bool:
    """Return whether one rule gives all images their sizes, so that copies can have them.

    The rule may be a fixed size, a fixed shorter or longer side, or a fixed ratio to the image's
    size. Otherwise the size is random, or grows in the course of training. The last item, made
    twice, must have the same sizes both times.

    Args:
        shrunk: Calls that decode, and the calls that make the images smaller.
        items: Number of items; also the number of the repeated one.
    """
    rules: list[Callable[[Call], object]] = [
        lambda resized: resized.to_size,
        lambda resized: min(resized.to_size),
        lambda resized: max(resized.to_size),
        lambda resized: round(16 * resized.size[0] / resized.to_size[0]),
    ]
    has_rule = any(len({rule(resized) for _, resized in shrunk}) == 1 for rule in rules)
    last = [resized.to_size for _, resized in shrunk if resized.item == items - 1]
    again = [resized.to_size for _, resized in shrunk if resized.item == items]
    return has_rule and (last == again or not again)


def _is_whole(pair: tuple[Call, Call]) -> bool:
    """Return whether an image was decoded in full size; draft() may have made it smaller."""
    from PIL import Image

    decoded, _ = pair
    with Image.open(BytesIO(decoded.encoded)) as image:
        return bool(image.size == decoded.size)


def _can_draft(decoded: Call, resized: Call) -> bool:
    """Return whether an image's decoder can decode it in a smaller size, near the wanted one."""
    from PIL import Image

    with Image.open(BytesIO(decoded.encoded)) as image:
        image.draft(None, _draft_size(resized.to_size))
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


def _small_copy(encoded: bytes, smaller: Any) -> bytes:
    """Return a smaller image in the format of its original."""
    from PIL import Image

    with Image.open(BytesIO(encoded)) as image:
        kind = image.format
    copy = BytesIO()
    # Pillow's documentation advises against a JPEG quality above 95.
    options = {"quality": 95} if kind == "JPEG" else {}
    smaller.save(copy, kind, **options)
    return copy.getvalue()


def _tables(watch: Watch, _: Path) -> list[FormatCost]:
    """Compare reading a whole table for each item with taking a row of a table that is read once.

    Only tables that several items read count: one that a single item reads may be all its own (a
    time series).
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
    spent = [call.seconds for call in calls]
    figures = {"rows": timed[0][0].rows, "columns": timed[0][0].columns}
    return _costs("parquet", watch, spent, now, better, **figures)


def _costs(
    kind: Any,
    watch: Watch,
    spent: Sequence[float],
    now: Sequence[float],
    better: Sequence[float],
    **figures: int,
) -> list[FormatCost]:
    """Return the cost of calls, or nothing if the better way was not faster each time.

    Args:
        kind: Kind of the better way.
        watch: The watch.
        spent: Seconds of each call while it was watched.
        now: Seconds of some calls, timed again.
        better: Seconds of the better way for each of these; none if it is not possible.
        figures: Sizes of the data.
    """
    if not better or min(now) <= max(better):
        return []
    cost = FormatCost(
        kind=kind,
        calls_per_item=len(spent) / watch.item,
        item_fraction=min(1.0, sum(spent) / watch.spent_s),
        now_s=fmean(now),
        better_s=fmean(better),
        figures=dict(figures),
    )
    return [cost]


def _usual_s(work: Callable[[], object], *, is_warm: bool = False) -> float:
    """Return the median seconds of a few runs; a first run is left out unless `is_warm`."""
    if not is_warm:
        work()
    seconds = list[float]()
    until = perf_counter() + _WAY_S
    while not seconds or (len(seconds) < _TIMED and perf_counter() < until):
        begun = perf_counter()
        work()
        seconds.append(perf_counter() - begun)
    return median(seconds)
