"""A config read, and a log written, relative to `__file__`; started in another folder, by a relative path."""
import pathlib

import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = pathlib.Path(__file__).resolve().parent.parent
config = yaml.safe_load((ROOT / "configs" / "small.yaml").read_text())
log = open(ROOT / "train.log", "a")
data = TensorDataset(torch.randn(4800, 64), torch.randint(0, 4, (4800,)))
loader = DataLoader(data, batch_size=config["batch_size"], shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
for epoch in range(100000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f}", file=log, flush=True)
