"""Cases of numa_binding: ranks that share two cores on the usual machine, and a server of two sockets on paper.

"exclusive" gives each rank a core and all that it starts: what another rank leaves idle it can't have. "node" needs a
machine of several NUMA nodes.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.cases.cpu import Case
from benchmarks.cases.ranks import mlp
from benchmarks.cases.settings import SettingCase

__all__ = ["BINDING_SETTING_CASES", "even_ranks", "uneven_loaders"]

_FEATURES = 64
_ITEMS = 1 << 16
_SORTED = 20_000
"""Numbers that an item of the second rank sorts: about a millisecond."""
_TWO_RANKS = {"strategy": "ddp", "world_size": 2}


class _Uneven(Dataset[tuple[Tensor, int]]):
    """Items that cost their maker a millisecond of CPU time in the second rank, and next to nothing elsewhere."""

    def __init__(self) -> None:
        self._numbers = torch.rand(_SORTED, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return _ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if os.environ.get("RANK") == "1":
            self._numbers.sort()
        return torch.full((_FEATURES,), float(index)), index % 2


def even_ranks() -> Case:
    """Two ranks that compute and exchange as much as each other."""
    case = mlp()
    return Case(model=case.model, dataset=case.dataset, settings={**case.settings, **_TWO_RANKS})


def uneven_loaders() -> Case:
    """Two ranks of which one's items are dear: its two workers can use both cores while the other rank waits."""
    settings = {
        "micro_batch_size": 32,
        "lr": 0.01,
        "num_workers": 2,
        "persistent_workers": True,
        **_TWO_RANKS,
    }
    return Case(model=_small, dataset=_Uneven(), settings=settings)


def _small() -> nn.Module:
    return nn.Linear(_FEATURES, 2)


BINDING_SETTING_CASES = (
    SettingCase(
        case=even_ranks(),
        setting="numa_binding",
        value="exclusive",
        expects="nothing",
        where="here",
        why="Two busy ranks on two cores have one each already: the kernel moves them seldom",
    ),
    SettingCase(
        case=uneven_loaders(),
        setting="numa_binding",
        value="exclusive",
        expects="loses",
        where="here",
        why="The workers of the rank whose items are dear can no longer use the core on which the other rank waits",
    ),
    SettingCase(
        case=None,
        setting="numa_binding",
        value="node",
        expects="wins",
        where="paper",
        why="A rank beside its GPU's memory and bus does not cross to the other socket (torch's word: 1 to 10 %)",
    ),
    SettingCase(
        case=None,
        setting="numa_binding",
        value="node",
        expects="nothing",
        where="paper",
        why="Where batches are small and kernels long, it does not matter from which socket they come",
    ),
)
