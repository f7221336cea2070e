"""What the formats that items are read from cost here, beside a better one for the same input.

Takes a trial's loader after its items were timed; hands on FormatCosts. A few items are made while their calls are
watched; then each kind of call is timed on what the user's own calls have read, and so is the better way. Nothing of
the user's is written: copies lie in memory, or in the trial's scratch. What can't be timed is left out, and noted in
the debug log: it is not the user's fault, and never a trial's end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import DataLoader

from autotune.records.breakdown import FormatCost
from autotune.worker.after_window.format_watch import Call, Watch, watched
from autotune.worker.after_window.item_costs import draws_of
from autotune.worker.measure.step import torch_threads

__all__ = ["measure_formats"]

_Found = TypeVar("_Found")
_LOG = logging.getLogger(__name__)
# What names no source is our own convention.
_ITEMS = 8  # watched, within _WATCH_S
_WATCH_S = 0.5
_SLOWEST_ITEM_S = 1.0  # of items that take longer nothing is measured
_TIMED = 3  # calls of each kind, and repeats of each way
_WAY_S = 0.15  # of repeats of one way, beyond the first
_KIND_S = 1.0  # of all images together
_MOST_BYTES = 64 * 2**20  # of an array that is written to the scratch
_REDUCING_GAP = 2.0  # times the wanted size: what Pillow's own thumbnail() drafts to, lest it shows
_JPEG_QUALITY = 95  # Pillow's documentation calls more than that a waste
_CALLS_AN_ITEM = 0.5  # from so many on, an item reads its table for itself


def measure_formats(loader: DataLoader[Any], item_s: float, scratch: Path, ends_at: float) -> tuple[FormatCost, ...]:
    """Time the calls that make items, and better ways, for about a second.

    Args:
        loader: What the trial has trained on; it is not iterated.
        item_s: Mean seconds of an item, as they were timed before.
        scratch: Where a copy may lie for a moment.
        ends_at: Time of perf_counter after which nothing is begun.
    """
    if item_s > _SLOWEST_ITEM_S or perf_counter() > ends_at:
        return ()
    with torch_threads(1):
        watch = _tried(lambda: _watch_items(loader, min(ends_at, perf_counter() + _WATCH_S)))
        if watch is None:
            return ()
        found = [_tried(partial(way, watch, scratch)) or [] for way in (_texts, _images, _tables)]
    return tuple(cost for costs in found for cost in costs)


def _tried(work: Callable[[], _Found]) -> _Found | None:
    """What the work finds; None where it raises."""
    try:
        return work()
    except Exception:  # noqa: BLE001 - the user's formats and objects may raise anything
        _LOG.debug("a format could not be timed", exc_info=True)
        return None


def _watch_items(loader: DataLoader[Any], until: float) -> Watch | None:
    """The calls of a few items; None without any. The first item, which may open files, is left out."""
    draws: Iterator[Callable[[], list[Any]]] = draws_of(loader)
    next(draws)()
    with watched() as watch:
        while watch is not None and watch.item < _ITEMS and perf_counter() < until:
            begun = perf_counter()
            watch.item += len(next(draws)())
            watch.spent_s += perf_counter() - begun
    return watch if watch is not None and watch.calls else None


def _texts(watch: Watch, scratch: Path) -> list[FormatCost]:
    """Text that is parsed, against the same array in a file that is mapped."""
    calls = [call for call in watch.calls if call.reader == "text" and isinstance(call.result, np.ndarray)]
    chosen = [call for call in calls if call.result.nbytes <= _MOST_BYTES][:_TIMED]
    if not chosen:
        return []
    better = [_mapped_s(call.result, scratch) for call in chosen]
    if min(call.seconds for call in chosen) <= max(better):
        return []
    return [
        _cost("text", watch, [call.seconds for call in calls], fmean(call.seconds for call in chosen), fmean(better))
    ]


def _mapped_s(array: np.ndarray[Any, Any], scratch: Path) -> float:
    """Seconds of reading all of an array from a file that is mapped."""
    with TemporaryDirectory(prefix="format-", dir=scratch) as folder:
        path = Path(folder, "array.npy")
        np.save(path, array, allow_pickle=False)
        return _mean_s(lambda: np.array(np.load(path, mmap_mode="r", allow_pickle=False)))


def _images(watch: Watch, _: Path) -> list[FormatCost]:
    """Images that are decoded whole and then made smaller, against decoding them smaller, and against small copies."""
    pairs = list(islice(filter(_is_whole, _shrunk(watch)), _TIMED))
    if not pairs:
        return []
    now, drafted, copied = (list[float]() for _ in range(3))
    until = perf_counter() + _KIND_S
    for decoded, resized in pairs:
        size, resample = resized.arguments["size"], resized.arguments["resample"]
        if now and perf_counter() > until:
            break
        encoded: bytes = decoded.encoded or b""
        now.append(_mean_s(lambda data=encoded, to=size, by=resample: _decoded(data, to, by)))  # type: ignore[misc]
        drafted.append(_mean_s(lambda data=encoded, to=size, by=resample: _decoded(data, to, by, True)))  # type: ignore[misc]
        small = _small_copy(encoded, size, resample)
        copied.append(_mean_s(lambda data=small: _decoded(data)))  # type: ignore[misc]
    found = list[FormatCost]()
    spent = [both.seconds + (0.0 if one.is_inside else one.seconds) for one, both in _shrunk(watch)]
    width, height = pairs[0][0].arguments["self"].size
    to_width, to_height = map(int, pairs[0][1].arguments["size"])
    figures = {"width": width, "height": height, "to_width": to_width, "to_height": to_height}
    if min(now) > max(drafted):
        found.append(_cost("image_draft", watch, spent, fmean(now), fmean(drafted), **figures))
    if min(now) > max(copied):
        found.append(_cost("image_copy", watch, spent, fmean(now), fmean(copied), **figures))
    return found


def _shrunk(watch: Watch) -> Iterator[tuple[Call, Call]]:
    """Calls that decode an image and, in the same item, make all of it smaller."""
    for decoded in watch.calls:
        if decoded.reader != "decode" or decoded.encoded is None:
            continue
        size = decoded.arguments["self"].size
        for resized in watch.calls:
            to = resized.arguments.get("size")
            if resized.reader != "resize" or resized.item != decoded.item or resized.arguments["self"].size != size:
                continue
            if to is not None and to[0] * to[1] < size[0] * size[1] and not resized.arguments.get("box"):
                yield decoded, resized
                break


def _is_whole(pair: tuple[Call, Call]) -> bool:
    """Whether an image was decoded in its full size: draft() may have made it smaller already."""
    from PIL import Image

    decoded, _ = pair
    with Image.open(BytesIO(decoded.encoded or b"")) as image:
        return bool(image.size == decoded.arguments["self"].size)


def _decoded(encoded: bytes, size: tuple[int, int] | None = None, resample: Any = None, is_draft: bool = False) -> Any:
    from PIL import Image

    with Image.open(BytesIO(encoded)) as image:
        if size is None:
            image.load()
            return image
        if is_draft:
            image.draft(None, (int(size[0] * _REDUCING_GAP), int(size[1] * _REDUCING_GAP)))
        return image.resize(size, resample)


def _small_copy(encoded: bytes, size: tuple[int, int], resample: Any) -> bytes:
    from PIL import Image

    with Image.open(BytesIO(encoded)) as image:
        kind, smaller = image.format, image.resize(size, resample)
    copy = BytesIO()
    smaller.save(copy, kind, **({"quality": _JPEG_QUALITY} if kind == "JPEG" else {}))
    return copy.getvalue()


def _tables(watch: Watch, _: Path) -> list[FormatCost]:
    """Tables of many rows that are read for one item, against a row of a table that is read once."""
    calls = [call for call in watch.calls if call.reader == "table" and getattr(call.result, "num_rows", 0) > 1]
    if not calls or len(calls) / watch.item < _CALLS_AN_ITEM:
        return []
    now, better, chosen = [], [], calls[:_TIMED]
    for call in chosen:
        table = call.result
        row_s = _mean_s(lambda table=table: table.slice(table.num_rows // 2, 1).to_pydict())  # type: ignore[misc]
        now.append(call.seconds)
        better.append(call.seconds / table.num_rows + row_s)
    if min(now) <= max(better):
        return []
    rows, columns = chosen[0].result.num_rows, chosen[0].result.num_columns
    return [
        _cost("parquet", watch, [call.seconds for call in calls], fmean(now), fmean(better), rows=rows, columns=columns)
    ]


def _cost(kind: Any, watch: Watch, spent: Sequence[float], now_s: float, better_s: float, **figures: int) -> FormatCost:
    """The cost of calls that took so long while they were watched."""
    return FormatCost(
        kind=kind,
        calls_per_item=len(spent) / watch.item,
        item_fraction=min(1.0, sum(spent) / watch.spent_s),
        now_s=now_s,
        better_s=better_s,
        figures=dict(figures),
    )


def _mean_s(work: Callable[[], object]) -> float:
    """Mean seconds of a few runs after a first one, as for the calls that were watched."""
    work()
    seconds, until = list[float](), perf_counter() + _WAY_S
    while not seconds or (len(seconds) < _TIMED and perf_counter() < until):
        begun = perf_counter()
        work()
        seconds.append(perf_counter() - begun)
    return fmean(seconds)
