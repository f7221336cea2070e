"""`accelerate launch` with a config file: two processes on CPUs, accumulation of 2, gather_for_metrics, main_process_first."""
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    with accelerator.main_process_first():
        data = TensorDataset(torch.randn(3200, 64), torch.randint(0, 4, (3200,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(100000):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {accelerator.gather(loss.detach()).mean():.3f}")
        accelerator.save_state("s62_state")


if __name__ == "__main__":
    main()
