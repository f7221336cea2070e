"""At each epoch's end a process of its own trains a linear probe, as evaluations of representations do."""
import subprocess
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(320, 64), torch.randint(0, 4, (320,)))
model = nn.Linear(64, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(loader):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


if sys.argv[1:] == ["probe"]:
    train(DataLoader(data, batch_size=64))
    print("probe ended", flush=True)
    sys.exit()
loader = DataLoader(data, batch_size=32, shuffle=True)
for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100000):
    train(loader)
    print("epoch", epoch, "batch", loader.batch_size, flush=True)
    subprocess.run([sys.executable, __file__, "probe"], check=True)
