"""The precision guard: may a cheaper precision or a compiled model win? Figures of some 20 steps against float32.

The worker trains the same weights on the same batches in float32 and as the candidate would, and fills
PrecisionFigures; `objection` judges them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

from autotune.frozen import FrozenModel
from autotune.messages.precision import (
    gradient_not_finite,
    gradients_differ,
    loss_not_finite,
    losses_deviate,
    steps_skipped,
    too_few_steps_compared,
)
from autotune.note import Note
from autotune.settings.training_config import TrainingConfig

__all__ = [
    "GUARD_STEPS",
    "LOADING_SHARE",
    "MIN_STEPS",
    "OTHER_SEED",
    "PrecisionFigures",
    "deviation_of",
    "guard_key",
    "needs_guard",
    "objection",
    "shortfall",
]

GUARD_STEPS = 20
"""Optimizer steps that are compared: our convention."""
MIN_STEPS = 5
"""Fewest steps that the guard judges: our convention."""
LOADING_SHARE = 0.3
"""Of the time until the deadline, after which the batches that came are trained on in turn: our convention."""
OTHER_SEED = 1_000_003
"""Added to the seed of the repeated float32 run: a prime beyond the seeds of the steps, which count up."""
_LOSS_TOLERANCE = 0.05
"""Largest mean deviation of the losses, as a share of float32's mean loss: our own convention. bfloat16 keeps 8 bits of
a number (0.4 %); what deviates ten times as much after 20 steps does not train the same model."""
_MIN_COSINE = 0.95
"""Least cosine between the first step's gradients, all parameters as one vector: our own convention. Rounding to
bfloat16 alone leaves 0.9999; 0.95 is an angle of 18 degrees."""
_TELLING_COSINE = 0.2
"""Where two float32 gradients agree less than this, the gradient is noise, and its cosine means nothing: our
convention."""


class PrecisionFigures(FrozenModel):
    """What the guard has measured."""

    steps: int
    """Optimizer steps that were compared; those that the GradScaler skipped are not among them, their batches were
    taken again."""
    micro_batch_size: int
    """Batch of the comparison: the baseline's, or less where float32 does not fit."""
    reference_losses: tuple[float, ...]
    """float32, one a step: matrix products exactly so, convolutions as torch has them, by default in TF32."""
    losses: tuple[float, ...]
    """The candidate's, as many."""
    gradient_cosine: float | None
    """Between the first step's gradients; None where one of them is not finite."""
    repeat_cosine: float | None
    """Between two float32 gradients from the same weights and batch, under other random seeds: below 1 where the model
    itself is random (dropout)."""
    repeat_deviation: float
    """How far two float32 runs of some steps, under other random seeds, deviate, as `loss_deviation`."""
    skipped_steps: tuple[bool, ...] = ()
    """For each attempt at a step, whether the GradScaler skipped it; empty without one."""
    remarks: tuple[Note, ...] = ()
    """What weakens the comparison."""

    @property
    def loss_deviation(self) -> float | None:
        """Mean absolute deviation of the losses over the mean of float32's; None where one is not finite."""
        return deviation_of(self.reference_losses, self.losses)


def deviation_of(reference: Sequence[float], losses: Sequence[float]) -> float | None:
    """Mean absolute deviation of some losses over the reference's mean; None where one is not finite, or none is there.

    The longer of the two is cut to the length of the other.
    """
    pairs = list(zip(reference, losses, strict=False))
    if not pairs or not all(isfinite(value) for pair in pairs for value in pair):
        return None
    scale = sum(abs(exact) for exact, _ in pairs)
    return sum(abs(loss - exact) for exact, loss in pairs) / scale if scale > 0 else 0.0


def needs_guard(config: TrainingConfig, baseline: TrainingConfig) -> bool:
    """Whether a configuration computes less exactly than float32, in another way than what the user runs today."""
    is_cheaper = config.amp_dtype != "float32" or config.compile
    return is_cheaper and guard_key(config) != guard_key(baseline)


def guard_key(config: TrainingConfig) -> tuple[str, str]:
    """What the guard's answer depends on: the precision, and the mode of a compiled model, "" for another.

    A fused optimizer, which computes the same formulas in the same precision, is not compared by itself: it would cost
    a process to see what rounding changes. It is part of the comparison where the trial that brings it on has it.
    """
    return config.amp_dtype, config.compile_mode if config.compile else ""


def shortfall(figures: PrecisionFigures) -> Note | None:
    """Why the figures are too few to be judged; None where they are enough, or where a loss that is not finite ends it.

    A GradScaler that skips step after step is judged by its skips.
    """
    attempts = max(figures.steps, len(figures.skipped_steps))
    is_finite = all(isfinite(loss) for loss in (*figures.losses, *figures.reference_losses))
    if attempts >= MIN_STEPS or not is_finite:
        return None
    return too_few_steps_compared(figures.steps, least_steps=MIN_STEPS)


def objection(figures: PrecisionFigures) -> Note | None:
    """Why the candidate may not win, with the figures; None where it may.

    Losses that float32 itself does not keep finite are no objection to the candidate. What two float32 runs differ by
    is allowed on top of the tolerance. Where their gradients differ, half of the cosine that they have is asked for.
    """
    if not all(isfinite(loss) for loss in figures.reference_losses):
        return None
    return next(_objections_to_losses(figures), None) or _gradients_differ(figures)


def _objections_to_losses(figures: PrecisionFigures) -> Iterator[Note]:
    at = next((at for at, loss in enumerate(figures.losses) if not isfinite(loss)), None)
    if at is not None:
        yield loss_not_finite(loss=str(figures.losses[at]), step=at + 1, steps=GUARD_STEPS)
    attempts, last = len(figures.skipped_steps), figures.skipped_steps[-5:]
    if any(last):
        skipped = sum(figures.skipped_steps)
        yield steps_skipped(last_skipped=sum(last), last=len(last), skipped=skipped, attempts=attempts)
    deviation, allowed = figures.loss_deviation, _LOSS_TOLERANCE + figures.repeat_deviation
    if deviation is not None and deviation > allowed:
        yield losses_deviate(figures.steps, deviation_fraction=deviation, allowed_fraction=allowed)


def _gradients_differ(figures: PrecisionFigures) -> Note | None:
    """Nothing is asked of the gradient where float32's own is not finite, or not reproducible."""
    cosine, repeat = figures.gradient_cosine, figures.repeat_cosine
    if repeat is None:
        return None
    if cosine is None:
        return gradient_not_finite() if figures.steps > 0 else None
    least = _MIN_COSINE if repeat >= _MIN_COSINE else repeat / 2
    if repeat < _TELLING_COSINE or cosine >= least:
        return None
    return gradients_differ(cosine, least_cosine=least)
