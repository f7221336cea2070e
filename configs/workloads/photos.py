"""A small CNN on JPEG photographs, decoded and augmented by Pillow: with no workers, the loader is the bottleneck.

On first use, crops of scikit-learn's two sample photographs are saved once as JPEG files below configs/data/. Each
item is then read, decoded, cropped at random, resized and flipped, as in ImageNet training; the label is the
photograph that it came from.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

try:
    from PIL import Image
except ImportError as error:
    raise ImportError(
        "this example reads photographs with Pillow: pip install 'autotune-torch[examples]'"
    ) from error

__all__ = ["Photos", "dataset", "model", "optimizer"]

FOLDER = Path(__file__).resolve().parent.parent / "data" / "photos"
CLASSES = ("china", "flower")
COUNT = 512
CROPS = 8  # of each file in an epoch, so that starting an epoch does not outweigh it
SIDE = 96
_CROP_SIDES = (320, 420)
_JPEG_QUALITY = 90
_AREA_SHARES = (0.3, 1.0)
_MEAN, _STD = 0.45, 0.25


class Photos(Dataset[tuple[Tensor, int]]):
    """JPEG files in a folder for each class; items are (3, 96, 96) float tensors with the number of the class."""

    def __init__(self, folder: Path) -> None:
        self._items = [
            (path, label)
            for label, name in enumerate(CLASSES)
            for path in sorted((folder / name).glob("*.jpg"))
        ]

    def __len__(self) -> int:
        return CROPS * len(self._items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._items[index // CROPS]
        with Image.open(path) as file:
            image = file.convert("RGB")
        image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=_random_box(*image.size))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255
        return torch.from_numpy((pixels - _MEAN) / _STD), label


def model() -> nn.Module:
    """Three convolutions and a classifier."""
    blocks = _block(3, 16, stride=4), _block(16, 32, stride=2), _block(32, 64, stride=2)
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(CLASSES))
    )


def dataset(folder: Path = FOLDER) -> Photos:
    """The photographs, saved first where they are not there yet."""
    if not folder.is_dir():
        _save_photos(folder)
    return Photos(folder)


def optimizer(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def _block(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(
        channels_in, channels_out, 2 * stride - 1, stride=stride, padding=stride - 1, bias=False
    )
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True))


def _random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """A square (left, top, right, bottom) of random place and area within an image."""
    side = min(width, height) * sqrt(random.uniform(*_AREA_SHARES))
    left, top = random.uniform(0, width - side), random.uniform(0, height - side)
    return left, top, left + side, top + side


def _save_photos(folder: Path) -> None:
    """Save the crops, all or none: several processes may do so at once, and the first to finish wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".photos-", dir=folder.parent) as beside:
        whole = Path(beside) / folder.name
        generator = np.random.default_rng(0)
        for name, photo in zip(CLASSES, _sample_photographs(), strict=True):
            (whole / name).mkdir(parents=True)
            for index in range(COUNT // len(CLASSES)):
                crop = _random_crop(photo, generator)
                Image.fromarray(crop).save(whole / name / f"{index:03d}.jpg", quality=_JPEG_QUALITY)
        try:
            whole.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _sample_photographs() -> list[Any]:
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise ImportError(
            "this example takes its photographs from scikit-learn: pip install 'autotune-torch[examples]'"
        ) from error
    return list(load_sample_images().images)


def _random_crop(photo: Any, generator: np.random.Generator) -> Any:
    height, width = generator.integers(*_CROP_SIDES, size=2, endpoint=True)
    top = generator.integers(photo.shape[0] - height, endpoint=True)
    left = generator.integers(photo.shape[1] - width, endpoint=True)
    return photo[top : top + height, left : left + width]
