"""Which of the confirmed configurations to recommend, and what is proven of it, by fixed rules.

Comes in: a Confirmation for each finalist and the baseline, all measured in turns, and the spread between runs. Goes
out: ratios of rates with intervals, claims over the baseline, and the one to recommend. Pure.

*Recommended* is what is believed to be the best; *proven* is what beats the baseline at a kept error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log1p

from autotune.analysis.decisions.claims import WORTHWHILE, believe
from autotune.analysis.decisions.confirmation_plan import FEWEST_ROUNDS
from autotune.analysis.decisions.rounds import Difference, RoundsFit, fit_rounds
from autotune.analysis.statistics import t_quantile
from autotune.records.recommendation import Confirmation, Ratio
from autotune.records.run_spread import RunSpread
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import AMP_DTYPES, TrainingConfig

__all__ = [
    "ONE_SIDED_ERROR",
    "WIDEST_SPREAD",
    "Claim",
    "believed_gains",
    "break_even_noise_scale",
    "choose",
    "claim_of",
    "ratio_of",
    "simplest_of_the_best",
    "simplicity",
    "worth_its_batch",
]

ONE_SIDED_ERROR = 0.025
"""Of either end of an interval that is looked at once: of a 95 % interval."""
WIDEST_SPREAD = 0.25
"""Standard deviation of the logarithm of a rate that no runs of the same settings have shown: the most are 0.20, three
runs of DistributedDataParallel on one rank of an H200 (benchmarks/results/gpu-nvidia-h200.json). An H100's runs show
0.12 at most, four windows of ResNet-50 that lie 29 % apart; those of CPUs 0.10."""
_FEW_ROUNDS_SHARE = 0.3
"""Of the error that a claim may spend, what is left where rounds are so few: the finalist was chosen by a run that also
teaches the spread. Source: benchmarks/decisions.py, hurried searches, at spreads of up to 20 %."""
_WIDEST_DEGREES = 3
"""Degrees of freedom that it counts as known by, as what is assumed of a device is: our own convention."""
_ROUNDING = 1e-9  # of a variance that equals that of the fewest rounds
_FIRST = "compile"
_SWITCHES = sorted(
    [
        (name, field.default)
        for name, field in reversed(TrainingConfig.model_fields.items())
        if isinstance(field.default, bool)
    ],
    key=lambda switch: switch[0] != _FIRST,
)
"""With the value that each has where nothing is set; compilation counts most, then the last of a TrainingConfig's."""


