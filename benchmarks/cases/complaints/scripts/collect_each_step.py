"""gc.collect() and empty_cache() after every step, "to save memory", next to a large index of Python objects.

https://github.com/huggingface/peft/pull/2894
https://github.com/Nerogar/OneTrainer/issues/1459
https://github.com/huggingface/transformers/issues/31372
"""

import gc

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Dialogues(Dataset):
    def __init__(self, count=150_000):
        self.turns = [{"ids": [i % 97, i % 89, i % 83], "reply": [i % 4]} for i in range(count)]

    def __len__(self):
        return len(self.turns)

    def __getitem__(self, i):
        turn = self.turns[i]
        return torch.tensor(turn["ids"]), turn["reply"][0]


def free_memory():
    gc.collect()
    torch.cuda.empty_cache()


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(100, 256)
        self.layers = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 4)
        )

    def forward(self, ids):
        return self.layers(self.embed(ids))


def main():
    args = options("leave collecting to Python")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    loader = DataLoader(Dialogues(), batch_size=64, shuffle=True)
    model = Ranker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    meter = Meter(args.seconds)
    while not meter.over():
        for ids, reply in loader:
            loss = F.cross_entropy(model(ids), reply)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not args.fixed:
                free_memory()
            if meter.add(len(ids)):
                break
    meter.report()


if __name__ == "__main__":
    main()
