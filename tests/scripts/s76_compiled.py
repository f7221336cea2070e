"""torch.compile in the script, of the model and of the optimizer's step."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(3200, 64), torch.randint(0, 4, (3200,)))
loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
model = torch.compile(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.compile(fullgraph=False)
def update():
    optimizer.step()


for epoch in range(100000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        update()
