"""How the learning rate follows the global batch size. Pure arithmetic; applied once, when a result is recommended.

Sources:
    linear, with warm-up: Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv 1706.02677, sections 2.1 and 2.2.
    square root, with betas and eps: Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms", arXiv 2205.10287, definition 5.3.
"""

from __future__ import annotations

from math import sqrt
from typing import Literal

from autotune.frozen import FrozenModel
from autotune.messages import space as messages
from autotune.note import Note
from autotune.settings.objective import LrRule
from autotune.settings.workload import OptimizerFacts

__all__ = ["LrAdvice", "scale_lr"]

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

    linear: lr * k. sqrt: lr * sqrt(k), beta -> 1 - k (1 - beta), eps -> eps / sqrt(k); where k (1 - beta) >= 1 the
    betas leave the rule's range and are left as they are. auto: linear for SGD, sqrt for adaptive optimizers, and sqrt,
    the more careful one, for optimizers that it does not know.
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


def _resolved(rule: LrRule, optimizer: OptimizerFacts) -> tuple[Literal["linear", "sqrt", "none"], list[Note]]:
    name = optimizer.name.lower()
    if rule != "auto":
        return rule, []
    if any(word in name for word in _ADAPTIVE):
        return "sqrt", []
    return ("linear", []) if "sgd" in name else ("sqrt", [messages.lr_rule_unknown(optimizer.name)])
