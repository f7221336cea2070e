"""Sequences of many lengths: the tokens of a sample, how many of them are padding, and what other batches would win.

Data alone: the worker counts and times, analysis/forecast/bucket_forecast calculates.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from autotune.frozen import FrozenModel

__all__ = ["BucketForecast", "LengthStep", "Lengths", "PackForecast", "Tokens"]

_Fraction = Annotated[float, Field(ge=0, le=1)]


class Tokens(FrozenModel):
    """The tokens of a trial's batches: numbers in the first integer tensor of two dimensions, (batch, length)."""

    per_sample: float
    """Mean over the window's batches, padding included."""
    relative_sd: float | None = None
    """Standard error of that, as a share of it; None of a single batch."""
    batches: int
    """Batches that were counted."""
    shortest: int
    """Length of the batch that is padded least."""
    longest: int
    """Length of the longest batch."""
    padding: _Fraction | None = None
    """Share of padding by the batches' own masks, in the warm-up; None where a batch has no mask."""


class LengthStep(FrozenModel):
    """What training on a batch of so many samples takes where its longest is so long."""

    longest: int
    """Tokens of its longest sample."""
    padded: int
    """Length to which the batch was padded."""
    seconds: float
    """Of one micro batch on the device alone, the median of the repeats."""
    relative_sd: float
    """Standard error of that, as a share of it."""


class BucketForecast(FrozenModel):
    """What batches of like lengths would change, from the lengths of items and the time of batches of each length."""

    pool_batches: int
    """Batches that are sorted by length at once."""
    random_padding: _Fraction
    """Share of padding in batches that are put together at random."""
    bucket_padding: _Fraction
    """The same in batches of like lengths."""
    device_time: float | None = None
    """The device's time for a sample in batches of like lengths, over that in today's batches; None where the time of
    batches of several lengths was not measured."""
    device_time_ci: tuple[float, float] | None = None
    """Its 95 % interval, by resampled items and repeats."""


class PackForecast(FrozenModel):
    """What rows that several samples fill would change, from the lengths of items and the time of batches of each."""

    row_tokens: int
    """Tokens of a row: as long as the longest batch that was timed."""
    samples_per_row: float
    """Samples that fill a row."""
    padding: _Fraction
    """Share of a row that is left empty, where samples are put first where they fit, the longest first."""
    device_time: float
    """The device's time for a sample in full rows, over that in today's batches."""
    device_time_ci: tuple[float, float]
    """Its 95 % interval, by resampled items and repeats, and by what attention over a whole row costs."""


class Lengths(FrozenModel):
    """Lengths of items, drawn at random where the dataset allows it."""

    items: int
    """Items whose length was read."""
    mean: float
    """Tokens of an item."""
    median: float
    """Tokens that half of the items stay below."""
    longest: int
    """Tokens of the longest item that was read."""
    batch_samples: int
    """Samples of the batches that all else is told for."""
    padding: _Fraction | None = None
    """Share of padding in today's batches, by their masks or by the items' mean; None where neither tells."""
    steps: tuple[LengthStep, ...] = ()
    """Batches of these items, timed on the device in turns; () where not measured."""
    buckets: BucketForecast
    packed: PackForecast | None = None
    """None where the time of batches of several lengths was not measured."""
