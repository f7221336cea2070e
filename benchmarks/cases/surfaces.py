"""The workloads whose whole grids are recorded, each with its grid, the settings of today and a memory limit.

On the CPU four are those of configs/, one is bursty, one has a memory limit that its larger batches pass, and two are
held out: no constant of the product is chosen on them. On a GPU they are those of gpu.py. A grid is small enough to be
measured point by point, and holds what a search of that workload would vary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from autotune import TrainingConfig
from autotune.config.training_config import NEUTRAL_WITHOUT_WORKERS
from benchmarks.cases.cpu import Case
from benchmarks.cases.fidelity import (
    bursty,
    digits,
    photos,
    ragged,
    sleeping_vectors,
    text,
    tiny_gpt,
)
from benchmarks.cases.gpu import gpt2, jpeg_cnn, resnet50

__all__ = ["GRIDS", "Grid", "cliff", "every_point", "grids_for", "small_gpu_grids"]

_CLIFF_SIDE = 32
_CLIFF_CHANNELS = 48
_CLIFF_ITEMS = 1 << 16

Domains = Mapping[str, Sequence[Any]]
"""Values of each setting, under TrainingConfig's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A workload and the grid of its settings."""

    case: Callable[..., Case]
    baseline: Mapping[str, Any]
    """What is run today; a point of the grid."""
    domains: Domains
    memory_limit: float | str = 0.9
    is_held_out: bool = False
    """No constant of the product is chosen on it: it shows what a search leaves on jobs that it was not made with."""

    @property
    def space(self) -> dict[str, Any]:
        """The grid as the product's space: every other setting stays as it is."""
        fixed = TrainingConfig.model_validate(dict(self.baseline))
        others = fixed.model_dump(exclude={"lr", "world_size", "strategy", "ddp", *self.domains})
        return {**others, **{name: list(values) for name, values in self.domains.items()}}

    def configs(self) -> list[TrainingConfig]:
        """Every point once: without workers, prefetching and persistence mean nothing."""
        return every_point(self.baseline, self.domains)


def every_point(baseline: Mapping[str, Any], domains: Domains) -> list[TrainingConfig]:
    """Every point of a grid once: without workers, prefetching and persistence mean nothing."""

    def points() -> Iterator[TrainingConfig]:
        for values in product(*domains.values()):
            settings = {**baseline, **dict(zip(domains, values, strict=True))}
            if settings.get("num_workers", 0) == 0:
                settings |= NEUTRAL_WITHOUT_WORKERS
            yield TrainingConfig.model_validate(settings)

    return list(dict.fromkeys(points()))


def cliff() -> Case:
    """A small CNN with wide activations on images in memory: a sample takes some 2 MiB, and large batches too much."""
    return Case(model=_wide_cnn, dataset=_Images())


GRIDS: Mapping[str, Grid] = {
    "photos": Grid(
        case=photos,
        baseline={"micro_batch_size": 32},
        domains={
            "micro_batch_size": (16, 32, 64, 128),
            "num_workers": (0, 1, 2, 4, 8),
            "prefetch_factor": (2, 4),
            "persistent_workers": (True,),
            "amp_dtype": ("float32", "bfloat16"),
            "intra_op_threads": (None, 1),
        },
    ),
    "digits": Grid(
        case=digits,
        baseline={"micro_batch_size": 32, "num_workers": 2, "prefetch_factor": 2, "lr": 0.1},
        domains={
            "micro_batch_size": (8, 16, 32, 64, 128),
            "num_workers": (0, 1, 2, 4),
            "prefetch_factor": (2,),
            "persistent_workers": (False, True),
            "amp_dtype": ("float32", "bfloat16"),
            "intra_op_threads": (None, 1),
        },
    ),
    "sleeping_vectors": Grid(
        case=sleeping_vectors,
        baseline={"micro_batch_size": 32},
        domains={
            "micro_batch_size": (8, 16, 32, 64, 128, 256),
            "num_workers": (0, 1, 2, 4, 8, 16),
            "prefetch_factor": (2, 8),
            "persistent_workers": (True,),
            "intra_op_threads": (None, 1),
        },
    ),
    "tiny_gpt": Grid(
        case=tiny_gpt,
        baseline={"micro_batch_size": 8},
        domains={
            "micro_batch_size": (1, 2, 4, 8, 16),
            "grad_accum_steps": (1, 2),
            "num_workers": (0, 1, 2),
            "prefetch_factor": (2,),
            "persistent_workers": (True,),
            "amp_dtype": ("float32", "bfloat16"),
            "intra_op_threads": (None, 1),
        },
    ),
    "bursty": Grid(
        case=bursty,
        baseline={"micro_batch_size": 32},
        domains={
            "micro_batch_size": (16, 32, 64, 128),
            "num_workers": (0, 1, 2, 4, 8),
            "prefetch_factor": (2, 4, 8, 16),
            "persistent_workers": (True,),
            "intra_op_threads": (None, 1),
        },
    ),
    "cliff": Grid(
        case=cliff,
        baseline={"micro_batch_size": 16},
        domains={
            "micro_batch_size": (16, 32, 64, 128, 256),
            "num_workers": (0, 1, 2, 4),
            "prefetch_factor": (2, 4),
            "persistent_workers": (True,),
            "amp_dtype": ("float32", "bfloat16"),
            "intra_op_threads": (None, 1),
        },
        memory_limit="420MiB",
    ),
    "text": Grid(
        case=text,
        baseline={"micro_batch_size": 16},
        domains={
            "micro_batch_size": (16, 32, 64, 128),
            "num_workers": (0, 1, 2, 4),
            "prefetch_factor": (2, 4),
            "persistent_workers": (True,),
            "amp_dtype": ("float32", "bfloat16"),
            "intra_op_threads": (None, 1),
        },
        is_held_out=True,
    ),
    "ragged": Grid(
        case=ragged,
        baseline={"micro_batch_size": 2},
        domains={
            "micro_batch_size": (1, 2, 4, 8, 16),
            "grad_accum_steps": (1, 2),
            "num_workers": (0, 1),
            "prefetch_factor": (2,),
            "persistent_workers": (True,),
            "amp_dtype": ("float32", "bfloat16"),
            "intra_op_threads": (None, 1),
        },
        is_held_out=True,
    ),
}


