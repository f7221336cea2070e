"""Whether a larger batch trains sooner: the gradient noise scale, and the one from which on a larger batch pays.

Sources: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1, for the noise scale and its estimate from gradients of
two batch sizes; for what a sample is worth in a batch see space.efficiency.
"""

from __future__ import annotations

from math import inf, sqrt

import numpy as np

from autotune.analysis.statistics import t_95
from autotune.records.noise_scale import GradientNorms, NoiseScale

__all__ = ["FEWEST_GROUPS", "break_even_noise_scale", "noise_scale_of"]

FEWEST_GROUPS = 8
"""Groups of micro-batches from which an interval is told: our own convention."""


def break_even_noise_scale(batch: float, larger: float, ratio: float) -> float | None:
    """The noise scale above which a larger batch reaches a loss sooner, in samples; 0: at any. None: at none.

    Args:
        batch: Samples of an optimizer step.
        larger: Those of the larger batch.
        ratio: The rate of the larger batch over that of the other, in samples.
    """
    return max(0.0, (larger - ratio * batch) / (ratio - 1)) if ratio > 1 else None


def noise_scale_of(norms: GradientNorms) -> NoiseScale | None:
    """The noise scale by norms of gradients, with its 95 % interval; None where the groups do not tell it.

    A ratio of means: of single groups it would be biased. Its interval is Fieller's, which has no upper end where noise
    hides the gradient. Where an epoch draws each sample once, means are nearer to that of all samples than draws with
    replacement would be, by the noise over the samples of the epoch.

    Source: Fieller 1954, "Some problems in interval estimation"; Cochran, "Sampling Techniques", 3rd ed., section 2.6.
    """
    groups = len(norms.groups)
    if groups < FEWEST_GROUPS:
        return None
    small, large = norms.micro_batch_samples, norms.micro_batch_samples * norms.micro_batches
    of_one, of_mean = np.array(norms.groups, dtype=np.float64).T
    noise = (of_one - of_mean) / (1 / small - 1 / large)
    signal = (large * of_mean - small * of_one) / (large - small)
    signal += noise / (norms.epoch_samples or inf)
    if not np.isfinite([*signal, *noise]).all():
        return None
    variances = np.cov(noise, signal) * t_95(groups - 1) ** 2 / groups
    over, under = float(noise.mean()), float(signal.mean())
    low, high = _fieller(over, under, *(float(variances[place]) for place in ((0, 0), (1, 1), (0, 1))))
    if (low, high) == (0.0, inf):
        return None
    value = max(over, 0.0) / under if under > 0 else inf
    return NoiseScale(
        value=max(value, low), low=low, high=high, samples=round(large * groups), has_checkpoint=norms.has_checkpoint
    )


def _fieller(over: float, under: float, over_var: float, under_var: float, joint: float) -> tuple[float, float]:
    """The interval of a ratio that is not below 0, by means and their variances, each times the quantile squared."""
    a, b, c = under**2 - under_var, over * under - joint, over**2 - over_var
    square = b * b - a * c
    if square < 0:  # nothing is told
        return 0.0, inf
    if a > 0 and under > 0:
        return max((b - sqrt(square)) / a, 0.0), max((b + sqrt(square)) / a, 0.0)
    return (max((b - sqrt(square)) / a, 0.0) if a < 0 and c > 0 else 0.0), inf
