"""Distillation: a large teacher in eval mode without gradients beside the student, two losses."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(3200, 64), torch.randint(0, 4, (3200,)))
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=1)
teacher = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 4)).eval().requires_grad_(False)
student = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(student.parameters(), lr=0.001)
for epoch in range(100000):
    for x, y in loader:
        with torch.inference_mode():
            soft = teacher(x)
        scores = student(x)
        loss = nn.functional.cross_entropy(scores, y)
        loss = loss + nn.functional.kl_div(scores.log_softmax(1), soft.clone().softmax(1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
