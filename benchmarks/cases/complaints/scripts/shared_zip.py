"""Four workers read one archive through the handle that they inherited, so a lock lets in one at a time.

https://github.com/mehta-lab/VisCy/issues/417
https://github.com/pytorch/pytorch/issues/11929
https://github.com/HannesStark/boltzgen/issues/40
"""

import io
import multiprocessing as mp
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset

ARCHIVE = Path(__file__).resolve().parent / "data" / "volumes.zip"
VOLUMES = 200
LATENCY_S = 0.005


def write_archive():
    if ARCHIVE.exists():
        return
    ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(6)
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(VOLUMES):
            buffer = io.BytesIO()
            np.save(buffer, rng.integers(0, 9, (16, 24, 24)).astype(np.uint8))
            archive.writestr(f"{i}.npy", buffer.getvalue())


def read_volume(archive, i):
    time.sleep(LATENCY_S)  # the archive is on a file server
    with archive.open(f"{i}.npy") as f:
        return np.load(io.BytesIO(f.read()))


class SharedArchive(Dataset):
    def __init__(self):
        self.archive = zipfile.ZipFile(ARCHIVE.open("rb", buffering=0))  # one position for all
        self.lock = mp.Lock()

    def __len__(self):
        return 4000

    def __getitem__(self, i):
        with self.lock:
            volume = read_volume(self.archive, i % VOLUMES)
        return torch.from_numpy(volume).float() / 9, i % 4


class OwnArchive(Dataset):
    """Every worker opens the archive for itself."""

    def __init__(self):
        self.archive = None

    def __len__(self):
        return 4000

    def __getitem__(self, i):
        if self.archive is None:
            self.archive = zipfile.ZipFile(ARCHIVE)
        return torch.from_numpy(read_volume(self.archive, i % VOLUMES)).float() / 9, i % 4


def main():
    args = options("a handle for each worker", workers=4)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    write_archive()
    loader = DataLoader(
        OwnArchive() if args.fixed else SharedArchive(),
        batch_size=16,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    model = nn.Sequential(
        nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

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
