"""A small language model with autograd's anomaly detection on: somebody looked for a NaN, and forgot it.

https://github.com/Lightning-AI/pytorch-lightning/issues/17359
https://github.com/Lightning-AI/pytorch-lightning/issues/12344
https://github.com/yenchenlin/nerf-pytorch/issues/42
"""

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

args = options("do not detect anomalies")

torch.manual_seed(1)
torch.set_num_threads(1)
if not args.fixed:
    torch.autograd.set_detect_anomaly(True)


class CharModel(nn.Module):
    def __init__(self, vocabulary=64, width=48):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.cell = nn.LSTMCell(width, width)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, chars):
        h = chars.new_zeros(chars.size(0), self.cell.hidden_size, dtype=torch.float32)
        c = torch.zeros_like(h)
        logits = []
        for t in range(chars.size(1)):
            new_h, c = self.cell(self.embed(chars[:, t]), (h, c))
            h = torch.lerp(h, new_h, 0.9)
            logits.append(self.out(F.layer_norm(h, h.shape[1:])))
        return torch.stack(logits, dim=1)


text = torch.randint(0, 64, (3200, 29))
loader = DataLoader(TensorDataset(text), batch_size=16, shuffle=True)
model = CharModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

meter = Meter(args.seconds)
while not meter.over():
    for (chars,) in loader:
        logits = model(chars[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 64), chars[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if meter.add(len(chars)):
            break
meter.report()
