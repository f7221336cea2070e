"""Memory of the training process and its workers is read between steps, and never raises."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from autotune.worker import device
from autotune.worker.device import anonymous_bytes, pages_of
from autotune.worker.script import memory_use
from autotune.worker.script.memory_use import GrowthWatch, PeakWatch, count_nodes

ROLLUP = """\
562fe8b06000-7ffc2fb2d000 ---p 00000000 00:00 0                          [rollup]
Rss:              {rss} kB
Shared_Dirty:     {rss} kB
Private_Clean:    4 kB
Private_Dirty:    {private} kB
Anonymous:        {anonymous} kB
THPeligible:      0
"""


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that writes a process's pages, in KiB."""
    monkeypatch.setattr(device, "_PROC", tmp_path)
    monkeypatch.setattr(memory_use, "_LEAST_GAP_S", 0.0)
    monkeypatch.setattr(memory_use, "_MOST_OF_TIME", float("inf"))
    monkeypatch.setattr(memory_use, "_MOST_AT_FIRST", float("inf"))

    def write(pid: int | str, *, private: int, anonymous: int) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir(exist_ok=True)
        text = ROLLUP.format(rss=private + anonymous, private=private, anonymous=anonymous)
        (folder / "smaps_rollup").write_text(text)

    return write


def test_pages(proc: Callable[..., None]) -> None:
    proc(7, private=100, anonymous=500)
    assert pages_of(7) == (104 * 1024, 396 * 1024)
    assert anonymous_bytes(7) == 500 * 1024


def test_spawned_worker_shares_nothing(proc: Callable[..., None]) -> None:
    proc(7, private=500, anonymous=480)
    assert pages_of(7) == (504 * 1024, 0)


@pytest.mark.parametrize("text", ["", "Private_Dirty: many kB\n", "Anonymous: 1 kB\n", "\0\0"])
def test_unreadable_pages_are_none(text: str, proc: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "smaps_rollup").write_text(text)
    assert pages_of(7) is None
    assert pages_of(8) is None
    assert anonymous_bytes(8) is None


def test_readings_are_kept_in_order(proc: Callable[..., None]) -> None:
    watch = GrowthWatch()
    proc("self", private=1, anonymous=1000)
    for step in range(3):
        proc(7, private=96 + 10 * step, anonymous=500)
        watch.read_if_due(steps=step, samples=8 * step, workers=[7])
    found = watch.report(PeakWatch())
    assert found.missing == ""
    assert [one.samples for one in found.readings] == [0, 8, 16]
    assert [one.worker_private_bytes for one in found.readings] == [
        (100 * 1024,),
        (110 * 1024,),
        (120 * 1024,),
    ]
    assert found.readings[-1].process_bytes == 1000 * 1024


def test_new_workers_begin_new_readings(proc: Callable[..., None]) -> None:
    watch = GrowthWatch()
    for pid in (7, 7, 8):
        proc(pid, private=100, anonymous=500)
        watch.read_if_due(steps=1, samples=1, workers=[pid])
    assert len(watch.report(PeakWatch()).readings) == 1


def test_forbidden_workers_are_reported(proc: Callable[..., None]) -> None:
    watch = GrowthWatch()
    proc("self", private=1, anonymous=1000)
    watch.read_if_due(steps=1, samples=1, workers=[99])
    found = watch.report(PeakWatch())
    assert found.missing
    assert found.readings[0].worker_private_bytes == ()
    assert found.readings[0].process_bytes == 1000 * 1024


def test_readings_wait_for_their_time(
    proc: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_use, "_LEAST_GAP_S", 1000.0)
    watch = GrowthWatch()
    for step in range(5):
        watch.read_if_due(steps=step, samples=step, workers=())
    assert len(watch.report(PeakWatch()).readings) == 1


def test_readings_are_bounded(proc: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_use, "_MOST_READINGS", 3)
    watch = GrowthWatch()
    for step in range(9):
        watch.read_if_due(steps=step, samples=step, workers=())
    assert [one.steps for one in watch.report(PeakWatch()).readings] == [0, 1, 8]


# Kept graphs


