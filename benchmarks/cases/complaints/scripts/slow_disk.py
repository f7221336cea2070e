"""One worker reads small files from a share that takes 8 ms to answer: cores and device wait.

https://github.com/horovod/horovod/issues/824
https://github.com/MIC-DKFZ/nnUNet/issues/308
https://github.com/Lightning-AI/pytorch-lightning/issues/3329
"""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset

SHARE = Path(__file__).resolve().parent / "data" / "patches"
PATCHES = 240
LATENCY_S = 0.008


def fill_share():
    SHARE.mkdir(parents=True, exist_ok=True)
    for i in range(PATCHES):
        file = SHARE / f"{i}.bin"
        if not file.exists():
            file.write_bytes(torch.randint(0, 256, (3 * 48 * 48,), dtype=torch.uint8).numpy().tobytes())


class Patches(Dataset):
    def __len__(self):
        return 3600

    def __getitem__(self, i):
        time.sleep(LATENCY_S)  # the network
        data = bytearray((SHARE / f"{i % PATCHES}.bin").read_bytes())
        pixels = torch.frombuffer(data, dtype=torch.uint8).view(3, 48, 48)
        return pixels / 255.0, i % 7


def main():
    args = options("eight workers wait at the same time", workers=1)
    workers = 8 if args.fixed else args.workers
    torch.manual_seed(1)
    torch.set_num_threads(1)
    fill_share()
    loader = DataLoader(
        Patches(), batch_size=32, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 7),
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
