"""Seams: what a script calls to save, log and collect is clocked as its part, and restored afterwards."""

from __future__ import annotations

import builtins
import gc
import io
import json
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
import tqdm
from safetensors.torch import save_file
from torch import nn

from autotune.records.watched_run import RunPart
from autotune.worker.script import seams
from autotune.worker.script.patching import replace_everywhere
from autotune.worker.script.watch import Watch


class _Recorder:
    """A watch that only records what it was told."""

    def __init__(self) -> None:
        self.is_over = False
        self.seen: list[tuple[str, str]] = []
        self.open: list[str] = []

    @contextmanager
    def inside(self, part: RunPart, what: str = "") -> Iterator[None]:
        self.seen.append((part, what))
        self.open.append(what)
        try:
            yield
        finally:
            self.open.pop()

    def called(self, part: str) -> set[str]:
        return {what for seen, what in self.seen if seen == part}


def as_watch(recorder: _Recorder) -> Watch:
    return cast("Watch", recorder)


@pytest.fixture
def watch() -> Iterator[_Recorder]:
    recorder = _Recorder()
    plain_print = builtins.print
    seams.install_seams(as_watch(recorder))
    yield recorder
    timed_print = builtins.print
    seams.uninstall_seams()
    replace_everywhere([(timed_print, plain_print)])
    seams._installed.functions.clear()


def test_saving_is_a_checkpoint(watch: _Recorder, tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3)}
    torch.save(tensors, tmp_path / "a.pt")
    save_file(tensors, tmp_path / "a.safetensors")
    np.save(tmp_path / "a.npy", np.zeros(3))
    with (tmp_path / "a.pkl").open("wb") as file:
        pickle.dump([1], file)
        os.fsync(file.fileno())
    assert watch.called("checkpoint") == {
        "torch.save",
        "safetensors.torch.save_file",
        "numpy.save",
        "pickle.dump",
        "os.fsync",
    }
    assert torch.load(tmp_path / "a.pt")["a"].shape == (3,)


def test_prints_bars_and_handlers_are_logging(watch: _Recorder) -> None:
    print("a line", file=io.StringIO())
    sys.stdout.write("a line\n")
    logging.getLogger("seams").warning("a warning")
    for _ in tqdm.tqdm(range(3), file=io.StringIO(), mininterval=0):
        pass
    assert {
        "print",
        "sys.stdout.write",
        "logging.Handler.handle",
        "tqdm.update",
        "tqdm.refresh",
    } <= watch.called("logging")


def test_collections_are_named_by_who_starts_them(watch: _Recorder) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    assert watch.called("collection") == {"gc.collect", "torch.cuda.empty_cache"}
    before = gc.get_threshold()
    gc.set_threshold(5)
    held = [[number] for number in range(50)]
    gc.set_threshold(*before)
    assert len(held) == 50
    assert seams.AUTOMATIC in watch.called("collection")
    assert not watch.open


def test_a_full_collection_is_named_as_such(watch: _Recorder) -> None:
    for phase in ("start", "stop"):
        seams._on_collection(phase, {"generation": 2})
    assert watch.called("collection") == {f"{seams.AUTOMATIC}, generation 2"}


