"""Which of the confirmed configurations to use, by fixed rules.

Comes in: a Confirmation for each finalist and the baseline, all measured in turns. Goes out: ratios of their rates with
intervals, and the one to recommend. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, hypot

from autotune.analysis.statistics import ratio_interval
from autotune.records.measurement import Measurement, Rate
from autotune.records.recommendation import Confirmation, Ratio
from autotune.settings.training_config import AMP_DTYPES, TrainingConfig

__all__ = ["choose", "gains_of", "rate_of_runs", "ratio_by_rounds", "ratio_of", "simplicity"]

SAME_RATE_SHARE = 0.02
"""Rates this close to the fastest count as fast enough for the score to decide (our convention)."""
_ROUNDS_FOR_BETWEEN_RUN_SPREAD = 3
"""The fewest whose t interval is of use, 2.5 times their standard deviation instead of 9 times: our own convention."""
_SWITCHES = [
    (name, field.default)
    for name, field in reversed(TrainingConfig.model_fields.items())
    if isinstance(field.default, bool)
]
"""With the value that each has where nothing is set; the last of a TrainingConfig's switches counts most."""


def simplicity(config: TrainingConfig) -> tuple[int, ...]:
    """Sort key: fewest devices, fewest workers, smallest batch, plainest precision, then the fewest switches."""
    return (
        config.world_size,
        config.num_workers * config.process_count,
        config.global_batch_size,
        AMP_DTYPES.index(config.amp_dtype),
        config.grad_accum_steps,
        *(int(getattr(config, name) != default) for name, default in _SWITCHES),
        config.prefetch_factor or 0,
        config.intra_op_threads or 0,
        0 if config.ddp is None else len(config.ddp.model_dump(exclude_defaults=True)),
    )


def rate_of_runs(runs: Sequence[Measurement]) -> Rate:
    """Geometric mean of runs' rates, with the interval of their spread, or of their windows below three runs."""
    if len(runs) == 1:
        return Rate(value=runs[0].samples_per_s, low=runs[0].samples_per_s_ci[0], high=runs[0].samples_per_s_ci[1])
    ratio = ratio_by_rounds([(run.samples_per_s, 1.0) for run in runs], [_relative_half_width(run) for run in runs])
    return Rate(**ratio.model_dump())


def ratio_of(entrant: Confirmation, other: Confirmation) -> Ratio | None:
    """The rate of an entrant over another's, round by round; None where they share no round."""
    pairs = [(a, b) for a, b in zip(entrant.rounds, other.rounds, strict=False) if a is not None and b is not None]
    if not pairs:
        return None
    if entrant.number == other.number:
        return Ratio(value=1.0, low=1.0, high=1.0)
    spreads = [hypot(_relative_half_width(a), _relative_half_width(b)) for a, b in pairs]
    return ratio_by_rounds([(a.samples_per_s, b.samples_per_s) for a, b in pairs], spreads)


def ratio_by_rounds(pairs: Sequence[tuple[float, float]], relative_half_widths: Sequence[float]) -> Ratio:
    """The ratio of rates over rounds, with the half width that the windows of each round give it.

    From three rounds on the spread between rounds gives the interval. Below, the intervals of the windows do, joined in
    quadrature; they hold the usual spread between runs, but not this machine's drift of the moment.
    """
    value, low, high = ratio_interval(pairs)
    if len(pairs) < _ROUNDS_FOR_BETWEEN_RUN_SPREAD:
        spread = hypot(*relative_half_widths) / len(pairs)
        low, high = value * exp(-spread), value * exp(spread)
    return Ratio(value=value, low=low, high=high)


def gains_of(candidates: Sequence[Confirmation], baseline: Confirmation | None) -> list[Confirmation]:
    """Those that beat the baseline beyond noise; all where there is none."""
    if baseline is None:
        return list(candidates)
    return [entrant for entrant in candidates if (ratio := ratio_of(entrant, baseline)) and ratio.low > 1]


def choose(candidates: Sequence[Confirmation], scores: dict[int, float], baseline: Confirmation | None) -> Confirmation:
    """The candidate to recommend, from feasible ones (the baseline among them where it is feasible).

    Only what beats the baseline beyond noise is a gain; without one the baseline stays. Of the gains within 2 % of the
    fastest the best score wins, and among those whose rate can't be told from the winner's the simplest does.
    """
    gains = gains_of(candidates, baseline)
    if not gains:
        assert baseline is not None, "candidates must not be empty"  # noqa: S101 - our own bug
        return baseline
    fastest = max(entrant.samples_per_s for entrant in gains)
    near = [entrant for entrant in gains if entrant.samples_per_s >= (1 - SAME_RATE_SHARE) * fastest]
    near.sort(key=lambda entrant: (simplicity(entrant.config), entrant.number))
    best = max(near, key=lambda entrant: scores[entrant.number])
    ratios = ((entrant, ratio_of(entrant, best)) for entrant in near)
    return next(entrant for entrant, ratio in ratios if ratio is None or ratio.low <= 1 <= ratio.high)


def _relative_half_width(run: Measurement) -> float:
    low, high = run.samples_per_s_ci
    return (high - low) / 2 / run.samples_per_s
