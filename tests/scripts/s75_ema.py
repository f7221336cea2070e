"""An average of the weights (swa_utils.AveragedModel), updated at each step, and evaluated on another loader each epoch."""
import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1600, 64), torch.randint(0, 4, (1600,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
val = DataLoader(data, batch_size=200)
model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 4))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
best = 0.0
for epoch in range(100000):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    average.eval()
    right = sum((average(x).argmax(1) == y).sum().item() for x, y in val)
    if right >= best:
        best, kept = right, copy.deepcopy(average.module)
