"""WebDataset: shards of tar files that the script writes once, decoded as a stream, batched in the pipeline, WebLoader."""
import io
import os
import tarfile

import torch
import webdataset
from torch import nn

os.makedirs("s67_shards", exist_ok=True)
for shard in range(4):
    path = f"s67_shards/{shard:04d}.tar"
    if not os.path.exists(path):
        with tarfile.open(path, "w") as tar:
            for number in range(200):
                for ending, content in (("pth", torch.randn(64)), ("cls", number % 4)):
                    body = io.BytesIO()
                    torch.save(content, body) if ending == "pth" else body.write(str(content).encode())
                    header = tarfile.TarInfo(f"{shard}{number:05d}.{ending}")
                    header.size = body.tell()
                    body.seek(0)
                    tar.addfile(header, body)
data = (
    webdataset.WebDataset("s67_shards/{0000..0003}.tar", shardshuffle=4)
    .shuffle(100)
    .decode()
    .to_tuple("pth", "cls")
    .batched(20)
)
loader = webdataset.WebLoader(data, batch_size=None, num_workers=1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(100000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
