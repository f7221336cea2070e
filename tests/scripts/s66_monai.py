"""MONAI's CacheDataset and DataLoader: transforms of dictionaries, cached in memory at the start; a MetaTensor in each batch."""
import numpy
import torch
from monai.data import CacheDataset, DataLoader
from monai.networks.nets import BasicUNet
from monai.transforms import Compose, EnsureChannelFirstd, RandFlipd, ScaleIntensityd, ToTensord

items = [
    {"image": numpy.random.rand(32, 32).astype("float32"), "label": numpy.random.randint(0, 2, (32, 32))}
    for _ in range(96)
]
keys = ["image", "label"]
transforms = Compose(
    [
        EnsureChannelFirstd(keys, channel_dim="no_channel"),
        ScaleIntensityd("image"),
        RandFlipd(keys, prob=0.5),
        ToTensord(keys),
    ]
)
loader = DataLoader(CacheDataset(items, transforms, progress=False), batch_size=8, shuffle=True)
model = BasicUNet(spatial_dims=2, in_channels=1, out_channels=2, features=(8, 8, 16, 16, 16, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(100000):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"][:, 0].long())
        loss.backward()
        optimizer.step()
