"""Formats of the user's files: what is found to be read faster, where nothing is, and that nothing is touched."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import ImageFile
from torch.utils.data import DataLoader, Dataset

from autotune.records.breakdown import FormatCost
from autotune.worker.extras import formats
from autotune.worker.extras.formats import Call, Watch, measure_formats, watched
from tests.worker.extras.format_datasets import (
    SIDE,
    SMALL,
    Arrays,
    Drafted,
    Files,
    Photos,
    PhotosInMemory,
    PhotosOfAnotherSize,
    PhotosOfAnySize,
    Texts,
    TextsOfOpenFiles,
    Whole,
    write_photos,
    write_texts,
)

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


def found(dataset: Dataset[Any], folder: Path, **settings: Any) -> dict[str, FormatCost]:
    loader = DataLoader(dataset, **settings)
    costs = measure_formats(loader, 0.01, scratch_of(folder), perf_counter() + 60)
    return {cost.kind: cost for cost in costs}


def scratch_of(folder: Path) -> Path:
    scratch = folder.with_name("scratch")
    scratch.mkdir(exist_ok=True)
    return scratch


def texts_in(folder: Path) -> Texts:
    return Texts(write_texts(folder)[0])


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time what this thread computes, so that no other process decides what is found."""
    monkeypatch.setattr(formats, "perf_counter", thread_time)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of the user's files."""
    folder = tmp_path / "users"
    folder.mkdir()
    return folder


def test_text_that_is_parsed_costs_more_than_an_array_that_is_mapped(folder: Path) -> None:
    cost = found(texts_in(folder), folder, batch_size=4)["text"]
    assert cost.calls_per_item == 1
    assert cost.better_s < cost.now_s
    assert cost.saved_fraction == pytest.approx(
        cost.item_fraction * (1 - cost.better_s / cost.now_s)
    )
    assert 0 < cost.item_fraction <= 1


@pytest.fixture
def _time_is_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way of decoding takes a nanosecond for each pixel that it decodes."""
    load, decoded = ImageFile.ImageFile.load, list[int]()

    def counted(image: ImageFile.ImageFile) -> Any:
        if image.tile:
            decoded.append(image.width * image.height)
        return load(image)

    def timed(way: Callable[[], object], **_: object) -> float:
        decoded.clear()
        with (
            monkeypatch.context() as patch
        ):  # not before: the user's own calls are known by the function
            patch.setattr(ImageFile.ImageFile, "load", counted)
            way()
        return sum(decoded) * 1e-9

    monkeypatch.setattr(formats, "_usual_s", timed)


@pytest.mark.usefixtures("_time_is_pixels")
@pytest.mark.parametrize("kind", [Photos, PhotosInMemory])
def test_photographs_that_are_made_small_are_decoded_faster_small(
    kind: type[Files], folder: Path
) -> None:
    costs = found(kind(write_photos(folder)), folder)
    assert set(costs) == {"image_draft", "image_copy"}
    sizes = {"width": SIDE, "height": SIDE, "to_width": SMALL, "to_height": SMALL}
    assert all(cost.figures == sizes and cost.better_s < cost.now_s for cost in costs.values())


def mixed(folder: Path) -> list[Path]:
    return [*write_photos(folder)[:1], *write_photos(folder, "png")[1:]]


@pytest.mark.parametrize(
    ("kind", "write", "expected"),
    [
        (Photos, partial(write_photos, kind="png"), {"image_copy"}),  # PNG cannot be drafted
        (Photos, mixed, {"image_copy"}),
        (PhotosOfAnySize, write_photos, {"image_draft"}),
        (PhotosOfAnotherSize, write_photos, {"image_draft"}),
        (Arrays, lambda folder: write_texts(folder)[1], set()),
        (Drafted, write_photos, set()),
        (Whole, write_photos, set()),
    ],
)
def test_only_possible_better_ways_are_found(
    kind: type[Files], write: Callable[[Path], list[Path]], expected: set[str], folder: Path
) -> None:
    assert set(found(kind(write(folder)), folder)) == expected


class InBatches(Texts):
    """Makes whole batches."""

    asked: list[int]

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it is asked for whole batches")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked = [*getattr(self, "asked", []), len(indices)]
        return [super(InBatches, self).__getitem__(index) for index in indices]


def test_one_item_at_a_time_is_asked_of_a_dataset_that_makes_whole_batches(folder: Path) -> None:
    dataset = InBatches(write_texts(folder)[0])
    assert set(found(dataset, folder, batch_size=32)) == {"text"}
    assert set(dataset.asked) == {1}


def test_waiting_for_a_file_is_not_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long the first time alone was waiting."""
    timed = found(texts_in(folder), folder)["text"]
    end = Watch._end

    def waited(self: Watch, call: Call, *others: Any) -> None:
        call.seconds += 10.0  # the clock's, as if the file had come from afar
        self.spent_s += 10.0
        end(self, call, *others)

    monkeypatch.setattr(Watch, "_end", waited)
    cold = found(texts_in(folder), folder)["text"]
    assert cold.now_s < 1.0
    assert cold.saved_fraction < 0.1 < timed.saved_fraction


