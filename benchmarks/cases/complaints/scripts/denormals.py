"""The envelope of a faint echo: its power lies below the smallest normal float32, where arithmetic is slow on x86.

Some processors are slow at any operation on such numbers, AMD's at square roots and divisions.

https://github.com/chelsea0x3b/dfdx/issues/59
https://github.com/chainer/chainer/issues/2554
https://github.com/uxlfoundation/oneDNN/issues/561
"""

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FAINT = 2.0**-66


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.classify = nn.Sequential(nn.Linear(600, 32), nn.ReLU(), nn.Linear(32, 6))

    def forward(self, pulse):
        signal = pulse * FAINT
        for _ in range(12):
            power = signal * signal
            signal = torch.sqrt(power) * 0.97
        return self.classify(signal / FAINT)


args = options("flush denormal numbers to zero")
if args.fixed:
    torch.set_flush_denormal(True)
torch.manual_seed(1)
torch.set_num_threads(1)

pulses = TensorDataset(torch.rand(7680, 600), torch.randint(0, 6, (7680,)))
loader = DataLoader(pulses, batch_size=192, shuffle=True)
model = Echo()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

meter = Meter(args.seconds)
while not meter.over():
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if meter.add(len(x)):
            break
meter.report()
