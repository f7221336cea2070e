"""Which items a rank of a group loads: its share of a map-style dataset, of the user's sampler or batch sampler.

Every rank draws the same order, from the same seed, and takes each `size`-th of it. An iterable dataset must share its
items out by itself: ranks whose first batches are equal betray one that does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DistributedSampler, Sampler

from autotune.worker.setup.process_group import Group

__all__ = ["EachNth", "own_share"]


class EachNth(Sampler[Any]):
    """A rank's share of what a sampler, or a batch sampler, draws: equally much for each rank.

    Args:
        drawn: the user's sampler; it must draw the same order on every rank.
        group: this rank among the others.
    """

    def __init__(self, drawn: Iterable[Any], group: Group) -> None:
        self.drawn, self.group = drawn, group

    def __iter__(self) -> Iterator[Any]:
        drawn, size = iter(self.drawn), self.group.size
        while len(one_each := list(islice(drawn, size))) == size:  # what is left over goes to none
            yield one_each[self.group.rank]

    def __len__(self) -> int:
        return len(self.drawn) // self.group.size  # type: ignore[arg-type] # raises TypeError as the user's own does

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on to a sampler that asks for it."""
        set_epoch = getattr(self.drawn, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def own_share(dataset: Any, group: Group, *, shuffle: bool, drop_last: bool) -> DistributedSampler[Any]:
    """Torch's own sampler for this rank. Source: torch.utils.data.distributed."""
    return DistributedSampler(
        dataset, num_replicas=group.size, rank=group.rank, shuffle=shuffle, seed=0, drop_last=drop_last
    )