def nodes_of_training(
    keep: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int | None], str]:
    """Return the nodes after each of four steps, and the variable that holds most of them."""
    monkeypatch.setattr(memory_use, "is_users", lambda file: file == __file__)
    watch = GrowthWatch()
    weight = torch.ones(1, requires_grad=True)
    for step in range(4):
        loss = (weight * 2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        kept = keep(loss)  # noqa: F841 - a variable of the script
        watch.read_if_due(steps=step, samples=step, workers=())
    found = watch.report(PeakWatch())
    return [one.graph_nodes for one in found.readings], found.kept_graph


def test_list_of_losses_keeps_graphs(
    proc: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = list[torch.Tensor]()

    def keep(loss: torch.Tensor) -> object:
        losses.append(loss)
        return losses

    nodes, name = nodes_of_training(keep, monkeypatch)
    assert name == "kept"
    assert nodes == sorted({node for node in nodes if node})


def test_sum_of_losses_keeps_graphs(
    proc: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    total = torch.zeros(1)

    def keep(loss: torch.Tensor) -> object:
        nonlocal total
        total = total + loss
        return total

    nodes, name = nodes_of_training(keep, monkeypatch)
    assert name == "kept"
    assert nodes == sorted({node for node in nodes if node})


def test_items_of_losses_keep_none(
    proc: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = list[float]()

    def keep(loss: torch.Tensor) -> object:
        losses.append(loss.item())
        return losses

    nodes, _ = nodes_of_training(keep, monkeypatch)
    assert len({*nodes}) == 1


def test_object_that_raises_ends_the_count(
    proc: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(list[int]):
        def __getitem__(self, place: object) -> int:  # type: ignore[override]
            raise RuntimeError("no items")

    broken = Broken()
    nodes, name = nodes_of_training(lambda _: broken, monkeypatch)
    assert ({*nodes}, name) == ({None}, "")


def test_many_nodes_end_the_count(
    proc: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_use, "MOST_NODES", 1)
    nodes, _ = nodes_of_training(lambda loss: loss, monkeypatch)
    assert {*nodes} == {None}


def test_reading_variables_keeps_no_tensor_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_use, "is_users", lambda file: file == __file__)
    from weakref import ref

    tensor = torch.ones(1, requires_grad=True) * 2
    memory_use._kept_graphs(sys._getframe())
    gone = ref(tensor)
    del tensor
    assert gone() is None


def test_dict_of_variables_that_a_script_took_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_use, "is_users", lambda file: file == __file__)
    rate = 0.1
    config = locals()
    before = dict(config)
    kept = [torch.ones(1, requires_grad=True) * rate]
    memory_use._kept_graphs(sys._getframe())
    assert config == before
    assert kept


def take_variables() -> dict[str, object]:
    """Return the caller's variables, as a library that looks into its caller's frame."""
    return sys._getframe(1).f_locals


def test_dict_of_variables_that_a_library_took_is_not_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_use, "is_users", lambda file: file == __file__)
    rate = 0.1
    config = take_variables()
    memory_use._kept_graphs(sys._getframe())
    assert config["rate"] == rate


def test_deep_graph_is_no_recursion() -> None:
    total = torch.ones(1, requires_grad=True)
    for _ in range(5_000):
        total = total + 1
    assert count_nodes([total]) >= 5_000


# Validation


def test_validation_that_raises_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([100, 300, 300, 300])
    monkeypatch.setattr(memory_use, "_peak_bytes", lambda: next(peaks))
    watch = PeakWatch()
    for step in (5, 9):
        watch.after(watch.before(step))
    assert (watch.training_bytes, watch.validation_bytes) == (100, 300)


def test_validation_before_training_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_use, "_peak_bytes", lambda: 100)
    watch = PeakWatch()
    watch.after(watch.before(0))
    assert GrowthWatch().report(watch).validation_peak_bytes is None


# A real worker


def read_objects(objects: list[str], pipe: Connection) -> None:
    """Keep a reference to each object, as a worker that reads them; then wait."""
    pipe.recv()
    kept = [*objects]
    pipe.send(len(kept))
    pipe.recv()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_copied_pages_are_seen() -> None:
    objects = [f"images/{number:07d}.jpg" for number in range(200_000)]
    ours, theirs = get_context("fork").Pipe()
    worker = get_context("fork").Process(target=read_objects, args=(objects, theirs))
    worker.start()
    before = pages_of(worker.pid or 0)
    ours.send(None)
    ours.recv()
    after = pages_of(worker.pid or 0)
    ours.send(None)
    worker.join()
    if before is None or after is None:
        pytest.skip("the system does not report pages")
    assert after[0] - before[0] > 10 * 2**20
    assert before[1] - after[1] > 10 * 2**20
