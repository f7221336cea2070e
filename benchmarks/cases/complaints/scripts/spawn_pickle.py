"""Spawned workers get a dataset of half a million Python objects through a pipe, at the start of every epoch.

https://github.com/pytorch/pytorch/issues/139792
https://github.com/pytorch/pytorch/pull/87802
https://github.com/allenai/olmoearth_pretrain/pull/150
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset

SCENES = 500_000
PER_EPOCH = 2000
TABLE = Path(__file__).resolve().parent / "data" / "scenes.npy"


class SceneList(Dataset):
    def __init__(self):
        self.scenes = [
            {"id": f"scene_{i:07d}", "box": (i % 180, i % 90), "biome": i % 11} for i in range(SCENES)
        ]

    def __len__(self):
        return PER_EPOCH

    def __getitem__(self, i):
        scene = self.scenes[i * 37 % SCENES]
        return torch.full((512,), scene["box"][0] / 180), scene["biome"]


class SceneTable(Dataset):
    """Pickles as nothing but a path; each worker maps the table into its memory."""

    def __init__(self):
        if not TABLE.exists():
            TABLE.parent.mkdir(parents=True, exist_ok=True)
            i = np.arange(SCENES)
            np.save(TABLE, np.column_stack([i % 180, i % 90, i % 11]))
        self.table = None

    def __len__(self):
        return PER_EPOCH

    def __getitem__(self, i):
        if self.table is None:
            self.table = np.load(TABLE, mmap_mode="r")
        west, _, biome = self.table[i * 37 % SCENES]
        return torch.full((512,), float(west) / 180), int(biome)


def main():
    args = options("map a table of the scenes, and keep the workers")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    meter = Meter(args.seconds)
    loader = DataLoader(
        SceneTable() if args.fixed else SceneList(),
        batch_size=16,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="spawn",
        persistent_workers=args.fixed,
    )
    model = nn.Sequential(
        nn.Linear(512, 2000), nn.ReLU(), nn.Linear(2000, 1000), nn.ReLU(), nn.Linear(1000, 11)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    while not meter.over():
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(x)):
                break
    meter.report()


if __name__ == "__main__":
    main()
