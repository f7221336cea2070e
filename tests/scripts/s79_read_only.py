"""An ordinary user in a folder that is not theirs: only /tmp and the home folder can be written."""
import os
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

here = os.path.dirname(os.path.abspath(__file__))
try:
    open(os.path.join(here, "s79.log"), "w")
    raise SystemExit("this folder can be written")
except OSError:
    log = tempfile.NamedTemporaryFile("w", suffix=".s79.log")
data = TensorDataset(torch.randn(3200, 64), torch.randint(0, 4, (3200,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(100000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    print("epoch", epoch, file=log, flush=True)
