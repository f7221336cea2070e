"""Optuna's samplers by the names that a search has for them."""

from __future__ import annotations

import optuna

from autotune.settings.search_options import Method

__all__ = ["make_sampler"]

_STARTUP_TRIALS = 8


def make_sampler(method: Method, seed: int) -> optuna.samplers.BaseSampler:
    """The sampler that proposes what nobody else has proposed.

    A grid needs none: its combinations are enqueued one by one. Optuna's own GridSampler stops the study when it is
    through, which only `Study.optimize` allows.
    """
    if method == "gp":
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
    if method in {"random", "grid"}:
        return optuna.samplers.RandomSampler(seed=seed)
    # The constant liar takes what runs for bad until it is told; with one trial at a time it changes no proposal.
    return optuna.samplers.TPESampler(
        seed=seed, multivariate=True, n_startup_trials=_STARTUP_TRIALS, constant_liar=True
    )
