"""Scale with the batch: the learning rate by a published rule, and the token budget of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Literal

from autotune.config.plan import Domain, LrRule, OptimizerFacts, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.frozen import FrozenModel
from autotune.messages import space as messages
from autotune.note import Note

# How the learning rate follows the global batch size. Pure arithmetic; applied once, when a result
# is recommended.
#
# Sources: linear, with warm-up: Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv
# 1706.02677, sections 2.1 and 2.2. square root, with betas and eps: Malladi et al. 2022, "On the
# SDEs and Scaling Rules for Adaptive Gradient Algorithms", arXiv 2205.10287, definition 5.3.


_ADAPTIVE = ("adam", "rmsprop", "adagrad", "adadelta", "lamb", "lion", "adafactor", "rprop")
_ROUNDING = 1e-9  # 10 * (1 - 0.9) falls just below 1 in floating point


class LrAdvice(FrozenModel):
    """The learning rate for a new global batch, and what should change with it."""

    lr: float
    """Learning rate for the new batch."""
    rule: Literal["linear", "sqrt", "none"]
    """The rule that was applied."""
    batch_ratio: float
    """New global batch over the baseline's."""
    betas: tuple[float, float] | None = None
    """Betas for the Adam family; None: leave them."""
    eps: float | None = None
    """Epsilon for the Adam family; None: leave it."""
    notes: tuple[Note, ...] = ()
    """What the user should do with it."""


def scale_lr(lr: float, batch_ratio: float, rule: LrRule, optimizer: OptimizerFacts) -> LrAdvice:
    """The learning rate when the global batch grows `batch_ratio` times.

    linear: lr * k. sqrt: lr * sqrt(k), beta -> 1 - k (1 - beta), eps -> eps / sqrt(k); where k (1 -
    beta) >= 1 the betas leave the rule's range and are left as they are. auto: linear for SGD, sqrt
    for adaptive optimizers, and sqrt, the more careful one, for optimizers that it does not know.
    """
    if batch_ratio == 1:
        return LrAdvice(lr=lr, rule="none", batch_ratio=1.0)
    applied, notes = _resolved(rule, optimizer)
    factor = {"none": 1.0, "linear": batch_ratio, "sqrt": sqrt(batch_ratio)}[applied]
    advice = LrAdvice(lr=lr * factor, rule=applied, batch_ratio=batch_ratio)
    if applied == "sqrt" and optimizer.betas is not None:
        eps = None if optimizer.eps is None else optimizer.eps / factor
        first, second = (1 - batch_ratio * (1 - beta) for beta in optimizer.betas)
        betas = (first, second) if _ROUNDING < first < 1 and _ROUNDING < second < 1 else None
        if betas is None:
            notes.append(messages.betas_unchanged(optimizer.betas, batch_ratio))
        advice = advice.model_copy(update={"betas": betas, "eps": eps})
    if applied == "none":
        notes.append(messages.lr_unchanged())
    elif batch_ratio > 1:
        notes.append(messages.lr_warm_up(5))  # Goyal et al., section 2.2
    return advice.model_copy(update={"notes": tuple(notes)})


def _resolved(
    rule: LrRule, optimizer: OptimizerFacts
) -> tuple[Literal["linear", "sqrt", "none"], list[Note]]:
    name = optimizer.name.lower()
    if rule != "auto":
        return rule, []
    if any(word in name for word in _ADAPTIVE):
        return "sqrt", []
    return ("linear", []) if "sgd" in name else ("sqrt", [messages.lr_rule_unknown(optimizer.name)])


# The token budget of a batch sampler: what is searched in place of the micro batch, which follows
# it.
#
# Comes in: the baseline, the facts of the probe, what the user has given. Goes out: the baseline
# with the samples that its budget holds on average, the budgets to try, or a reason against what
# was given. Pure.


def budget_obstacle(given: Mapping[str, Domain], facts: WorkloadFacts) -> str | None:
    """Why the settings that the user has listed can't be searched with this batch sampler, or None."""
    if facts.has_token_budget and "micro_batch_size" in given:
        return (
            "space.micro_batch_size must be left out where the batch sampler takes max_tokens, "
            "which the samples of a "
            "batch follow, but it was given; list space.max_tokens instead"
        )
    has_budgets = any(value is not None for value in given.get("max_tokens", ()))
    if has_budgets and not facts.has_token_budget and facts.script is None:
        return (
            "space.max_tokens needs a batch sampler with a parameter of that name, but the "
            "workload has none; leave it "
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
        changes["max_tokens"] = max(
            1, round(config.max_tokens * micro_batch_size / config.micro_batch_size)
        )
    return config.model_copy(update=changes)


def global_batch_of(config: TrainingConfig, facts: WorkloadFacts) -> int:
    """What one optimizer step takes over all ranks: tokens where there is a token budget, else samples."""
    unit: int = getattr(config, facts.batch_setting)
    return unit * config.grad_accum_steps * config.world_size


def token_budgets(
    baseline: TrainingConfig,
    ranks: Sequence[int],
    most_samples: int,
    *,
    keeps_batch: bool,
    share: int,
) -> list[int]:
    """Powers of two times the baseline's token budget, as the default range of the micro batch has powers of two.

    Args:
        baseline: With a budget, and the samples that it holds on average.
        ranks: Numbers of ranks that are tried.
        most_samples: Of a global batch.
        keeps_batch: The global batch stays as the baseline's: then what divides it.
        share: Of the baseline's budget, the smallest that is tried; of its part of a rank where
            there are more.
    """
    own = baseline.max_tokens or 1
    least = max(1, own // max(share, *ranks))
    if keeps_batch:
        wanted = own * baseline.grad_accum_steps * baseline.world_size
        parts = (
            wanted // 2**power for power in range(wanted.bit_length()) if wanted % 2**power == 0
        )
        return sorted({own, *(part for part in parts if part >= least)})
    halves = (own // 2**power for power in range(own.bit_length()))
    sizes = {size for size in halves if size >= least} | {
        own // count for count in ranks if own % count == 0
    }
    doubled = 2 * own
    while samples_within(doubled, baseline) <= most_samples:
        sizes.add(doubled)
        doubled *= 2
    return sorted(sizes)