def test_text_of_an_open_file_is_timed_again_from_its_beginning(folder: Path) -> None:
    assert set(found(TextsOfOpenFiles(write_texts(folder)[0]), folder)) == {"text"}


def test_no_kind_is_begun_after_the_deadline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_at, begun = perf_counter() + 60, list[str]()

    def last(*_: object) -> list[FormatCost]:
        begun.append("texts")
        monkeypatch.setattr(formats, "perf_counter", lambda: ends_at + 1)
        return []

    monkeypatch.setattr(formats, "_texts", last)
    monkeypatch.setattr(formats, "_images", lambda *_: begun.append("images"))
    measure_formats(DataLoader(texts_in(folder)), 0.01, scratch_of(folder), ends_at)
    assert begun == ["texts"]


def test_arrays_are_kept_within_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_MOST_BYTES", 60_000)  # an array has 25,600
    dataset = texts_in(folder)
    with watched() as watch:
        assert watch is not None
        for index in range(4):
            dataset[index]
            watch.item += 1
    assert [call.array is not None for call in watch.calls] == [True, True, False, False]


@pytest.mark.parametrize("kind", [Texts, Photos])
def test_the_users_files_stay_as_they_are_and_nothing_is_left_in_the_scratch(
    kind: type[Files], folder: Path
) -> None:
    files = write_texts(folder)[0] if kind is Texts else write_photos(folder)

    def state() -> dict[Path, tuple[bytes, int]]:
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}

    before = state()
    assert found(kind(files), folder)
    assert state() == before
    assert list(scratch_of(folder).iterdir()) == []
    assert sys.getprofile() is None


class Failing(Texts):
    """Raises from the third item on."""

    made = 0

    def __getitem__(self, index: int) -> Any:
        self.made += 1
        if self.made > 2:
            raise KeyError(index)
        return super().__getitem__(index)


def test_an_item_that_raises_ends_the_looking_and_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "autotune.worker.extras.formats"):
        assert found(Failing(write_texts(folder)[0]), folder) == {}
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert sys.getprofile() is None


def test_a_format_that_cannot_be_timed_gets_no_figure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Mock(side_effect=OSError("no room"))
    monkeypatch.setattr(formats, "_small_copy", broken)
    monkeypatch.setattr(formats, "_mapped_s", broken)
    assert found(Photos(write_photos(folder)), folder) == {}
    assert found(texts_in(folder), folder) == {}


def test_slow_items_and_a_deadline_that_is_near_are_left_alone(folder: Path) -> None:
    loader = DataLoader(Failing(write_texts(folder)[0]))
    assert measure_formats(loader, 5.0, folder, perf_counter() + 60) == ()
    assert measure_formats(loader, 0.01, folder, 0.0) == ()
    assert loader.dataset.made == 0  # type: ignore[attr-defined] # nothing was made


def test_looking_at_what_a_call_makes_in_turn_is_none_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_s = [0.0]

    def look(*_: object) -> None:
        clock_s[0] += 5.0

    def inner() -> None:
        clock_s[0] += 1.0

    def outer() -> None:
        clock_s[0] += 2.0
        inner()

    monkeypatch.setattr(formats, "perf_counter", lambda: clock_s[0])
    monkeypatch.setattr(Watch, "_look", look)
    watch = Watch({outer.__code__: "resize", inner.__code__: "text"})
    sys.setprofile(watch)
    try:
        outer()
    finally:
        sys.setprofile(None)
    assert {call.reader: call.seconds for call in watch.calls} == {"text": 1.0, "resize": 3.0}


def test_somebody_elses_profile_is_not_replaced() -> None:
    def own(*_: object) -> None: ...

    sys.setprofile(own)
    try:
        with watched() as watch:
            assert watch is None
            assert sys.getprofile() is own
    finally:
        sys.setprofile(None)
