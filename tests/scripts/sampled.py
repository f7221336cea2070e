"""Sampled by py-spy: worker/script/stacks/*.txt name the lines of this file, so keep their numbers.

    python sampled.py alone|fork|spawn|compose|library
"""
import json
import os
import sys
import zlib

import torch
from torch.utils.data import DataLoader, Dataset


class Records(Dataset):
    def __init__(self):
        self.blob = zlib.compress(os.urandom(20000) * 20)
        self.text = json.dumps({"a": list(range(3000))})

    def __len__(self):
        return 100000

    def __getitem__(self, index):
        raw = zlib.decompress(self.blob)
        record = json.loads(self.text)
        return self.parse(record)

    def parse(self, record):
        return torch.tensor(record["a"][:256], dtype=torch.float32)


class Scale:
    def __call__(self, row):
        return [value / 255 for value in row]


class Smooth:
    def __call__(self, row):
        for _ in range(4):
            row = [(a + b) / 2 for a, b in zip(row, row[1:] + row[:1])]
        return row


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, row):
        for transform in self.transforms:
            row = transform(row)
        return row


class Rows(Dataset):
    transform = Compose([Scale(), Smooth(), torch.tensor])

    def __len__(self):
        return 100000

    def __getitem__(self, index):
        return self.transform(list(range(256)))


def collate(rows):
    out = []
    for row in rows:
        out.append(row * 2)
    return torch.stack(out)


class Shuffled:
    def __iter__(self):
        while True:
            order = sorted(range(20000), key=lambda one: one * 7919 % 20000)
            yield from order[:64]

    def __len__(self):
        return 1000000


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(256, 256) for _ in range(3)])

    def forward(self, batch):
        for layer in self.layers:
            batch = layer(batch).relu()
        return batch


def make_loader(kind):
    if kind == "compose":
        return DataLoader(Rows(), batch_size=16, sampler=Shuffled(), collate_fn=collate)
    if kind == "library":
        from rowlib import TableDataset

        return DataLoader(TableDataset(), batch_size=16, num_workers=1)
    workers = 0 if kind == "alone" else 2
    return DataLoader(
        Records(),
        batch_size=16,
        num_workers=workers,
        multiprocessing_context=kind if workers else None,
        collate_fn=collate,
        shuffle=True,
    )


def train(kind):
    torch.set_num_threads(1)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    total = 0.0
    for batch in make_loader(kind):
        loss = (net(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += sum(value * value for value in range(20000))
        yield loss.item()


if __name__ == "__main__":
    for step, loss in enumerate(train(sys.argv[1])):
        if step % 100 == 0:
            print(step, loss, flush=True)
