"""DeepSpeed by its launcher, with a JSON config: the engine makes the loader, steps the optimizer and accumulates."""
import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()
data = TensorDataset(torch.randn(3200, 64), torch.randint(0, 4, (3200,)))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=data
)
for epoch in range(100000):
    for x, y in loader:
        loss = nn.functional.cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
