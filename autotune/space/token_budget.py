"""The token budget of a batch sampler: what is searched in place of the micro batch, which follows it.

Comes in: the baseline, the facts of the probe, what the user has given. Goes out: the baseline with the samples that
its budget holds on average, the budgets to try, or a reason against what was given. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.settings.search_space import Domain
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import WorkloadFacts

__all__ = ["budget_obstacle", "global_batch_of", "samples_within", "token_budgets", "with_batch", "with_mean_batch"]


def budget_obstacle(given: Mapping[str, Domain], facts: WorkloadFacts) -> str | None:
    """Why the settings that the user has listed can't be searched with this batch sampler, or None."""
    if facts.has_token_budget and "micro_batch_size" in given:
        return (
            "space.micro_batch_size must be left out where the batch sampler takes max_tokens, which the samples of a "
            "batch follow, but it was given; list space.max_tokens instead"
        )
    has_budgets = any(value is not None for value in given.get("max_tokens", ()))
    if has_budgets and not facts.has_token_budget and facts.script is None:
        return (
            "space.max_tokens needs a batch sampler with a parameter of that name, but the workload has none; leave it "
            "out, or give workload.batch_sampler as batch_sampler(dataset, max_tokens)"
        )
    return None


def with_mean_batch(baseline: TrainingConfig, facts: WorkloadFacts) -> TrainingConfig:
    """The baseline with the samples that its token budget holds on average; as it is where there is none to go by."""
    if facts.budget_samples is None:
        return baseline
    return baseline.model_copy(update={"micro_batch_size": max(1, round(facts.budget_samples))})


def samples_within(max_tokens: int, baseline: TrainingConfig) -> int:
    """Samples of a batch of a token budget, in proportion to the baseline's."""
    assert baseline.max_tokens is not None, "there is no budget to go by"  # noqa: S101 - our own bug
    return max(1, round(baseline.micro_batch_size * max_tokens / baseline.max_tokens))


def with_batch(config: TrainingConfig, micro_batch_size: int) -> TrainingConfig:
    """A configuration with another micro batch; a token budget goes along in proportion."""
    changes: dict[str, int] = {"micro_batch_size": micro_batch_size}
    if config.max_tokens is not None:
        changes["max_tokens"] = max(1, round(config.max_tokens * micro_batch_size / config.micro_batch_size))
    return config.model_copy(update=changes)


def global_batch_of(config: TrainingConfig, facts: WorkloadFacts) -> int:
    """What one optimizer step takes over all ranks: tokens where there is a token budget, else samples."""
    unit: int = getattr(config, facts.batch_setting)
    return unit * config.grad_accum_steps * config.world_size


def token_budgets(
    baseline: TrainingConfig, ranks: Sequence[int], most_samples: int, *, keeps_batch: bool, share: int
) -> list[int]:
    """Powers of two times the baseline's token budget, as the default range of the micro batch has powers of two.

    Args:
        baseline: With a budget, and the samples that it holds on average.
        ranks: Numbers of ranks that are tried.
        most_samples: Of a global batch.
        keeps_batch: The global batch stays as the baseline's: then what divides it.
        share: Of the baseline's budget, the smallest that is tried; of its part of a rank where there are more.
    """
    own = baseline.max_tokens or 1
    least = max(1, own // max(share, *ranks))
    if keeps_batch:
        wanted = own * baseline.grad_accum_steps * baseline.world_size
        parts = (wanted // 2**power for power in range(wanted.bit_length()) if wanted % 2**power == 0)
        return sorted({own, *(part for part in parts if part >= least)})
    halves = (own // 2**power for power in range(own.bit_length()))
    sizes = {size for size in halves if size >= least} | {own // count for count in ranks if own % count == 0}
    doubled = 2 * own
    while samples_within(doubled, baseline) <= most_samples:
        sizes.add(doubled)
        doubled *= 2
    return sorted(sizes)
