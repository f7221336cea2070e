"""Epochs of a second or two, and each begins with new workers that all parse the catalogue again.

https://github.com/k2-fsa/icefall/pull/1215
https://github.com/metatensor/metatrain/pull/1271
https://github.com/huggingface/pytorch-image-models/pull/140
"""

import csv
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset

CATALOGUE = Path(__file__).resolve().parent / "data" / "catalogue.csv"
ROWS = 90_000


def write_catalogue():
    if CATALOGUE.exists():
        return
    CATALOGUE.parent.mkdir(parents=True, exist_ok=True)
    with CATALOGUE.open("w", newline="") as f:
        writer = csv.writer(f)
        for i in range(ROWS):
            writer.writerow([f"tile-{i:06d}", json.dumps({"seed": i * 7919 % 65536, "kind": i % 9})])


class Tiles(Dataset):
    def __init__(self):
        self.rows = None

    def __len__(self):
        return 960

    def __getitem__(self, i):
        if self.rows is None:  # once in each worker
            with CATALOGUE.open(newline="") as f:
                self.rows = [(name, json.loads(meta)) for name, meta in csv.reader(f)]
        _, meta = self.rows[i * 11 % ROWS]
        rng = np.random.default_rng(meta["seed"])
        return torch.from_numpy(rng.random((3, 32, 32), dtype=np.float32)), meta["kind"]


def main():
    args = options("keep the workers from epoch to epoch")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    write_catalogue()
    loader = DataLoader(
        Tiles(), batch_size=32, shuffle=True, num_workers=2, persistent_workers=args.fixed
    )
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 9),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    meter = Meter(args.seconds)
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
