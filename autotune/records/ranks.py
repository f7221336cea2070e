"""Each rank's own figures in the measurement of a group, what exchanging gradients takes, and which ranks are slower.

Which rank slows the others down shows in what each rank reaches alone: in step they all have the slowest one's rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from autotune.frozen import FrozenModel

__all__ = ["Communication", "RankFigures", "SlowSide", "name_devices", "uneven_ranks"]

_UNEVEN = 0.9  # of the others' median: our convention; ranks differ by a few per cent through clocks and neighbours
_SIDES: tuple[Literal["loader", "device"], ...] = ("loader", "device")


class RankFigures(FrozenModel):
    """One rank's own part of a trial. Rates in samples per second, fractions in 0..1."""

    rank: int
    """Its number in the group."""
    host: int = 0
    """Number of its machine among those that the group is spread over."""
    device: str
    """torch's name for its device, such as "cuda:1"."""
    samples_per_s: float
    """Its own samples alone."""
    data_wait_fraction: float | None
    """Of its loop's time, waiting for its loader."""
    busy_fraction: float | None
    """Of its device; None where not known."""
    peak_memory_bytes: int
    """Of its device, or of its process tree on the CPU."""
    loader_ceiling: float | None = None
    """Its loader alone, while the other ranks' loaders ran too; None where not measured."""
    device_ceiling: float | None = None
    """Its device alone, on batches in its memory, without exchanging gradients; None where not measured."""


class Communication(FrozenModel):
    """What exchanging gradients takes of an optimizer step, on batches in the devices' memory."""

    step_s: float
    """A step as it is, gradients exchanged."""
    step_alone_s: float
    """The same step without exchange (no_sync)."""
    exchange_s: float
    """The exchange alone: an all-reduce of as many bytes as the gradients have, bucket by bucket."""
    bytes_exchanged: int
    """Bytes of the gradients, bucket by bucket."""

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


class SlowSide(NamedTuple):
    """The side of a rank that is slower than the other ranks'."""

    side: Literal["loader", "device"]
    fraction: float
    """What it reaches alone, of the other ranks' median."""


def name_devices(ranks: Sequence[RankFigures]) -> dict[int, str]:
    """Each rank's device, by the rank's number; where they stand on several hosts, with the host's, from 0."""
    is_over_hosts = len({rank.host for rank in ranks}) > 1
    return {rank.rank: f"host {rank.host}, {rank.device}" if is_over_hosts else rank.device for rank in ranks}


def uneven_ranks(ranks: Sequence[RankFigures]) -> dict[int, SlowSide]:
    """Ranks that slow the others down: loader or device alone reaches less than 90 % of the others' median."""
    found: dict[int, SlowSide] = {}
    for side in _SIDES:
        rates = {rank.rank: rate for rank in ranks if (rate := getattr(rank, f"{side}_ceiling")) is not None}
        for number, rate in rates.items():
            others = [other for its_number, other in rates.items() if its_number != number]
            if others and number not in found and rate < _UNEVEN * median(others):
                found[number] = SlowSide(side, rate / median(others))
    return found
