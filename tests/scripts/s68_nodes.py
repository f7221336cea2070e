"""torchdata's nodes in place of a DataLoader: sampler, ParallelMapper with threads, Batcher, Prefetcher, Loader."""
import torch
from torch import nn
from torch.utils.data import RandomSampler, default_collate
from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper

x, y = torch.randn(3200, 64), torch.randint(0, 4, (3200,))
node = SamplerWrapper(RandomSampler(range(len(x))))
node = ParallelMapper(node, lambda i: (x[i], y[i]), num_workers=2, method="thread")
node = Mapper(Batcher(node, 32), default_collate)
loader = Loader(Prefetcher(node, 4))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(100000):
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
