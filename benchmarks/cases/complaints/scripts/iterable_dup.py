"""A stream that two workers read, both from its first record to its last: each record is trained on twice.

https://github.com/huggingface/datasets/issues/3423
https://github.com/huggingface/datasets/issues/5360
https://github.com/espnet/espnet/pull/2081
"""

import numpy as np
import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

RECORDS = 1800


class Records(IterableDataset):
    def __init__(self, split_among_workers):
        self.split_among_workers = split_among_workers

    def __iter__(self):
        start, step = 0, 1
        info = get_worker_info()
        if self.split_among_workers and info is not None:
            start, step = info.id, info.num_workers
        for key in range(start, RECORDS, step):
            waves = np.random.default_rng(key).standard_normal((10, 3600)).astype(np.float32)
            waves.sort(axis=1)
            yield torch.from_numpy(waves.mean(axis=0)), key % 6, key


def main():
    args = options("each worker reads its own part of the stream", workers=2)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    loader = DataLoader(Records(args.fixed), batch_size=30, num_workers=args.workers)
    model = nn.Sequential(nn.Linear(3600, 64), nn.ReLU(), nn.Linear(64, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    meter = Meter(args.seconds)
    distinct = 0
    while not meter.over():
        keys_of_epoch = set()
        for waves, y, keys in loader:
            loss = F.cross_entropy(model(waves), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            keys_of_epoch.update(keys.tolist())
            if meter.add(len(waves)):
                break
        distinct += len(keys_of_epoch)
    print(f"{meter.samples} records trained on, {distinct} of them distinct in their epoch")
    meter.samples = distinct
    meter.report("distinct records")


if __name__ == "__main__":
    main()
