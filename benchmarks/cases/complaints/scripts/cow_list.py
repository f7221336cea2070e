"""An index of a million dictionaries: every worker that reads it gets its own copy, page by page.

https://github.com/pytorch/pytorch/issues/13246
https://github.com/pytorch/pytorch/issues/20433
"""

import multiprocessing as mp

import numpy as np
import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLES = 1_000_000


def path_of(i):
    return f"shards/{i % 512:03d}/{i:08d}.flac"


class ListIndex(Dataset):
    def __init__(self):
        self.rows = [{"file": path_of(i), "speaker": i % 12} for i in range(SAMPLES)]

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        row = self.rows[i]
        return torch.full((20,), float(hash(row["file"]) % 7)), row["speaker"]


class ArrayIndex(Dataset):
    """The same index as two arrays: reading them writes to no page."""

    def __init__(self):
        self.files = np.array([path_of(i) for i in range(SAMPLES)], dtype="S24")
        self.speakers = (np.arange(SAMPLES) % 12).astype(np.int64)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        file = self.files[i].decode()
        return torch.full((20,), float(hash(file) % 7)), int(self.speakers[i])


def private_mib(pid):
    """Memory of a process that it shares with nobody."""
    with open(f"/proc/{pid}/smaps_rollup") as f:
        kib = [int(line.split()[1]) for line in f if line.startswith("Private_")]
    return sum(kib) / 1024


def workers_mib():
    return sum(private_mib(child.pid) for child in mp.active_children())


def main():
    args = options("an index of two arrays")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    index = ArrayIndex() if args.fixed else ListIndex()
    loader = DataLoader(index, batch_size=256, shuffle=True, num_workers=2, persistent_workers=True)
    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    meter = Meter(args.seconds)
    first_mib = None
    while not meter.over():
        for x, speaker in loader:
            loss = F.cross_entropy(model(x), speaker)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            over = meter.add(len(x))
            if first_mib is None:
                first_mib = workers_mib()
            if over:
                break
    meter.report()
    print(f"growth: {workers_mib() - first_mib:.0f} MiB after {meter.samples} samples")


if __name__ == "__main__":
    main()
