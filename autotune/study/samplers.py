"""The search methods by name: what sets each apart, and Optuna's sampler of each. No other place knows the names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from autotune.settings.search_options import Method

__all__ = ["METHODS", "SearchMethod"]

_STARTUP_TRIALS = 8
"""Random trials before a sampler models anything: our own convention; Optuna's ten would be most of a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMethod:
    """A way to search."""

    make_sampler: Callable[[int], BaseSampler]
    """Given a seed, the sampler that draws what nothing else has proposed; raises ConfigError without its package."""
    has_model: bool = False
    """A model of the machine proposes; the sampler draws where the model was wrong."""
    begins_with_guesses: bool = False
    """An expert's first guesses are tried right after the baseline."""
    visits_all: bool = False
    """Every combination is tried once, in random order."""


def _tpe(seed: int) -> BaseSampler:
    # The constant liar takes running trials for bad ones until they end; one trial at a time is not affected.
    return TPESampler(seed=seed, multivariate=True, n_startup_trials=_STARTUP_TRIALS, constant_liar=True)


METHODS: dict[Method, SearchMethod] = {
    "model": SearchMethod(make_sampler=_tpe, has_model=True),
    "tpe": SearchMethod(make_sampler=_tpe, begins_with_guesses=True),
    "gp": SearchMethod(
        make_sampler=lambda seed: GPSampler(seed=seed, n_startup_trials=_STARTUP_TRIALS), begins_with_guesses=True
    ),
    "random": SearchMethod(make_sampler=lambda seed: RandomSampler(seed=seed)),
    # Combinations are enqueued one by one: Optuna's GridSampler stops the study, which only `Study.optimize` allows.
    "grid": SearchMethod(make_sampler=lambda seed: RandomSampler(seed=seed), visits_all=True),
}
