"""A compressed recording of 64 frames is unpacked to get one of them, then another time for the next.

https://github.com/dexmal/dexbotic/issues/30
https://github.com/pytorch/torchcodec/issues/715
"""

import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset

FOLDER = Path(__file__).resolve().parent / "data" / "recordings"
RECORDINGS = 30
SHAPE = (64, 3, 64, 64)


def write_recordings():
    FOLDER.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(2)
    for i in range(RECORDINGS):
        packed, plain = FOLDER / f"{i}.z", FOLDER / f"{i}.npy"
        if packed.exists() and plain.exists():
            continue
        frames = (rng.integers(0, 12, SHAPE) * 20).astype(np.uint8)
        packed.write_bytes(zlib.compress(frames.tobytes()))
        np.save(plain, frames)


class Frames(Dataset):
    def __init__(self, plain):
        self.plain = plain

    def __len__(self):
        return RECORDINGS * SHAPE[0]

    def __getitem__(self, i):
        recording, number = divmod(i, SHAPE[0])
        if self.plain:
            frames = np.load(FOLDER / f"{recording}.npy", mmap_mode="r")
        else:
            unpacked = zlib.decompress((FOLDER / f"{recording}.z").read_bytes())
            frames = np.frombuffer(unpacked, dtype=np.uint8).reshape(SHAPE)
        return torch.from_numpy(frames[number].astype(np.float32) / 255), recording % 6


def main():
    args = options("plain arrays, of which one frame is read", workers=2)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    write_recordings()
    loader = DataLoader(
        Frames(plain=args.fixed),
        batch_size=32,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 6),
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
