"""Penalties are kept as tensors for a plot, and each holds its graph with activations: memory grows by the step.

https://github.com/pytorch/pytorch/issues/1840
https://github.com/ray-project/ray/pull/40940
https://github.com/horovod/horovod/pull/641
"""

import torch
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def resident_mib():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS")) / 1024


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(64, 2048)
        self.decode = nn.Linear(2048, 64)

    def forward(self, x):
        return self.decode(torch.relu(self.encode(x)))


def loss_and_penalty(output, target):
    error = output - target
    # The second is for the plot alone: no backward pass goes through it and frees what it saved.
    return error.square().mean(), torch.exp(-error).mean()


def main():
    args = options("keep numbers, not tensors")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    signals = TensorDataset(torch.randn(32_000, 64))
    loader = DataLoader(signals, batch_size=64, shuffle=True)
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    meter = Meter(args.seconds)
    first_mib = None
    penalties = []
    while not meter.over():
        for (clean,) in loader:
            noisy = clean + 0.1 * torch.randn_like(clean)
            loss, penalty = loss_and_penalty(model(noisy), clean)
            penalties.append(penalty.item() if args.fixed else penalty)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.steps == 20:
                first_mib = resident_mib()
            if meter.add(len(clean)):
                break
    meter.report()
    print(f"penalty: {float(penalties[0]):.4f} at first, {float(penalties[-1]):.4f} at last")
    print(f"growth: {resident_mib() - first_mib:.0f} MiB after {meter.samples} samples")


if __name__ == "__main__":
    main()
