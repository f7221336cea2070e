"""A codec's native library binds the process to one core as it is loaded, and all workers inherit that.

https://github.com/pytorch/pytorch/issues/101850
https://github.com/pytorch/pytorch/issues/107366
https://github.com/ultralytics/ultralytics/issues/9862
"""

import os

import numpy as np
import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset


def load_codec():
    """Stands for an import whose OpenMP runtime binds its first thread to the first core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


class Spectra(Dataset):
    def __len__(self):
        return 3000

    def __getitem__(self, i):
        noise = np.random.default_rng(i).standard_normal((32, 4096))
        power = np.abs(np.fft.rfft(noise)) ** 2
        return torch.from_numpy(np.log(power[:, ::32] + 1).astype(np.float32)).flatten(), i % 5


def main():
    args = options("give the process its cores back", workers=2)
    cores = os.sched_getaffinity(0)
    load_codec()
    if args.fixed:
        os.sched_setaffinity(0, cores)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    loader = DataLoader(
        Spectra(),
        batch_size=24,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    model = nn.Sequential(nn.Linear(32 * 65, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

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
