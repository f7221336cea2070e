"""Scale settings with the batch: the learning rate by a published rule, and the token budget. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Literal

from autotune.config.plan import Domain, LrRule, OptimizerFacts, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.frozen import FrozenModel
from autotune.messages import space as messages
from autotune.note import Note

# Learning rate. Sources: linear, with warm-up: Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv
# 1706.02677, sections 2.1 and 2.2. square root, with betas and eps: Malladi et al. 2022, "On the
# SDEs and Scaling Rules for Adaptive Gradient Algorithms", arXiv 2205.10287, definition 5.3.


_ADAPTIVE = ("adam", "rmsprop", "adagrad", "adadelta", "lamb", "lion", "adafactor", "rprop")
_ROUNDING = 1e-9  # 10 * (1 - 0.9) falls just below 1 in floating point


class LrAdvice(FrozenModel):
    """The learning rate for a new global batch, and what should change with it."""

    lr: float
    """Learning rate for the new batch."""
    rule: Literal["linear", "sqrt", "none"]
    """Rule that was applied."""
    batch_ratio: float
    """New global batch divided by the baseline's."""
    betas: tuple[float, float] | None = None
    """Betas for the Adam family; None: leave them."""
    eps: float | None = None
    """Epsilon for the Adam family; None: leave it."""
    notes: tuple[Note, ...] = ()
    """Notes on what to do with it."""


def scale_lr(lr: float, batch_ratio: float, rule: LrRule, optimizer: OptimizerFacts) -> LrAdvice:
    """Return the learning rate for a global batch that is `batch_ratio` (k) times as large.

    linear: lr * k. sqrt: lr * sqrt(k), beta -> 1 - k (1 - beta), eps -> eps / sqrt(k); if k (1 -
    beta) >= 1, the betas are out of the rule's range and stay as they are. auto: linear for SGD;
    sqrt, the more careful one, for adaptive and unknown optimizers.
    """
    if batch_ratio == 1:
        return LrAdvice(lr=lr, rule="none", batch_ratio=1.0)
    notes = list[Note]()
    applied: Literal["linear", "sqrt", "none"]
    if rule != "auto":
        applied = rule
    else:
        name = optimizer.name.lower()
        is_adaptive = any(word in name for word in _ADAPTIVE)
        applied = "linear" if "sgd" in name and not is_adaptive else "sqrt"
        if applied == "sqrt" and not is_adaptive:
            notes.append(messages.lr_rule_unknown(optimizer.name))
    factor = {"none": 1.0, "linear": batch_ratio, "sqrt": sqrt(batch_ratio)}[applied]

    betas = None
    eps = None
    if applied == "sqrt" and optimizer.betas is not None:
        eps = None if optimizer.eps is None else optimizer.eps / factor
        first, second = (1 - batch_ratio * (1 - beta) for beta in optimizer.betas)
        if _ROUNDING < first < 1 and _ROUNDING < second < 1:
            betas = (first, second)
        else:
            notes.append(messages.betas_unchanged(optimizer.betas, batch_ratio))
    if applied == "none":
        notes.append(messages.lr_unchanged())
    elif batch_ratio > 1:
        notes.append(messages.lr_warm_up(5))  # Goyal et al., section 2.2
    return LrAdvice(
        lr=lr * factor,
        rule=applied,
        batch_ratio=batch_ratio,
        betas=betas,
        eps=eps,
        notes=tuple(notes),
    )


# Token budgets, searched in place of the micro batch, which follows in proportion


def budget_obstacle(given: Mapping[str, Domain], facts: WorkloadFacts) -> str | None:
    """Return why the settings that the user lists can't be searched with this batch sampler, or None."""
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
    """Set the baseline's micro batch to the average samples in its token budget, if they are known."""
    if facts.budget_samples is None:
        return baseline
    return baseline.model_copy(update={"micro_batch_size": max(1, round(facts.budget_samples))})


def samples_within(max_tokens: int, baseline: TrainingConfig) -> int:
    """Return the average samples in a token budget, in proportion to the baseline's."""
    assert baseline.max_tokens is not None, "there is no budget to go by"  # noqa: S101 - our own bug
    return max(1, round(baseline.micro_batch_size * max_tokens / baseline.max_tokens))


def batch_settings(value: int, baseline: TrainingConfig, facts: WorkloadFacts) -> dict[str, int]:
    """Return the settings that a value of `facts.batch_setting` stands for: a budget, and its average samples."""
    if not facts.has_token_budget:
        return {"micro_batch_size": value}
    return {"max_tokens": value, "micro_batch_size": samples_within(value, baseline)}


def with_batch(config: TrainingConfig, micro_batch_size: int) -> TrainingConfig:
    """Return a configuration with another micro batch, and its token budget in proportion."""
    changes: dict[str, int] = {"micro_batch_size": micro_batch_size}
    if config.max_tokens is not None:
        changes["max_tokens"] = max(
            1, round(config.max_tokens * micro_batch_size / config.micro_batch_size)
        )
    return config.model_copy(update=changes)


def global_batch_of(config: TrainingConfig, facts: WorkloadFacts) -> int:
    """Return the tokens (with a token budget) or samples per optimizer step over all ranks."""
    unit: int = getattr(config, facts.batch_setting)
    return unit * config.passes_per_step
