"""A table of 300,000 rows is in memory, and a batch of it is 1,024 separate look-ups that are stacked.

https://github.com/pytorch/pytorch/issues/106704
https://github.com/pytorch/pytorch/issues/4959
https://github.com/shenweichen/DeepCTR-Torch/issues/70
"""

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Clicks(Dataset):
    def __init__(self, count=300_000, columns=30):
        self.x = torch.rand(count, columns)
        self.y = self.x.mean(dim=1).gt(0.5).float()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class ClickBatches(Clicks):
    def __getitems__(self, rows):
        rows = torch.tensor(rows)
        return self.x[rows], self.y[rows]


def as_it_is(batch):
    return batch


def main():
    args = options("look up a batch at once (__getitems__)", workers=0)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    loader = DataLoader(
        ClickBatches() if args.fixed else Clicks(),
        batch_size=1024,
        shuffle=True,
        num_workers=args.workers,
        collate_fn=as_it_is if args.fixed else None,
    )
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    meter = Meter(args.seconds)
    while not meter.over():
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(x)):
                break
    meter.report()


if __name__ == "__main__":
    main()
