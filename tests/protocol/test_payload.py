"""The payload keeps what it is given, names what can't travel, and nothing is left half-written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from autotune.errors import RunFolderError, WorkloadError
from autotune.protocol.disk import read_model, write_atomic, write_model
from autotune.protocol.jobs import TrialJob, read_job
from autotune.protocol.payload import read_payload, write_payload
from autotune.protocol.reports import RankReport
from autotune.protocol.shared_memory import free_shared_memory
from autotune.records.measurement import Block, Measurement, MemorySample, Window
from autotune.records.trial import Failure, TrialResult
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Ref, Workload
from tests.factories import make_process


def there_and_back(value: object, folder: Path) -> Any:
    """What a trial gets."""
    write_payload(value, folder / "payload")
    return read_payload(folder / "payload")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(8)


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.a.lock = threading.Lock()  # type: ignore[assignment] # that is the fault


class Unreadable:
    def __reduce__(self) -> Any:
        raise FileNotFoundError(2, "No such file or directory", "weights.bin")


class Temporary:
    """Pickles tensors that exist only meanwhile."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return total, (torch.full((5000,), self.value).numpy(), torch.full((5000,), self.value))


def holding(value: object) -> Any:
    return lambda: value


def total(array: Any, tensor: torch.Tensor) -> tuple[float, float]:
    return float(array.sum()), float(tensor.sum())


def test_tensors_that_share_a_storage_still_do(tmp_path: Path) -> None:
    base = torch.arange(10_000.0).reshape(100, 100)
    one, row, turned = there_and_back([base, base[3], base.t()], tmp_path)
    one[3, 0] = -1
    assert row[0] == -1
    assert turned[0, 3] == -1
    assert base[3, 0] == 300, "the sender's is as it was"


