"""What each rank of a group has measured, and what the group as a whole comes to.

Takes the Measurements that the ranks of one trial have reported; hands on one of the group: its rate, the memory and
the busy fraction of the worst rank, and each rank's own figures beside them. Which rank holds the others up is told by
what each reaches without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pydantic import BaseModel, ConfigDict

__all__ = ["Communication", "RankFigures", "name_devices", "uneven_ranks"]

_UNEVEN = 0.9  # of the others' median: own convention; more would name what neighbours and clocks do by themselves


class RankFigures(BaseModel):
    """One rank's own part of a trial. Rates in samples per second, fractions in 0..1."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rank: int
    host: int = 0
    """Number of its machine among those that the group is spread over."""
    device: str
    """torch's name for its device, such as "cuda:1"."""
    samples_per_s: float
    data_wait_fraction: float
    busy_fraction: float | None
    peak_memory_bytes: int
    loader_ceiling: float | None = None
    """Its loader alone, while the other ranks' loaders ran too; None where not measured."""
    device_ceiling: float | None = None
    """Its device alone, on batches that it holds, without exchanging gradients; None where not measured."""


class Communication(BaseModel):
    """What exchanging gradients takes of an optimizer step, on batches that the devices already hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    step_s: float
    """A step as it is, gradients exchanged."""
    step_alone_s: float
    """The same step without exchange (no_sync)."""
    exchange_s: float
    """The exchange alone: an all-reduce of as many bytes as the gradients have, bucket by bucket."""
    bytes_exchanged: int

    @property
    def exposed_s(self) -> float:
        """Seconds by which the exchange makes a step longer."""
        return max(0.0, self.step_s - self.step_alone_s)

    @property
    def exposed_fraction(self) -> float:
        """Share of a step that the exchange adds."""
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0

    @property
    def hidden_fraction(self) -> float:
        """Share of the exchange that lies behind the backward pass."""
        return min(1.0, max(0.0, 1.0 - self.exposed_s / self.exchange_s)) if self.exchange_s > 0 else 0.0


def name_devices(ranks: Sequence[RankFigures]) -> dict[int, str]:
    """Each rank's device, by the rank's number; where they stand on several hosts, with the host's, from 0."""
    is_over_hosts = len({one.host for one in ranks}) > 1
    return {one.rank: f"host {one.host}, {one.device}" if is_over_hosts else one.device for one in ranks}


def uneven_ranks(ranks: Sequence[RankFigures]) -> dict[int, str]:
    """Ranks that hold the others up, each with the reason: its loader or its device alone is slower than the others'.

    A rank is uneven where it reaches less than 90 % of the others' median.
    """
    found = {}
    for what, name in (("loader", "loader_ceiling"), ("device", "device_ceiling")):
        known = {one.rank: float(rate) for one in ranks if (rate := getattr(one, name)) is not None}
        for rank, rate in known.items():
            others = [other for number, other in known.items() if number != rank]
            if others and rank not in found and rate < _UNEVEN * median(others):
                found[rank] = f"its {what} alone gives {rate / median(others):.0%} of what the others' do"
    return found
