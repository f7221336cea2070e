"""A script that is run by `coverage run`, which traces every line and writes its data at the end."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 3200

    def __getitem__(self, index):
        return torch.full((64,), index / 3200) ** 2, index % 4


def main():
    loader = DataLoader(Squares(), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(100000):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
