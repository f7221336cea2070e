"""Weights and optimizer state go to disk after every fifth step, and the step waits until they are there.

https://github.com/deepchem/deepchem/issues/458
https://github.com/Lightning-AI/pytorch-lightning/issues/10389
https://github.com/NVIDIA-NeMo/Automodel/pull/635
"""

import os

import torch
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CHECKPOINTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "checkpoints")


def save_checkpoint(model, optimizer, step):
    os.makedirs(CHECKPOINTS, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    with open(os.path.join(CHECKPOINTS, "latest.pt"), "wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())


def main():
    args = options("save after every 500th step", every=5)
    save_every = 500 if args.fixed else args.every
    torch.manual_seed(1)
    torch.set_num_threads(1)

    signals = TensorDataset(torch.randn(6400, 640), torch.randn(6400, 16))
    loader = DataLoader(signals, batch_size=16, shuffle=True)
    model = nn.Sequential(
        nn.Linear(640, 1800), nn.SiLU(), nn.Linear(1800, 900), nn.SiLU(), nn.Linear(900, 16)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    loss_fn = nn.MSELoss()

    meter = Meter(args.seconds)
    while not meter.over():
        for x, target in loader:
            loss = loss_fn(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            over = meter.add(len(x))
            if meter.steps % save_every == 0:
                save_checkpoint(model, optimizer, meter.steps)
            if over:
                break
    meter.report()


if __name__ == "__main__":
    main()
