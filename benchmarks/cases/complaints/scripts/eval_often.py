"""After every 20 training steps the whole validation set, with gradients recorded for nothing.

https://github.com/MultimediaTechLab/YOLO/issues/228
https://github.com/open-mmlab/mmdetection/issues/691
https://github.com/wandb/senpai/pull/126
"""

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_images(count):
    return TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(0, 5, (count,)))


def validate(model, loader):
    model.eval()
    losses = []
    correct = 0
    for x, y in loader:
        logits = model(x)
        losses.append(F.cross_entropy(logits, y).item())
        correct += int((logits.argmax(dim=1) == y).sum())
    model.train()
    return sum(losses) / len(losses), correct / len(loader.dataset)


def main():
    args = options("validate after every 400 steps, without gradients", every=20)
    eval_every = 400 if args.fixed else args.every
    torch.manual_seed(1)
    torch.set_num_threads(1)

    train_loader = DataLoader(make_images(3840), batch_size=32, shuffle=True)
    val_loader = DataLoader(make_images(1920), batch_size=32)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    meter = Meter(args.seconds)
    while not meter.over():
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            over = meter.add(len(x))
            if meter.steps % eval_every == 0:
                with torch.inference_mode(args.fixed):
                    validate(model, val_loader)
            if over:
                break
    meter.report()


if __name__ == "__main__":
    main()
