"""Nearly all items take 2 ms, one in 80 a second; batches that are ready queue behind the late one.

https://arxiv.org/abs/2509.10712
https://github.com/pytorch/pytorch/pull/141833
"""

import random
import time

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Archive(Dataset):
    """Some objects have been moved to slow storage."""

    def __init__(self, count=4000):
        rng = random.Random(8)
        self.delay_s = [1.0 if rng.random() < 1 / 80 else 0.002 for _ in range(count)]

    def __len__(self):
        return len(self.delay_s)

    def __getitem__(self, i):
        time.sleep(self.delay_s[i])
        return torch.full((3, 32, 32), i % 13 / 13), i % 4


def main():
    args = options("take batches as they come (in_order=False)", workers=4)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    loader = DataLoader(
        Archive(),
        batch_size=4,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        in_order=not args.fixed,
    )
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 4)
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
