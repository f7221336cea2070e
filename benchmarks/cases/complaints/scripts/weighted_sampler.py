"""Each short epoch draws its samples out of five million weights, without replacement: slower than the samples.

https://github.com/pytorch/pytorch/issues/32221
https://github.com/pytorch/pytorch/issues/11931
https://github.com/pytorch/pytorch/issues/50689
"""

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

TOTAL = 5_000_000
PER_EPOCH = 2560


class Interactions(Dataset):
    def __len__(self):
        return TOTAL

    def __getitem__(self, i):
        return torch.tensor([i % 997, i % 991, i % 983]), float(i % 2)


class CumulativeSampler(Sampler):
    """Adds the weights up once; a draw is then a binary search. Rarely the same one twice."""

    def __init__(self, weights):
        self.bounds = weights.double().cumsum(0)

    def __len__(self):
        return PER_EPOCH

    def __iter__(self):
        draws = torch.rand(PER_EPOCH, dtype=torch.float64) * self.bounds[-1]
        return iter(torch.searchsorted(self.bounds, draws).tolist())


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 32)
        self.out = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 1), nn.Flatten(0))

    def forward(self, ids):
        return self.out(self.embed(ids).flatten(1))


def main():
    args = options("draw by binary search in the summed weights")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    weights = torch.rand(TOTAL) + 0.1
    if args.fixed:
        sampler = CumulativeSampler(weights)
    else:
        sampler = WeightedRandomSampler(weights, PER_EPOCH, replacement=False)
    loader = DataLoader(Interactions(), batch_size=64, sampler=sampler)
    model = Factors()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    meter = Meter(args.seconds)
    while not meter.over():
        for ids, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(ids), y.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(ids)):
                break
    meter.report()


if __name__ == "__main__":
    main()
