"""How the learning rate follows the global batch size. Pure arithmetic; applied once, when a result is recommended.

Sources:
    linear, with warm-up: Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv 1706.02677, sections 2.1 and 2.2.
    square root, with betas and eps: Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms", arXiv 2205.10287, definition 5.3.
"""

from __future__ import annotations

from math import sqrt
from typing import Literal

from pydantic import BaseModel, ConfigDict

from autotune.note import Note, note
from autotune.settings.objective import LrRule
from autotune.settings.workload import OptimizerFacts

__all__ = ["LrAdvice", "scale_lr"]

_ADAPTIVE = ("adam", "rmsprop", "adagrad", "adadelta", "lamb", "lion", "adafactor", "rprop")
_WARM_UP_EPOCHS = 5  # Goyal et al., section 2.2
_ROUNDING = 1e-9  # 10 * (1 - 0.9) falls just below 1 in floating point


class LrAdvice(BaseModel):
    """The learning rate for a new global batch, and what should change with it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    lr: float
    rule: Literal["linear", "sqrt", "none"]
    """The rule that was applied."""
    batch_ratio: float
    """New global batch over the baseline's."""
    betas: tuple[float, float] | None = None
    """Betas for the Adam family; None: leave them."""
    eps: float | None = None
    """Epsilon for the Adam family; None: leave it."""
    notes: tuple[Note | str, ...] = ()
    """What the user should do with it."""


def scale_lr(lr: float, batch_ratio: float, rule: LrRule, optimizer: OptimizerFacts) -> LrAdvice:
    """The learning rate when the global batch grows `batch_ratio` times.

    linear: lr * k. sqrt: lr * sqrt(k), beta -> 1 - k (1 - beta), eps -> eps / sqrt(k); where k (1 - beta) >= 1 the
    betas leave the rule's range and are left as they are. auto: linear for SGD, sqrt for adaptive optimizers, and sqrt,
    the more careful one, for optimizers that it does not know.
    """
    if batch_ratio == 1:
        return LrAdvice(lr=lr, rule="none", batch_ratio=1.0)
    applied, notes = _resolve(rule, optimizer)
    if applied == "none":
        return LrAdvice(lr=lr, rule="none", batch_ratio=batch_ratio, notes=(note("lr_unchanged"),))
    if applied == "linear":
        return LrAdvice(lr=lr * batch_ratio, rule="linear", batch_ratio=batch_ratio, notes=_warm_up(batch_ratio))
    betas, eps, beta_notes = _scale_betas(batch_ratio, optimizer)
    return LrAdvice(
        lr=lr * sqrt(batch_ratio),
        rule="sqrt",
        batch_ratio=batch_ratio,
        betas=betas,
        eps=eps,
        notes=(*notes, *beta_notes, *_warm_up(batch_ratio)),
    )


def _resolve(rule: LrRule, optimizer: OptimizerFacts) -> tuple[Literal["linear", "sqrt", "none"], tuple[Note, ...]]:
    if rule != "auto":
        return rule, ()
    name = optimizer.name.lower()
    if any(word in name for word in _ADAPTIVE):
        return "sqrt", ()
    if "sgd" in name:
        return "linear", ()
    return "sqrt", (note("lr_rule_unknown", optimizer=optimizer.name),)


def _scale_betas(
    ratio: float, optimizer: OptimizerFacts
) -> tuple[tuple[float, float] | None, float | None, tuple[Note, ...]]:
    if optimizer.betas is None:
        return None, None, ()
    eps = None if optimizer.eps is None else optimizer.eps / sqrt(ratio)
    first, second = (ratio * (1 - beta) for beta in optimizer.betas)
    if not (0 < first < 1 - _ROUNDING and 0 < second < 1 - _ROUNDING):
        return None, eps, (note("betas_unchanged", betas=optimizer.betas, batch_ratio=ratio),)
    return (1 - first, 1 - second), eps, ()


def _warm_up(ratio: float) -> tuple[Note, ...]:
    return (note("lr_warm_up", epochs=_WARM_UP_EPOCHS),) if ratio > 1 else ()
