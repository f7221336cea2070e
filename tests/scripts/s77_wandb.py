"""wandb offline: config, watch, metrics at each step, an artifact at each epoch."""
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

os.environ["WANDB_MODE"] = "offline"
import wandb

run = wandb.init(project="s77", config={"lr": 0.1, "batch_size": 32})
data = TensorDataset(torch.randn(3200, 64), torch.randint(0, 4, (3200,)))
loader = DataLoader(data, batch_size=run.config.batch_size, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
wandb.watch(model, log_freq=100)
optimizer = torch.optim.SGD(model.parameters(), lr=run.config["lr"])
for epoch in range(100000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        wandb.log({"loss": loss.item(), "epoch": epoch})
    torch.save(model.state_dict(), os.path.join(run.dir, "model.pt"))
    artifact = wandb.Artifact("model", "model")
    artifact.add_file(os.path.join(run.dir, "model.pt"))
    run.log_artifact(artifact)
