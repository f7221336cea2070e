"""Workloads that each have one clear bottleneck, for the tests of diagnosis. Imported inside the trials as well."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset, get_worker_info

Pair = tuple[Tensor, int]


class SlowTail(Dataset[Pair]):
    """One item in 32 takes 200 times as long as the others."""

    def __len__(self) -> int:
        return 3200

    def __getitem__(self, index: int) -> Pair:
        until = time.perf_counter() + (0.04 if index % 32 == 0 else 0.0002)
        while time.perf_counter() < until:
            pass
        return torch.zeros(16), index % 2


class BurstyReader(Dataset[Pair]):
    """Items of 20 us; at each 2,000th the reader waits for what it reads next."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 64_000

    def __getitem__(self, index: int) -> Pair:
        until = time.perf_counter() + 20e-6
        while time.perf_counter() < until:
            pass
        self.read += 1
        if self.read % 2000 == 0:
            time.sleep(0.2)
        return torch.zeros(16), index % 2


class Products(Dataset[Pair]):
    """A large matrix product of NumPy's for each item, in as many threads as its library takes."""

    def __init__(self) -> None:
        self.factor = np.random.default_rng(0).random((512, 512), dtype=np.float32)

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> Pair:
        product = self.factor @ self.factor
        return torch.from_numpy(product[0, :16] / 512), index % 2

    def cores_busy(self) -> float:
        """Cores that an item keeps busy by itself."""
        self[0]
        begun, begun_cpu_s = time.perf_counter(), time.process_time()
        for index in range(10):
            self[index]
        return (time.process_time() - begun_cpu_s) / (time.perf_counter() - begun)


class LargeElementwise(nn.Module):
    """Element-wise operations on tensors of 8 MiB: bytes, and next to no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2**18))
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        wide = x[:, :1] * self.weight
        for _ in range(6):
            wide = wide * 0.5 + 1.0
        return functional.linear(x, self.head.weight, self.head.bias) + wide.mean(1, keepdim=True)


class Unruly(Dataset[Pair]):
    """Loader workers fail; the training process loads well."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Pair:
        if get_worker_info() is not None:
            raise ValueError("no workers, please")
        return torch.zeros(16), index % 2


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


def wide_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2)
    )


def numbers(count: int = 4096, width: int = 16) -> TensorDataset:
    return TensorDataset(torch.zeros(count, width), torch.zeros(count, dtype=torch.long))


class Waiting(Dataset[Pair]):
    """An epoch of 640 items, which wait for a millisecond each."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> Pair:
        time.sleep(0.001)
        return torch.zeros(16), index % 2


def open_slowly(_: int) -> None:
    """What a worker does first: opens files, reads an index."""
    time.sleep(0.4)


def wide_numbers() -> TensorDataset:
    return numbers(width=1024)
