"""MLflow with a local folder of runs: parameters, a metric at each step, the weights as an artifact at each epoch."""
import os

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
import mlflow
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(3200, 64), torch.randint(0, 4, (3200,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mlflow.set_tracking_uri("file:./s78_runs")
mlflow.set_experiment("s78")
with mlflow.start_run():
    mlflow.log_params({"lr": 0.1, "batch_size": 32})
    for epoch in range(100000):
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            mlflow.log_metric("loss", loss.item(), step=epoch * 100 + step)
        torch.save(model.state_dict(), "s78_model.pt")
        mlflow.log_artifact("s78_model.pt")