def simplicity(config: TrainingConfig) -> tuple[int, ...]:
    """Sort key: fewest devices, fewest workers, smallest batch, plainest precision, then the fewest switches."""
    return (
        config.world_size,
        config.num_workers * config.process_count,
        config.global_batch_size,
        AMP_DTYPES.index(config.amp_dtype),
        config.grad_accum_steps,
        *(int(getattr(config, name) != default) for name, default in _SWITCHES),
        int(config.compile_mode != "default"),
        ("node", "exclusive").index(config.numa_binding) + 1 if config.numa_binding else 0,
        config.prefetch_factor or 0,
        config.intra_op_threads or 0,
        config.worker_threads or 0,
        0 if config.ddp is None else len(config.ddp.model_dump(exclude_defaults=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is said of an entrant over the baseline."""

    speedup: Ratio
    """What is believed, with the interval that keeps its error."""
    measured: Ratio
    """As measured, with the same interval."""
    gain_probability: float
    """That it is faster at all."""
    is_proven: bool
    """It beats the baseline at the kept error, and runs, not what is assumed of them, tell that; or no spread between
    runs that is plausible explains it."""
    is_by_far: bool
    """It is proven for the latter reason alone."""


def ratio_of(
    entrant: Confirmation, other: Confirmation, spread: RunSpread, one_sided_error: float = ONE_SIDED_ERROR
) -> Ratio | None:
    """The rate of an entrant over another's by the rounds of both; None where they share none."""
    fit = fit_rounds((entrant, other), spread)
    difference = fit.difference(entrant.number, other.number)
    return None if difference is None else _interval(difference, one_sided_error)


def claim_of(number: int, fit: RoundsFit, one_sided_error: float) -> Claim | None:
    """What may be said of an entrant over the baseline; None where they share no round."""
    difference = fit.difference(number, 0)
    if difference is None:
        return None
    belief, measured = believe(difference), _interval(difference, one_sided_error)
    value = exp(belief.mean)
    speedup = Ratio(value=value, low=min(measured.low, value), high=max(measured.high, value))
    bar = t_quantile(1 - one_sided_error, _WIDEST_DEGREES) * difference.unit_error * WIDEST_SPREAD
    is_shown = measured.low > 1 and _is_shown_by_runs(difference, one_sided_error)
    is_by_far = measured.low > 1 and not is_shown and difference.value > bar
    return Claim(
        speedup=speedup,
        measured=measured,
        gain_probability=belief.gain_probability,
        is_proven=is_shown or is_by_far,
        is_by_far=is_by_far,
    )


def _is_shown_by_runs(difference: Difference, one_sided_error: float) -> bool:
    """Return whether runs, not what is assumed of them, carry a gain whose interval lies above none.

    In few rounds that interval rests on what is assumed, even if some runs have taught the spread: where runs differ by
    more than that, it is too narrow. There the gain must also lie beyond what the runs alone have shown of the spread.
    """
    if not difference.is_carried or difference.unit_error**2 <= 2 / FEWEST_ROUNDS + _ROUNDING:
        return difference.is_carried
    if difference.seen_degrees < 1:
        return False
    bar = t_quantile(1 - _FEW_ROUNDS_SHARE * one_sided_error, difference.seen_degrees) * difference.seen_error
    return difference.value > bar


def worth_its_batch(over: Ratio, least: float) -> bool | None:
    """Return whether a larger batch beats the fastest at the baseline's own beyond noise, and by enough as measured.

    None: undecided, further rounds may show it.

    Args:
        over: The larger batch's throughput over that of the fastest at the baseline's own.
        least: The ratio that is enough.
    """
    if over.low > 1 and over.value >= least:
        return True
    return False if over.high < least or over.high <= 1 else None


def break_even_noise_scale(batch: float, larger: float, ratio: float) -> float | None:
    """Return the gradient noise scale above which a larger batch reaches a loss sooner, in samples.

    0: at any noise scale. None: at none, since the larger batch is not faster.

    Source: Qiao et al., "Pollux" (OSDI 2021), section 3.1: at a noise scale S (McCandlish et al. 2018, arXiv
    1812.06162), a sample in a batch of M teaches (S + M0) / (S + M) of one in a batch of M0.

    Args:
        batch: Samples of an optimizer step.
        larger: Samples of an optimizer step with the larger batch.
        ratio: The larger batch's throughput over the other's, in samples.
    """
    return max(0.0, (larger - ratio * batch) / (ratio - 1)) if ratio > 1 else None


def believed_gains(candidates: Sequence[Confirmation], spread: RunSpread) -> dict[int, float]:
    """By number, the logarithm of what each is believed to reach over the baseline; that of the baseline is 0.

    Without a baseline among them nothing is shrunk, since there is no gain to doubt: it is that over the first one.
    What shares no round with the reference, not even by others, is left out.
    """
    fit = fit_rounds(candidates, spread)
    has_baseline = 0 in fit.numbers
    reference = 0 if has_baseline else fit.numbers[0]
    differences = {number: fit.difference(number, reference) for number in fit.numbers if number != reference}
    gains = {
        number: believe(difference).mean if has_baseline else difference.value
        for number, difference in differences.items()
        if difference is not None
    }
    return {reference: 0.0, **gains}


def choose(
    candidates: Sequence[Confirmation], gains: Mapping[int, float], idle_costs: Mapping[int, float]
) -> Confirmation:
    """The candidate to recommend, from feasible ones (the baseline among them where it is feasible), at least one.

    Scores are believed gains less what an idle device costs. Of those within 2 % of the best the simplest is taken;
    where the baseline is one of them, it stays.

    Args:
        candidates: all that may be recommended.
        gains: of those that can be compared, see `believed_gains`; others' do not count.
        idle_costs: by number, the share by which an idle device lowers the score.
    """
    scores = {
        entrant.number: gains[entrant.number] + log1p(-idle_costs.get(entrant.number, 0.0))
        for entrant in candidates
        if entrant.number in gains
    }
    best = max(scores.values())
    near = [entrant for entrant in candidates if scores.get(entrant.number, -1e9) >= best + log1p(-WORTHWHILE)]
    return min(near, key=lambda entrant: (entrant.number != 0, simplicity(entrant.config), entrant.number))


def simplest_of_the_best(records: Sequence[TrialRecord], score: Callable[[TrialRecord], float]) -> TrialRecord:
    """Of feasible trials, at least one: the one that would be recommended of them were their scores the truth."""
    least = (1 - WORTHWHILE) * max(map(score, records))
    return min(
        (record for record in records if score(record) >= least),
        key=lambda record: (record.number != 0, simplicity(record.config), record.number),
    )


def _interval(difference: Difference, one_sided_error: float) -> Ratio:
    half = t_quantile(1 - one_sided_error, difference.degrees_of_freedom) * difference.standard_error
    low, high = difference.value - half, difference.value + half
    return Ratio(value=exp(difference.value), low=exp(low), high=exp(high))
