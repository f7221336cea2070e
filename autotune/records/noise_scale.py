"""The gradient noise scale: how much gradients of single micro-batches differ from their mean, as data alone."""

from __future__ import annotations

from math import inf

from pydantic import Field

from autotune.frozen import FrozenModel

__all__ = ["GradientNorms", "KeptNoiseScale", "NoiseScale"]


class GradientNorms(FrozenModel):
    """Squared norms of gradients at the same weights, by groups of micro-batches of equally many samples."""

    micro_batch_samples: float = Field(gt=0)
    """Samples of a micro-batch: where they vary, their harmonic mean, as their noise goes."""
    micro_batches: int = Field(ge=2)
    """Micro-batches of a group."""
    groups: tuple[tuple[float, float], ...]
    """Of each group the mean of its micro-batches' squared norms, and the squared norm of their mean gradient."""
    epoch_samples: int | None
    """Samples of an epoch, each of which comes once in it; None where that is not known."""
    has_checkpoint: bool
    """The weights were read from the user's checkpoint; else they were those of a model that was just built."""


class NoiseScale(FrozenModel):
    """The batch, in samples, at which a gradient's noise is as large as the gradient: tr(S) / |G|^2.

    Well below it a batch that is twice as large saves almost half of the steps, well above it almost none.
    """

    value: float = Field(ge=0)
    """Samples; infinite where the gradient could not be told from its noise."""
    low: float = Field(ge=0)
    """The lower end of its 95 % interval."""
    high: float = Field(ge=0)
    """The upper end; infinite where only a lower one can be told."""
    samples: int
    """Whose gradients were measured."""
    has_checkpoint: bool
    """It was measured at the user's checkpoint; else at initialisation, where it says little of training."""

    @property
    def is_bounded(self) -> bool:
        """Both ends of its interval are known."""
        return self.high < inf


class KeptNoiseScale(FrozenModel):
    """What was measured, for a search that goes on: its trials are scored by that, where it is of a checkpoint."""

    noise_scale: NoiseScale
    checkpoint: str
    """Path, size and time of the file that it was measured at, or what tells the function or the weights, or None."""
