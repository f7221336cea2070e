"""Items come from memory for nothing; a collate function of nested Python loops pads them token by token.

https://github.com/huggingface/transformers/issues/14428
https://github.com/facebookresearch/detectron2/issues/1613
"""

import numpy as np
import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset

PAD = 0


class Reviews(Dataset):
    def __init__(self, count=16_000):
        rng = np.random.default_rng(5)
        self.reviews = [rng.integers(1, 4000, rng.integers(25, 190)) for _ in range(count)]

    def __len__(self):
        return len(self.reviews)

    def __getitem__(self, i):
        return {"ids": self.reviews[i], "stars": i % 5}


def collate_slowly(samples):
    width = max(len(s["ids"]) for s in samples)
    ids, mask, stars = [], [], []
    for s in samples:
        ids.append([])
        mask.append([])
        for k in range(width):
            inside = k < len(s["ids"])
            ids[-1].append(int(s["ids"][k]) if inside else PAD)
            mask[-1].append(float(inside))
        stars.append(s["stars"])
    return torch.tensor(ids), torch.tensor(mask), torch.tensor(stars)


def collate(samples):
    width = max(len(s["ids"]) for s in samples)
    ids = torch.full((len(samples), width), PAD)
    for row, s in zip(ids, samples):
        row[: len(s["ids"])] = torch.from_numpy(s["ids"])
    return ids, ids.ne(PAD).float(), torch.tensor([s["stars"] for s in samples])


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4000, 32)
        self.out = nn.Linear(32, 5)

    def forward(self, ids, mask):
        summed = torch.einsum("bld,bl->bd", self.embed(ids), mask)
        return self.out(summed / mask.sum(1, keepdim=True))


def main():
    args = options("pad rows, not tokens", workers=1)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    loader = DataLoader(
        Reviews(),
        batch_size=128,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        collate_fn=collate if args.fixed else collate_slowly,
    )
    model = BagOfWords()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    meter = Meter(args.seconds)
    while not meter.over():
        for ids, mask, stars in loader:
            loss = F.cross_entropy(model(ids, mask), stars)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(ids)):
                break
    meter.report()


if __name__ == "__main__":
    main()
