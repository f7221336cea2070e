"""Workloads of benchmarks/gpu.py: a ResNet-50, a GPT-2 small and a CNN fed with JPEGs, in plain torch.

Their data are made up, so that nothing has to be there: what loading costs is real, what is learned is nothing.
`is_small` shrinks a case until a CPU can train it, to try the benchmark's own code.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.cases.cpu import Case

__all__ = ["gpt2", "jpeg_cnn", "resnet50"]

_CLASSES = 1000
_MEAN, _STD = 127.5, 58.0
_LENGTH = 1 << 20  # items of an epoch: longer than any run


def resnet50(*, is_small: bool = False) -> Case:
    """ResNet-50 on 224x224 images that lie in memory as bytes; normalised and flipped in the item."""
    sizes = (1, 1, 1, 1) if is_small else (3, 4, 6, 3)
    width, side, count = (8, 64, 32) if is_small else (64, 224, 512)
    return Case(
        model=lambda: _ResNet(sizes, width),
        dataset=_StoredImages(count, side),
        optimizer=_sgd,
        settings={
            "micro_batch_size": 8 if is_small else 64,
            "num_workers": 1 if is_small else 4,
            "lr": 0.01,
        },
    )


def gpt2(*, is_small: bool = False) -> Case:
    """GPT-2 small, 124 million parameters, on sequences of 512 random tokens as dictionaries."""
    size = (
        _GptSize(vocabulary=256, context=32, layers=2, width=32, heads=2)
        if is_small
        else _GptSize()
    )
    return Case(
        model=lambda: _Gpt(size),
        dataset=_Tokens(size),
        optimizer=_adamw,
        settings={"micro_batch_size": 4 if is_small else 8, "num_workers": 0, "lr": 3e-4},
    )


def jpeg_cnn(*, is_small: bool = False) -> Case:
    """A small CNN on JPEGs that Pillow decodes, crops at random and resizes: the loader is the bottleneck.

    Raises:
        ImportError: Pillow is not installed.
    """
    count, side = (8, 64) if is_small else (256, 224)
    return Case(
        model=lambda: _Cnn(8 if is_small else 64),
        dataset=_Jpegs(_make_jpegs(count, (2 * side, 3 * side // 2)), side),
        optimizer=_sgd,
        settings={
            "micro_batch_size": 8 if is_small else 64,
            "num_workers": 1 if is_small else 2,
            "lr": 0.01,
        },
    )


class _StoredImages(Dataset[tuple[Tensor, int]]):
    """Random images (3, side, side), repeated over and over."""

    def __init__(self, count: int, side: int) -> None:
        self._images = torch.randint(256, (count, 3, side, side), dtype=torch.uint8)

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self._images[index % len(self._images)]
        if random.random() < 0.5:
            image = image.flip(-1)
        return image.float().sub_(_MEAN).div_(_STD), index % _CLASSES


class _Bottleneck(nn.Module):
    """He et al. 2015, arXiv 1512.03385, figure 5; the stride is in the 3x3 convolution, as in torchvision."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(
                nn.Conv2d(channels, width, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ),
            *(
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        is_same = stride == 1 and channels == out
        projection = nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )
        self.shortcut = nn.Identity() if is_same else projection

    def forward(self, features: Tensor) -> Tensor:
        return nn.functional.relu(self.body(features) + self.shortcut(features))


class _ResNet(nn.Sequential):
    """(batch, 3, height, width) -> (batch, 1000)."""

    def __init__(self, sizes: tuple[int, ...], width: int) -> None:
        stem = (
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage, size in enumerate(sizes):
            for index in range(size):
                blocks.append(
                    _Bottleneck(channels, width << stage, 2 if stage > 0 and index == 0 else 1)
                )
                channels = 4 * (width << stage)
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _CLASSES))
        super().__init__(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GptSize:
    """Radford et al. 2019, the smallest model; half of its context."""

    vocabulary: int = 50257
    context: int = 512
    layers: int = 12
    width: int = 768
    heads: int = 12


class _Tokens(Dataset[dict[str, Tensor]]):
    """`input_ids` and `labels`, each (context,)."""

    def __init__(self, size: _GptSize) -> None:
        self._context = size.context
        self._tokens = torch.randint(size.vocabulary, (1 << 18,))

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = 7 * index % (len(self._tokens) - self._context - 1)
        stretch = self._tokens[start : start + self._context + 1]
        return {"input_ids": stretch[:-1], "labels": stretch[1:]}


class _GptBlock(nn.Module):
    def __init__(self, size: _GptSize) -> None:
        super().__init__()
        self.heads, width = size.heads, size.width
        self.queries_keys_values = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
        self.mixed = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, features: Tensor) -> Tensor:
        batch, length, _ = features.shape
        heads = self.queries_keys_values(features).view(batch, length, 3, self.heads, -1)
        queries, keys, values = heads.permute(
            2, 0, 3, 1, 4
        )  # each (batch, heads, seq, features of a head)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        features = features + self.mixed(attended.transpose(1, 2).reshape(batch, length, -1))
        return features + self.feed_forward(features)  # type: ignore[no-any-return] # nn.Module's call is untyped


class _Gpt(nn.Module):
    def __init__(self, size: _GptSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(_GptBlock(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The mean cross-entropy, from ids and labels (batch, seq)."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        features = self.blocks(self.tokens(input_ids) + self.positions(places))
        logits = self.head(self.norm(features))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class _Jpegs(Dataset[tuple[Tensor, int]]):
    """Decoded, cropped at random, resized to (3, side, side) and flipped, as in ImageNet training."""

    def __init__(self, files: list[bytes], side: int) -> None:
        self._files, self._side = files, side

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        with Image.open(io.BytesIO(self._files[index % len(self._files)])) as file:
            image = file.convert("RGB")
        square = (self._side, self._side)
        image = image.resize(square, Image.Resampling.BILINEAR, box=_random_box(*image.size))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = np.asarray(image, dtype=np.float32).transpose(2, 0, 1)
        return torch.from_numpy((pixels - _MEAN) / _STD), index % _CLASSES


class _Cnn(nn.Sequential):
    """Four convolutions and a classifier."""

    def __init__(self, width: int) -> None:
        channels = (3, width, 2 * width, 4 * width, 8 * width)
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [
                nn.Conv2d(before, after, 3, 2, 1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
            ]
        super().__init__(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], _CLASSES)
        )


def _make_jpegs(count: int, size: tuple[int, int]) -> list[bytes]:
    """Smooth random pictures with a little noise, of (width, height): about as hard to decode as photographs."""
    from PIL import Image

    generator = np.random.default_rng(0)
    files = []
    for _ in range(count):
        coarse = generator.integers(256, size=(14, 18, 3), dtype=np.uint8)
        smooth = np.asarray(
            Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), dtype=np.int16
        )
        noisy: Any = (
            (smooth + generator.integers(-12, 13, size=smooth.shape)).clip(0, 255).astype(np.uint8)
        )
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, format="JPEG", quality=90)
        files.append(file.getvalue())
    return files


def _random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """A square (left, top, right, bottom) of random place and area within an image."""
    side = min(width, height) * sqrt(random.uniform(0.3, 1.0))
    left, top = random.uniform(0, width - side), random.uniform(0, height - side)
    return left, top, left + side, top + side


def _sgd(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def _adamw(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr)
