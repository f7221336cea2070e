"""The payload keeps what it is given, names what can't travel, and leaves nothing half-written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autotune.config.plan import Ref, Workload
from autotune.errors import RunFolderError, WorkloadError
from autotune.protocol.payload import read_payload, write_payload


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
    assert [name for name, _ in got.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks:UserWarning"
)  # torch 2.11's, of what it writes itself
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
    workload = Workload(
        model=Tied(), dataset=Ref(target="a:b"), loss=lambda a, b: a - b, drop_last=False
    )
    got = there_and_back(workload, tmp_path)
    assert got.dataset == Ref(target="a:b")
    assert got.loss(3, 1) == 2
    assert got.drop_last is False


def test_a_large_tensor_is_mapped_without_private_memory(tmp_path: Path) -> None:
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
        (
            Workload(model=nn.Linear(1, 1), dataset={"files": [threading.Lock()]}),
            "dataset.files.[0]",
        ),
        (Workload(model=nn.Linear(1, 1), dataset=[1], loss=holding(threading.Lock())), "loss"),
        (Workload(model=nn.Linear(1, 1), dataset=Unreadable()), "dataset"),
    ],
)
def test_what_cannot_travel_is_named(workload: Workload, place: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as caught:
        write_payload(workload, tmp_path / "payload")
    assert str(caught.value).startswith(f"{place} ")
    assert not list((tmp_path / "payload").iterdir())


def test_a_folder_that_cannot_be_made_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"payload.*run_dir"):
        write_payload([1], tmp_path / "file" / "payload")


def test_a_payload_that_does_not_fit_is_told_and_takes_no_room(full_disk: Path) -> None:
    with pytest.raises(RunFolderError, match=os.strerror(errno.ENOSPC)):
        write_payload({"x": torch.zeros(2**20)}, full_disk / "payload")
    assert not list((full_disk / "payload").iterdir())