_GPU_GRIDS: Mapping[str, Grid] = {
    "gpt2": Grid(
        case=gpt2,
        baseline={"micro_batch_size": 8, "lr": 3e-4},
        domains={
            "micro_batch_size": (4, 8, 16, 32, 64),
            "grad_accum_steps": (1, 2),
            "num_workers": (0, 2),
            "prefetch_factor": (2,),
            "persistent_workers": (True,),
            "pin_memory": (False, True),
            "amp_dtype": ("float32", "tf32", "bfloat16", "float16"),
        },
    ),
    "jpeg": Grid(
        case=jpeg_cnn,
        baseline={"micro_batch_size": 64, "num_workers": 2, "prefetch_factor": 2, "lr": 0.01},
        domains={
            "micro_batch_size": (32, 64, 128, 256),
            "num_workers": (0, 2, 4, 8, 16),
            "prefetch_factor": (2, 8),
            "persistent_workers": (False,),
            "pin_memory": (False, True),
            "amp_dtype": ("float32", "bfloat16"),
        },
    ),
    "resnet50": Grid(
        case=resnet50,
        baseline={"micro_batch_size": 64, "num_workers": 4, "prefetch_factor": 2, "lr": 0.01},
        domains={
            "micro_batch_size": (32, 64, 128, 256, 512),
            "num_workers": (4, 8, 16),
            "prefetch_factor": (2,),
            "persistent_workers": (False,),
            "pin_memory": (False, True),
            "amp_dtype": ("float32", "bfloat16", "float16"),
            "channels_last": (False, True),
        },
        memory_limit="24GiB",
    ),
}


def grids_for(device_kind: str) -> Mapping[str, Grid]:
    """The grids that suit a device."""
    return GRIDS if device_kind == "cpu" else _GPU_GRIDS


def small_gpu_grids() -> Mapping[str, Grid]:
    """The grids of a GPU over models that a CPU can train, to try the recording's own code."""
    return {
        name: replace(grid, case=partial(grid.case, is_small=True))
        for name, grid in _GPU_GRIDS.items()
    }


class _Images(Dataset[tuple[Tensor, int]]):
    """Crops of random images in memory, flipped by chance."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._images = torch.randint(256, (512, 3, 40, 40), dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return _CLIFF_ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left = index % 8, index // 8 % 8
        crop = self._images[index % 512, :, top : top + _CLIFF_SIDE, left : left + _CLIFF_SIDE]
        pixels = crop.float().div_(255).sub_(0.45).div_(0.25)
        return pixels.flip(-1) if index % 2 else pixels, index % 10


def _wide_cnn() -> nn.Module:
    wide = _CLIFF_CHANNELS
    return nn.Sequential(
        nn.Conv2d(3, wide, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(wide, wide, 1),
        nn.ReLU(),
        nn.Conv2d(wide, wide, 3, stride=2, padding=1, groups=wide),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(wide, 10),
    )