def test_a_module_imported_later_is_patched(
    watch: _Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mlflow" / "tracking"
    folder.mkdir(parents=True)
    (tmp_path / "mlflow" / "__init__.py").write_text("from mlflow.tracking.fluent import *\n")
    (folder / "__init__.py").write_text("")
    code = "def log_metric(key, value):\n    return value\nclass LogNothing:\n    pass\n"
    (folder / "fluent.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("mlflow", "mlflow.tracking", "mlflow.tracking.fluent")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import mlflow  # type: ignore[import-not-found]

    assert mlflow.log_metric("loss", 2) == 2
    assert watch.called("logging") == {"mlflow.log_metric"}
    for name in names:
        sys.modules.pop(name, None)


def test_methods_of_a_class_are_found_by_their_beginning(watch: _Recorder) -> None:
    class SummaryWriter:
        def add_scalar(self, name: str) -> str:
            return name

        def add_histogram(self, name: str) -> str:
            raise ValueError(name)

        def close(self) -> None:
            pass

    module = ModuleType("tensorboardX.writer")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    seam = next(one for one in seams._SEAMS if one.module == "tensorboardX.writer")
    seams._patch_module(seam, module)
    writer = SummaryWriter()
    assert writer.add_scalar("a") == "a"
    writer.close()
    with pytest.raises(ValueError, match="b"):
        writer.add_histogram("b")
    assert watch.called("logging") == {"SummaryWriter.add_scalar", "SummaryWriter.add_histogram"}
    assert not watch.open


def test_all_is_as_before_afterwards() -> None:
    names = [(torch, "save"), (os, "fsync"), (gc, "collect"), (logging.Handler, "handle")]
    before = [getattr(owner, name) for owner, name in names]
    callbacks = [*gc.callbacks]
    recorder = _Recorder()
    plain_print = builtins.print
    seams.install_seams(as_watch(recorder))
    seams.install_device_seams()
    assert torch.save is not before[0]
    seams.uninstall_seams()
    print("passed on", file=io.StringIO())
    timed_print = builtins.print
    replace_everywhere([(timed_print, plain_print)])
    seams._installed.functions.clear()
    assert [getattr(owner, name) for owner, name in names] == before
    assert "item" not in vars(torch.Tensor)
    assert "write" not in vars(sys.stdout)
    assert gc.callbacks == callbacks
    assert not recorder.called("logging")


def test_a_patch_on_top_of_a_seam_survives_it(
    watch: _Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            del record

    seam = logging.Handler.handle

    def on_top(self: Any, record: Any) -> Any:
        return seam(self, record)

    monkeypatch.setattr(logging.Handler, "handle", on_top)
    seams.uninstall_seams()
    assert logging.Handler.handle is on_top
    seen = len(watch.seen)
    Handler(level=100).handle(logging.makeLogRecord({"level": 1}))
    assert len(watch.seen) == seen
    monkeypatch.undo()
    monkeypatch.setattr(logging.Handler, "handle", seam.__wrapped__)  # type: ignore[attr-defined]


def test_nothing_is_recorded_once_the_watch_is_over(watch: _Recorder) -> None:
    watch.is_over = True
    torch.save(1, io.BytesIO())
    gc.collect()
    assert not watch.seen


def test_a_collection_that_outlives_the_watch_is_closed(watch: _Recorder) -> None:
    seams._on_collection("start", {"generation": 0})
    watch.is_over = True
    seams._on_collection("stop", {"generation": 0})
    assert not watch.open


def test_functions_can_still_be_pickled(watch: _Recorder) -> None:
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save


class _OnDevice(torch.Tensor):
    """A tensor that says it lies on an accelerator."""

    is_cpu = False
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def test_waits_for_an_accelerator_and_copies_are_clocked(watch: _Recorder) -> None:
    seams.install_device_seams()
    far = torch.ones(1).as_subclass(_OnDevice)
    near = torch.ones(1)
    watch.seen.clear()
    assert near.item() == 1
    near.to(torch.float64).to("cpu").cpu()
    assert not watch.called("synchronise") | watch.called("copy")
    assert far.item() == 1
    assert far.tolist() == [1]
    assert bool(far)
    far.to("cpu")
    with pytest.raises((RuntimeError, AssertionError)):
        near.to("cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        near.to(device=torch.device("cuda", 0))
    waits = {"Tensor.item", "Tensor.tolist", "Tensor.__bool__", "Tensor.to('cpu')"}
    assert watch.called("synchronise") == waits
    assert watch.called("copy") == {"Tensor.to"}


def test_own_waits_and_copies_are_not_the_scripts(watch: _Recorder) -> None:
    seams.install_device_seams()
    far = torch.ones(1).as_subclass(_OnDevice)
    names = {"__name__": "autotune.worker.made_up", "far": far, "near": torch.ones(1)}
    code = """
far.item()
far.tolist()
far.to("cpu")
try:
    near.to("cuda")
except (RuntimeError, AssertionError):
    pass
"""
    watch.seen.clear()
    exec(code, names)
    assert not watch.called("synchronise") | watch.called("copy")
    exec(code, names | {"__name__": "__main__"})
    assert watch.called("synchronise") == {"Tensor.item", "Tensor.tolist", "Tensor.to('cpu')"}
    assert watch.called("copy") == {"Tensor.to"}


@pytest.mark.parametrize(
    ("args", "goes_to_cpu"),
    [
        (("cpu",), True),
        (("cuda:0",), False),
        ((0,), False),
        ((torch.device("cpu"),), True),
        ((torch.zeros(1),), True),
        ((torch.float16,), None),
        ((), None),
    ],
)
def test_the_target_of_a_copy_is_read_from_its_arguments(
    args: tuple[Any, ...], goes_to_cpu: bool | None
) -> None:
    assert seams._goes_to_cpu(args, {}) is goes_to_cpu


@pytest.mark.slow
def test_a_compiled_model_is_compiled_once(watch: _Recorder) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    seams.install_device_seams()
    counter = CompileCounterWithBackend("eager")
    model = nn.Linear(2, 2)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(inputs.to(torch.float64).to(torch.float32)).cpu()
        return out

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    compiled(torch.ones(1, 2))
    seams.uninstall_seams()
    compiled(torch.ones(1, 2))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_other_threads_only_pass_on(watch: _Recorder) -> None:
    # The watch decides: the seam calls it from any thread, and it returns a context that does nothing.
    thread = threading.Thread(target=lambda: torch.save(1, io.BytesIO()))
    thread.start()
    thread.join()
    assert not watch.open


_WITH_PROTECTION = """
import io, json, sys, torch
from contextlib import contextmanager
from pathlib import Path
from safetensors.torch import save_file
from autotune.worker.script.files.protection import protect_files, protect_torch
from autotune.worker.script import seams

class Watch:
    is_over = False
    seen = []
    @contextmanager
    def inside(self, part, what=""):
        self.seen.append(what)
        yield

folder = Path(sys.argv[1])
def protect():
    protect_files(folder / "scratch")
    protect_torch()

def install():
    seams.install_seams(Watch())

for act in (protect, install) if sys.argv[2] == "protection first" else (install, protect):
    act()
tensors = {"a": torch.ones(3)}
torch.save(tensors, folder / "old.pt")
save_file(tensors, folder / "old.safetensors")
torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), folder / "old.ts")
is_seen = torch.load(folder / "old.pt")["a"].sum().item() == 3
print(json.dumps([sorted({*Watch.seen}), is_seen]))
"""


@pytest.mark.parametrize(
    "order", ["protection first", pytest.param("seams first", marks=pytest.mark.slow)]
)
def test_seams_and_file_protection_work_together(order: str, tmp_path: Path) -> None:
    names = ("old.pt", "old.safetensors", "old.ts")
    for name in names:
        (tmp_path / name).write_text("old")
    code = textwrap.dedent(_WITH_PROTECTION)
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), order]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    called, is_seen = json.loads(done.stdout.splitlines()[-1])
    assert {"torch.save", "safetensors.torch.save_file", "torch.jit.save"} <= {*called}
    assert is_seen
    assert [(tmp_path / name).read_text() for name in names] == ["old"] * 3
