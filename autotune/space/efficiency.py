"""What a sample is worth in a batch: the larger the batch, the less, by the gradient noise scale.

Source: Qiao et al., "Pollux" (OSDI 2021), section 3.1: the efficiency of a sample in a batch of M against one in a
batch of M0 is (scale + M0) / (scale + M).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

__all__ = ["NoiseBounds", "efficiency"]


def efficiency(scale: float, batch: float, other: float) -> float:
    """What a sample is worth in another batch, over its worth in a batch: above 1 where the other one is smaller.

    Args:
        scale: The gradient noise scale, in samples; at least 0.
        batch: Samples of an optimizer step.
        other: Those of the other batch.
    """
    return 1.0 if scale == inf else (scale + batch) / (scale + other)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseBounds:
    """A gradient noise scale by which batches are ranked, with its 95 % interval, in samples."""

    value: float
    low: float
    high: float
    """Infinite where only a lower end is known."""

    def log_worth(self, batch: float, other: float) -> float:
        """Logarithm of the efficiency; with one end alone, the lower of what the ends say."""
        if self.high == inf:
            return self.log_worths(batch, other)[0]
        return log(efficiency(self.value, batch, other))

    def log_worths(self, batch: float, other: float) -> tuple[float, float]:
        """The interval of that logarithm, the lower end first."""
        ends = (log(efficiency(end, batch, other)) for end in (self.low, self.high))
        low, high = sorted(ends)
        return low, high
