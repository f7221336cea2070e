"""Three optimizers over one model: embeddings by SparseAdam, matrices by SGD, biases by AdamW, all stepped on each batch."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randint(0, 1000, (3200, 8)), torch.randint(0, 4, (3200,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
words = nn.Embedding(1000, 32, sparse=True)
head = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4))
optimizers = [
    torch.optim.SparseAdam(words.parameters(), lr=0.01),
    torch.optim.SGD([p for p in head.parameters() if p.ndim == 2], lr=0.1, momentum=0.9),
    torch.optim.AdamW([p for p in head.parameters() if p.ndim == 1], lr=0.001),
]
schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 10**6) for one in optimizers[1:]]
for epoch in range(100000):
    for tokens, labels in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(head(words(tokens).mean(1)), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