def test_tied_weights_stay_tied_and_a_module_keeps_its_mode_and_buffers(tmp_path: Path) -> None:
    model = Tied()
    model.norm.running_mean = torch.arange(8.0)
    model.norm.eval()
    got = there_and_back(model, tmp_path)
    assert got.head.weight is got.embedding.weight
    assert isinstance(got.head.weight, nn.Parameter)
    assert got.head.weight.requires_grad
    assert (got.training, got.norm.training) == (True, False)
    assert torch.equal(got.norm.running_mean, torch.arange(8.0))
    assert [name for name, _ in got.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(300).to(torch.bfloat16),
        torch.randn(10).half(),
        torch.empty(0),
        torch.empty(0, 3, dtype=torch.int64),
        torch.tensor(3),
        torch.randn(4, 5, 6).permute(2, 0, 1),
        torch.randn(20)[::3],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.randn(3).expand(4, 3),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_a_tensor_keeps_its_values_type_and_strides(tensor: torch.Tensor, tmp_path: Path) -> None:
    got = there_and_back(tensor, tmp_path)
    assert got.dtype == tensor.dtype
    assert got.shape == tensor.shape
    if not tensor.is_sparse:
        assert got.stride() == tensor.stride()
    assert torch.equal(got.to_dense(), tensor.to_dense())


@pytest.mark.parametrize("size", [10, 100_000])
def test_arrays_are_writable_and_private(size: int, tmp_path: Path) -> None:
    got = there_and_back(np.zeros(size), tmp_path)
    got[0] = 1
    assert read_payload(tmp_path / "payload")[0] == 0


def test_tensors_are_writable_and_private(tmp_path: Path) -> None:
    got = there_and_back(torch.zeros(100_000), tmp_path)
    got += 1
    assert read_payload(tmp_path / "payload").sum() == 0


def test_functions_of_any_origin_travel(tmp_path: Path) -> None:
    factor = 3

    class Local:
        def times(self, value: int) -> int:
            return value * factor

    closure, plain, local = there_and_back([lambda value: value + factor, total, Local()], tmp_path)
    assert closure(1) == 4
    assert plain is total
    assert local.times(2) == 6


def test_tensors_made_while_pickling_are_not_taken_for_one_another(tmp_path: Path) -> None:
    assert there_and_back([Temporary(float(value)) for value in range(8)], tmp_path) == [
        (5000.0 * value, 5000.0 * value) for value in range(8)
    ]


def test_a_workload_travels_whole(tmp_path: Path) -> None:
    workload = Workload(model=Tied(), dataset=Ref(target="a:b"), loss=lambda a, b: a - b, drop_last=False)
    got = there_and_back(workload, tmp_path)
    assert got.dataset == Ref(target="a:b")
    assert got.loss(3, 1) == 2
    assert got.drop_last is False


def test_a_large_tensor_is_mapped_and_costs_its_readers_no_memory_of_their_own(tmp_path: Path) -> None:
    write_payload({"x": torch.ones(50_000_000)}, tmp_path / "payload")
    script = """
import sys
from pathlib import Path
from autotune.protocol.payload import read_payload
def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous")) * 1024
import torch
torch.ones(1000).sum()
before = private()
x = read_payload(Path(sys.argv[1]))["x"]
assert x.sum() == 50_000_000
print(private() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "payload")],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 20 * 2**20


@pytest.mark.parametrize(
    ("workload", "place"),
    [
        (Workload(model=Locked(), dataset=[1]), "model.a.lock"),
        (Workload(model=nn.Linear(1, 1), dataset={"files": [threading.Lock()]}), "dataset.files.[0]"),
        (Workload(model=nn.Linear(1, 1), dataset=[1], loss=holding(threading.Lock())), "loss"),
        (Workload(model=nn.Linear(1, 1), dataset=Unreadable()), "dataset"),
    ],
)
def test_what_cannot_travel_is_named_with_the_remedy(workload: Workload, place: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as caught:
        write_payload(workload, tmp_path / "payload")
    assert str(caught.value).startswith(f"{place} can't be carried to a trial (")
    assert "Pass a zero-argument function that builds it" in str(caught.value)
    assert not list((tmp_path / "payload").iterdir())


def test_a_folder_that_cannot_be_made_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"can't be written .*run_dir"):
        write_payload([1], tmp_path / "file" / "payload")


@pytest.fixture
def full_disk(disk_of: Callable[[str], Path]) -> Path:
    """A disk of 1 MiB with 64 KiB left."""
    place = disk_of("1m")
    (place / "ballast").write_bytes(b"x" * (2**20 - 2**16))
    return place


def test_a_full_disk_leaves_the_old_file_and_nothing_half_written(full_disk: Path) -> None:
    target = full_disk / "report.json"
    write_atomic(target, b"old")
    with pytest.raises(RunFolderError, match=r"No space left on device\)\. Free space there"):
        write_atomic(target, b"y" * 2**18)
    assert target.read_bytes() == b"old"
    assert sorted(one.name for one in full_disk.iterdir()) == ["ballast", "report.json"]


def test_a_payload_that_does_not_fit_is_told_and_takes_no_room(full_disk: Path) -> None:
    with pytest.raises(RunFolderError, match="No space left on device"):
        write_payload({"x": torch.zeros(2**20)}, full_disk / "payload")
    assert not list((full_disk / "payload").iterdir())


def test_an_atomic_write_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"1")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_a_job_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    job = TrialJob(
        process=make_process(tmp_path, seed=1, deadline_s=5, sys_path=("", "/a")),
        payload=tmp_path,
        config=TrainingConfig(num_workers=2, prefetch_factor=4),
    )
    write_model(tmp_path / "job.json", job)
    assert read_job(tmp_path / "job.json") == job


@pytest.mark.parametrize("high", [1.5, float("inf")])
def test_a_report_comes_back_as_it_was_sent(high: float, tmp_path: Path) -> None:
    window = Window(
        blocks=(Block(samples=8, batches=2, seconds=0.5, data_wait_s=0.1),),
        whole_epochs=False,
        epoch_samples=None,
        queue_capacity=0,
        queue_at_start=0,
        queue_at_end=None,
        warm_up_batches=1,
        warm_up_s=0.1,
        is_drained=True,
        is_steady=True,
        stopped_by="time",
    )
    measurement = Measurement(
        samples_per_s=1.0,
        samples_per_s_ci=(0.5, high),
        busy_fraction=None,
        busy_source=None,
        data_wait_fraction=0.0,
        peak_memory_bytes=1,
        startup_s=0.1,
        build_s=0.1,
        memory=MemorySample(peak_bytes=1, source="none"),
        window=window,
        loss=0.1,
    )
    failure = Failure(signature="E at f:1", traceback="é\ud7ff")
    report = RankReport(result=TrialResult(outcome="ok", measurement=measurement, failure=failure))
    write_model(tmp_path / "report.json", report)
    assert read_model(tmp_path / "report.json", RankReport) == report


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"version": 2, "result": {"outcome": "ok"}}'])
def test_what_is_no_report_of_this_version_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValidationError):
        read_model(tmp_path / "report.json", RankReport)


def test_shared_memory_of_one_process_alone_is_freed() -> None:
    mine, anothers = Path("/dev/shm/torch_99999991_1_0"), Path("/dev/shm/torch_999999911_1_0")
    mine.touch()
    anothers.touch()
    try:
        free_shared_memory(99999991)
        assert not mine.exists()
        assert anothers.exists()
    finally:
        mine.unlink(missing_ok=True)
        anothers.unlink(missing_ok=True)
