"""A workload that notes where it runs. Loaded by the ranks themselves, as a user's file is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

FEATURES = 4


def note_down(name: str) -> None:
    told = {"cores": sorted(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
    Path(f"{name}-{os.environ.get('RANK', '0')}").write_text(json.dumps(told))


class Layer(nn.Module):
    """A linear layer that notes the cores of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        note_down("rank")
        return outputs


class Items(Dataset[tuple[Tensor, int]]):
    """Items whose makers note their cores."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        note_down("maker" if get_worker_info() is None else "worker")
        return torch.full((FEATURES,), float(index)), index % 2
