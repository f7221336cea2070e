"""Memory as a line in the micro batch, fitted over trials: M0 + k * b for each precision, with its own error."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import floor, inf, sqrt
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from autotune.core.phrasing import say_mib
from autotune.core.statistics import t_95
from autotune.core.training_config import AMP_DTYPES, AmpDtype
from autotune.core.trial import TrialRecord

__all__ = ["MemoryLine", "fit_memory", "is_too_big", "memory_lines", "say_largest"]


class MemoryLine(BaseModel):
    """Peak memory = intercept + slope * micro batch, by least squares over trials of one precision."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    amp_dtype: AmpDtype
    intercept_bytes: float
    bytes_per_sample: float
    """At least 0: memory does not shrink with the batch."""
    points: tuple[tuple[int, int], ...]
    """(micro batch, peak memory in bytes) of each trial that it is fitted to, in order of the batch."""
    error_bytes: float
    """Half of the 95 % prediction interval at the centre of the points: what workers, layout and chance add."""

    def predict_bytes(self, micro_batch_size: int) -> float:
        """Expected peak memory."""
        return self.intercept_bytes + self.bytes_per_sample * micro_batch_size

    def error_at(self, micro_batch_size: int) -> float:
        """Half of the 95 % prediction interval at a batch, in bytes: it widens away from the points.

        Source: prediction interval of simple linear regression, sqrt(1 + 1/n + (b - mean)^2 / sum of squares).
        """
        count, centre = len(self.points), fmean(batch for batch, _ in self.points)
        spread = sum((batch - centre) ** 2 for batch, _ in self.points)
        here = 1 + 1 / count + (micro_batch_size - centre) ** 2 / spread
        return self.error_bytes * sqrt(here / (1 + 1 / count))

    def fits(self, micro_batch_size: int, limit_bytes: int) -> bool:
        """Whether the expected memory and its error stay within a limit."""
        return self.predict_bytes(micro_batch_size) + self.error_at(micro_batch_size) <= limit_bytes

    def largest_batch(self, limit_bytes: int) -> int | None:
        """The largest micro batch whose expected memory and error stay within a limit; None where none is in sight."""
        if self.bytes_per_sample <= 0:
            return None
        most = max(0, floor((limit_bytes - self.intercept_bytes - self.error_bytes) / self.bytes_per_sample))
        least = min(most, floor(fmean(batch for batch, _ in self.points)))  # from here on both parts only grow
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.fits(middle, limit_bytes) else (least, middle - 1)
        return least


def memory_lines(records: Iterable[TrialRecord]) -> tuple[MemoryLine, ...]:
    """A line for each precision that at least two micro batches were measured in, plainest precision first."""
    points: dict[AmpDtype, list[tuple[int, int]]] = {}
    for record in records:
        if record.measurement is not None:
            point = (record.config.micro_batch_size, record.measurement.peak_memory_bytes)
            points.setdefault(record.config.amp_dtype, []).append(point)
    lines = [fit_memory(dtype, points[dtype]) for dtype in AMP_DTYPES if dtype in points]
    return tuple(line for line in lines if line is not None)


def fit_memory(amp_dtype: AmpDtype, points: Sequence[tuple[int, int]]) -> MemoryLine | None:
    """Fit a line; None where all points have one micro batch.

    Two points leave no degree of freedom: their error is taken as 10 % of the larger, our own convention.
    """
    if len({batch for batch, _ in points}) < 2:
        return None
    centre, level = fmean(batch for batch, _ in points), fmean(peak for _, peak in points)
    spread = sum((batch - centre) ** 2 for batch, _ in points)
    slope = max(0.0, sum((batch - centre) * (peak - level) for batch, peak in points) / spread)
    intercept = level - slope * centre
    residual = sum((peak - intercept - slope * batch) ** 2 for batch, peak in points)
    count = len(points)
    if count > 2:
        error = t_95(count - 2) * sqrt(residual / (count - 2) * (1 + 1 / count))
    else:
        error = 0.1 * max(peak for _, peak in points)
    return MemoryLine(
        amp_dtype=amp_dtype,
        intercept_bytes=intercept,
        bytes_per_sample=slope,
        points=tuple(sorted(points)),
        error_bytes=error,
    )


def say_largest(
    records: Sequence[TrialRecord],
    amp_dtype: AmpDtype,
    limit_bytes: int,
    *,
    batches: Sequence[int],
    overloaded: Collection[int] = (),
) -> str | None:
    """The biggest micro batch that the limit allows in a precision, in a sentence; None where none ran within it.

    Only what was run is named. The memory is compared to what the line through the other batches predicts.

    Args:
        records: the trials.
        amp_dtype: the precision.
        limit_bytes: of the peak memory.
        batches: every micro batch of the space. The limit is said to allow no more than one of them only where the
            next one was too big.
        overloaded: numbers of the trials that failed on the largest samples: their batches are too big.
    """
    own = [record for record in records if record.config.amp_dtype == amp_dtype]
    run = [(one.config.micro_batch_size, one.measurement.peak_memory_bytes) for one in own if one.measurement]
    least_overloaded = min((one.config.micro_batch_size for one in own if one.number in overloaded), default=inf)
    within = [(batch, peak) for batch, peak in run if peak <= limit_bytes and batch < least_overloaded]
    if not within:
        return None
    batch, peak = max(within)
    line = fit_memory(amp_dtype, [one for one in run if one[0] != batch])
    seen = f"run, it took {say_mib(peak)}"
    if line is not None:
        predicted, error = line.predict_bytes(batch), line.error_at(batch)
        seen += f"; predicted from other batches: {say_mib(predicted)} ± {say_mib(error)}"
    too_big = {one.config.micro_batch_size for one in own if is_too_big(one) or one.number in overloaded}
    larger = [one for one in batches if one > batch]
    if not larger:
        return f"The biggest micro batch of the space, {batch}, stays within {say_mib(limit_bytes)} ({seen})."
    if min(larger) in too_big:
        return f"The biggest micro batch that the limit of {say_mib(limit_bytes)} allows is {batch} ({seen})."
    return f"The biggest micro batch that was run within {say_mib(limit_bytes)} is {batch} ({seen})."


def is_too_big(record: TrialRecord) -> bool:
    """Whether a trial passed the memory limit, or ran out of memory."""
    has_run_out = record.measurement is None and record.outcome in {"oom", "host_oom"}
    return has_run_out or record.outcome == "over_memory"
