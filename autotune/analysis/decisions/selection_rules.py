"""Which configuration to recommend: the simplest of the best, and a larger batch only for a gain. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log1p

from autotune.policy import POLICY
from autotune.records.measurement import Interval
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import AMP_DTYPES, TrainingConfig

__all__ = ["break_even_noise_scale", "choose", "simplest_of_the_best", "simplicity", "worth_its_batch"]

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


def worth_its_batch(over: Interval, least: float) -> bool | None:
    """Return whether a larger batch beats the fastest at the baseline's own beyond noise, and by enough as measured.

    None: undecided, further runs may show it.

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


def choose(
    candidates: Sequence[TrialRecord],
    gains: Mapping[int, float],
    *,
    settled: int | None = None,
    worthwhile: float = POLICY.proof.worthwhile,
) -> TrialRecord:
    """Return the trial to recommend, from feasible ones (the baseline among them where it is feasible), at least one.

    Of those within 2 % of the best the simplest is taken; where the baseline is one of them, it stays, and else what
    was settled on does.

    Args:
        candidates: All that may be recommended.
        gains: By number, the logarithm of what each is believed to reach over any one of them, less what an idle device
            costs.
        settled: Number of the trial that the race has settled on, if any.
        worthwhile: A smaller gain counts as none, as a share.
    """
    best = max(gains[record.number] for record in candidates)
    near = [record for record in candidates if gains[record.number] >= best + log1p(-worthwhile)]
    return min(
        near,
        key=lambda record: (record.number != 0, record.number != settled, simplicity(record.config), record.number),
    )


def simplest_of_the_best(
    records: Sequence[TrialRecord],
    score: Callable[[TrialRecord], float],
    *,
    worthwhile: float = POLICY.proof.worthwhile,
) -> TrialRecord:
    """Of feasible trials, at least one: the one that would be recommended of them were their scores the truth."""
    least = (1 - worthwhile) * max(map(score, records))
    return min(
        (record for record in records if score(record) >= least),
        key=lambda record: (record.number != 0, simplicity(record.config), record.number),
    )
