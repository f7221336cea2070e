"""Linear algebra by NumPy in four workers, and its BLAS has a thread per core in each of them.

https://github.com/eduardoAcunaEspinoza/Hy2DL/issues/48
https://github.com/open-mmlab/mmdetection/pull/6867
https://github.com/open-mmlab/mmdetection/issues/3306
"""

import numpy as np
import torch
import torch.nn.functional as F
from meter import Meter, options
from threadpoolctl import threadpool_limits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Decorrelated(Dataset):
    """Channels of a recording, made independent of each other."""

    def __init__(self):
        self.recordings = np.random.default_rng(4).normal(size=(50, 180, 200))

    def __len__(self):
        return 4000

    def __getitem__(self, i):
        x = self.recordings[i % 50]
        factor = np.linalg.cholesky(np.cov(x) + np.eye(len(x)))
        x = np.linalg.solve(factor, x)
        x /= np.abs(x).max()
        return torch.from_numpy(x[None, ::4, ::4].astype(np.float32)), i % 8


def single_thread(worker_id):
    threadpool_limits(limits=1)


def main():
    args = options("one BLAS thread in each worker", workers=4)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    loader = DataLoader(
        Decorrelated(),
        batch_size=16,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        worker_init_fn=single_thread if args.fixed else None,
    )
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 8),
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
