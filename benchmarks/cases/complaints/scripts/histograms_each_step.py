"""A tracker gets histograms of all weights and gradients at every step, and flushes each to disk.

https://github.com/wandb/wandb/issues/2268
https://github.com/facebookresearch/fairchem/pull/747
https://github.com/wandb/wandb/pull/1171
"""

import json
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LOGS = Path(__file__).resolve().parent / "data" / "run.jsonl"


class Tracker:
    """A run's log in JSON lines."""

    def __init__(self):
        LOGS.parent.mkdir(parents=True, exist_ok=True)
        self.log = logging.getLogger("tracker")
        self.log.setLevel(logging.INFO)
        self.log.propagate = False
        self.log.addHandler(logging.FileHandler(LOGS, mode="w"))  # flushes each record

    def scalar(self, name, value, step):
        self.log.info(json.dumps({"step": step, "name": name, "value": value}))

    def histogram(self, name, values, step):
        values = values.detach().float().flatten()
        counts, edges = torch.histogram(values, bins=64)
        record = {"step": step, "name": name, "counts": counts.tolist(), "edges": edges.tolist()}
        self.log.info(json.dumps(record))


def main():
    args = options("histograms at every 500th step", every=1)
    histograms_every = 500 if args.fixed else args.every
    torch.manual_seed(1)
    torch.set_num_threads(1)
    points = TensorDataset(torch.randn(9600, 96), torch.randn(9600, 1))
    loader = DataLoader(points, batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Linear(96, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tracker = Tracker()

    meter = Meter(args.seconds)
    while not meter.over():
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            over = meter.add(len(x))
            if meter.steps % histograms_every == 0:
                tracker.scalar("loss", loss.item(), meter.steps)
                for name, weight in model.named_parameters():
                    tracker.histogram("weights/" + name, weight, meter.steps)
                    tracker.histogram("gradients/" + name, weight.grad, meter.steps)
            if over:
                break
    meter.report()


if __name__ == "__main__":
    main()
