"""The start of loader workers is timed where their processes start, and nothing stays wrapped."""

from __future__ import annotations

import io
from collections.abc import Callable
from multiprocessing import process, reduction
from threading import Thread
from types import SimpleNamespace

import pytest

from autotune.worker.script.worker_starts import WorkerStarts


class Loader:
    """Stands in for a DataLoader."""


class FakeProcess:
    """Has what is read of a process that has started."""

    def __init__(self, method: str = "fork") -> None:
        self._popen = SimpleNamespace(method=method)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that starts a process by a method, and pickles 1,000 bytes for it unless it is forked."""

    def launch(self: FakeProcess) -> None:
        if self._popen.method != "fork":
            reduction.dump(b"x" * 1000, io.BytesIO())

    monkeypatch.setattr(process.BaseProcess, "start", launch)
    return lambda method: process.BaseProcess.start(FakeProcess(method))  # type: ignore[arg-type]


def test_forked_workers_pickle_nothing(start: Callable[[str], None]) -> None:
    starts = WorkerStarts()
    loader = Loader()
    with starts.making(loader):
        start("fork")
        start("fork")
    assert not starts.starts
    starts.has_batch(loader)
    starts.has_batch(loader)
    (found,) = starts.starts
    assert (found.method, found.workers, found.pickled_bytes, found.pickle_s) == (
        "fork",
        2,
        None,
        None,
    )
    assert 0 <= found.start_s <= found.first_batch_s


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_pickled_bytes_are_those_of_one_worker(method: str, start: Callable[[str], None]) -> None:
    starts = WorkerStarts()
    loader = Loader()
    with starts.making(loader):
        start(method)
        start(method)
    starts.has_batch(loader)
    (found,) = starts.starts
    assert found.method == method
    assert found.pickled_bytes is not None
    assert 1000 <= found.pickled_bytes < 1100
    assert found.pickle_s is not None


def test_persistent_workers_start_once(start: Callable[[str], None]) -> None:
    starts = WorkerStarts()
    loader = Loader()
    with starts.making(loader):
        start("fork")
    starts.has_batch(loader)
    with starts.making(loader):
        pass
    starts.has_batch(loader)
    assert len(starts.starts) == 1


def test_batch_of_another_loader_ends_no_start(start: Callable[[str], None]) -> None:
    starts = WorkerStarts()
    loader = Loader()
    with starts.making(loader):
        start("fork")
    starts.has_batch(Loader())
    assert starts.starts == ()


def test_processes_of_other_threads_do_not_count(start: Callable[[str], None]) -> None:
    starts = WorkerStarts()
    loader = Loader()
    with starts.making(loader):
        thread = Thread(target=start, args=("spawn",))
        thread.start()
        thread.join()
    starts.has_batch(loader)
    assert starts.starts == ()


def test_nothing_stays_wrapped_after_an_error(start: Callable[[str], None]) -> None:
    before = (process.BaseProcess.start, reduction.dump)
    starts = WorkerStarts()
    with pytest.raises(OSError, match="no memory"), starts.making(Loader()):
        raise OSError("no memory")
    assert (process.BaseProcess.start, reduction.dump) == before


def test_patch_of_the_script_stays(start: Callable[[str], None]) -> None:
    def own(obj: object, file: object, protocol: int | None = None) -> None: ...

    plain = reduction.dump
    try:
        with WorkerStarts().making(Loader()):
            reduction.dump = own
        assert reduction.dump is own
    finally:
        reduction.dump = plain
