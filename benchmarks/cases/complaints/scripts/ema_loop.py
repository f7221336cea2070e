"""Averaged weights, updated after each step by a Python loop over nine hundred small parameters.

https://github.com/ultralytics/ultralytics/pull/25315
https://github.com/lightly-ai/lightly/pull/1899
https://github.com/ecmwf/WeatherGenerator/pull/2551
"""

import copy

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIELDS = 900
DECAY = 0.999


class FieldModel(nn.Module):
    """One small vector for each field of a record."""

    def __init__(self, width=24):
        super().__init__()
        self.fields = nn.ParameterList(nn.Parameter(torch.randn(width) / 8) for _ in range(FIELDS))
        self.out = nn.Linear(width, 4)

    def forward(self, x):
        return self.out(torch.tanh(x @ torch.stack(tuple(self.fields))))


class Average:
    def __init__(self, model):
        self.model = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model):
        weights = model.state_dict()
        for name, mean in self.model.state_dict().items():
            mean.copy_(DECAY * mean + (1 - DECAY) * weights[name].detach().cpu())


class FusedAverage(Average):
    def __init__(self, model):
        super().__init__(model)
        self.means = list(self.model.parameters())

    @torch.no_grad()
    def update(self, model):
        torch._foreach_lerp_(self.means, list(model.parameters()), 1 - DECAY)


def main():
    args = options("update the average with one call for all parameters")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    records = TensorDataset(torch.rand(4800, FIELDS), torch.randint(0, 4, (4800,)))
    loader = DataLoader(records, batch_size=16, shuffle=True)
    model = FieldModel()
    average = FusedAverage(model) if args.fixed else Average(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=True)

    meter = Meter(args.seconds)
    while not meter.over():
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update(model)
            if meter.add(len(x)):
                break
    meter.report()


if __name__ == "__main__":
    main()
