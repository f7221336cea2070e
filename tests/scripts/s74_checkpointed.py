"""Activations checkpointed: forward passes run again within backward, with and without reentrance."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4))
        self.last = nn.Linear(128, 4)

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=number % 2 == 0)
        return self.last(x)


data = TensorDataset(torch.randn(3200, 64), torch.randint(0, 4, (3200,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
model = Deep()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
for epoch in range(100000):
    for number, (x, y) in enumerate(loader):
        nn.functional.cross_entropy(model(x), y).backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
