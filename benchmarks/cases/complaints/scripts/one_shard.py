"""A stream of a single shard: of four workers one reads, and three have nothing to do.

https://github.com/huggingface/datasets/issues/5984
https://github.com/webdataset/webdataset/issues/72
https://github.com/huggingface/datasets/issues/8669
"""

import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FOLDER = Path(__file__).resolve().parent / "data" / "shards"
RECORDS = 4096
LATENCY_S = 0.004


def write_shards(shards):
    folder = FOLDER / str(shards)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(shards):
        file = folder / f"{number:02d}.npy"
        if not file.exists():
            rng = np.random.default_rng(number)
            np.save(file, rng.random((RECORDS // shards, 256), dtype=np.float32))
    return sorted(folder.glob("*.npy"))


class ShardStream(IterableDataset):
    def __init__(self, shards):
        self.shards = shards

    def __iter__(self):
        info = get_worker_info()
        mine = self.shards[info.id :: info.num_workers] if info else self.shards
        for shard in mine:
            for number, record in enumerate(np.load(shard, mmap_mode="r")):
                time.sleep(LATENCY_S)  # object storage
                yield torch.from_numpy(np.sort(record)), number % 3


def main():
    args = options("the same records in eight shards", workers=4)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    shards = write_shards(8 if args.fixed else 1)
    loader = DataLoader(
        ShardStream(shards), batch_size=16, num_workers=args.workers, persistent_workers=args.workers > 0
    )
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 3))
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
