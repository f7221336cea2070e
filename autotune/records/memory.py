"""Memory in training: how it grows, and what is kept for the backward pass.

Data alone: the worker measures it (worker/measure, worker/after_window/activations), analysis and diagnosis judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune.frozen import FrozenModel
from autotune.settings.environment import Environment

__all__ = ["Activations", "MemoryGrowth", "MemoryLimits", "PairedRatio", "SavedBytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """The memory that a trial may take; unknown until the machine is."""

    limit_bytes: int | None = None
    """Of the device as a whole, or of RAM where `limit_is_ram`."""
    ram_bytes: int | None = None
    """RAM of this machine."""
    limit_is_ram: bool = False

    @classmethod
    def on(cls, environment: Environment, limit_bytes: int) -> MemoryLimits:
        """Return the limits on a machine, under the memory limit of the search."""
        return cls(limit_bytes=limit_bytes, ram_bytes=environment.ram_bytes, limit_is_ram=environment.has_only_ram)


class MemoryGrowth(FrozenModel):
    """How memory has grown in a window, from one stretch of it to the next; what came in its first third left out."""

    kind: Literal["host", "device"]
    """host: what the trial's process and its loader workers have resident beside files and shared memory; device: what
    tensors take of the allocator's memory, of several devices together."""
    bytes_per_batch: float
    """Mean growth."""
    half_width: float
    """Half of its 95 % interval."""
    batches: int
    """Over which it was looked at."""
    seconds: float
    """That these took."""
    last_bytes: int
    """What was held at the end."""

    @property
    def low(self) -> float:
        """The interval's lower end, in bytes a batch."""
        return self.bytes_per_batch - self.half_width

    @property
    def high(self) -> float:
        """The interval's upper end."""
        return self.bytes_per_batch + self.half_width


class SavedBytes(FrozenModel):
    """What one forward pass keeps for the backward pass, the model's parameters and buffers left out.

    Bytes are those of storages: what tensors share counts once.
    """

    samples: int
    """Samples of the batch."""
    total_bytes: int
    """All that is kept."""
    inside_bytes: int = 0
    """What the repeated blocks keep, and nothing outside of them."""
    inputs_bytes: int = 0
    """What the blocks are given, as far as nothing outside of them keeps it: what is left of them by checkpointing."""
    largest_bytes: int = 0
    """The most that one block keeps, its input left out: what computing it once more takes for a moment."""

    @property
    def least_saved_bytes(self) -> int:
        """What checkpointing each block saves at least: the peak may fall where one of them is computed once more."""
        return max(0, self.inside_bytes - self.inputs_bytes - self.largest_bytes)

    @property
    def most_saved_bytes(self) -> int:
        """What it saves where the peak falls outside of all blocks."""
        return max(0, self.inside_bytes - self.inputs_bytes)


class PairedRatio(FrozenModel):
    """One time over another, both measured in turns."""

    value: float
    """Median over the turns."""
    sd: float | None
    """Standard error of that; None of fewer than three turns."""


class Activations(FrozenModel):
    """What a micro batch keeps for its backward pass, and what checkpointing the model's repeated blocks changes.

    Source: Chen, Xu, Zhang, Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost".
    """

    block: str | None
    """Class of the repeated blocks: of those that stand in a ModuleList or a Sequential, the one by which most is
    saved; None where none saves anything."""
    blocks: int = 0
    """How often such a block is called in a forward pass."""
    whole: SavedBytes
    """Of a batch as the loader delivers it."""
    half: SavedBytes | None = None
    """Of one of half its samples; None where that could not be made."""
    forward: PairedRatio | None = None
    """The blocks' forward pass over a step on the device alone: what computing them once more takes; None without such
    blocks."""
    half_step: PairedRatio | None = None
    """A step on half of the batch, over one on the whole; None where that could not be made."""

    @property
    def bytes_per_sample(self) -> float:
        """What a further sample adds to all that is kept."""
        return self._growth("total_bytes")

    def least_saved_bytes(self, samples: int) -> float:
        """What checkpointing saves at least with so many samples in a micro batch."""
        return self._at("least_saved_bytes", samples)

    def most_saved_bytes(self, samples: int) -> float:
        """What it saves at most."""
        return self._at("most_saved_bytes", samples)

    def _at(self, name: str, samples: int) -> float:
        base: int = getattr(self.whole, name)
        return max(0.0, base + self._growth(name) * (samples - self.whole.samples))

    def _growth(self, name: str) -> float:
        """Bytes of a further sample: from two sizes, since weights that autocast has converted do not grow."""
        whole: int = getattr(self.whole, name)
        if self.half is None or self.half.samples >= self.whole.samples:
            return whole / self.whole.samples
        half: int = getattr(self.half, name)
        return max(0.0, (whole - half) / (self.whole.samples - self.half.samples))
