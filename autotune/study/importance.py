"""Settings by importance: what tells a study's good trials from the others. Takes an Optuna study, hands on shares."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from math import isfinite

import numpy as np
import optuna
from optuna.trial import TrialState

__all__ = ["setting_importances"]

_FEWEST_TRIALS = 4
"""Different scores without which nothing is claimed: our own convention, a best quarter of one."""
_GOOD_SHARE = 0.25
"""Trials that count as good: our own convention; Optuna's tenth would be two or three of a search's trials."""


def setting_importances(study: optuna.Study, numbers: Collection[int]) -> dict[str, float]:
    """How much each setting tells whether a trial is among the best quarter, the largest first; shares of 1.

    Of the trials with these numbers alone. Empty for fewer than four of different scores, or where Optuna can't tell.
    Source: PED-ANOVA, Watanabe et al. 2023, arXiv 2304.10255; it needs no further package.
    """
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    trials = [trial for trial in complete if trial.number in numbers]
    if len({trial.value for trial in trials}) < _FEWEST_TRIALS:
        return {}

    from optuna.importance import (  # takes more than a second where scikit-learn is there: only once it is needed
        PedAnovaImportanceEvaluator,
        get_param_importances,
    )

    chosen = optuna.create_study(direction="maximize")
    chosen.add_trials(trials)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = get_param_importances(chosen, evaluator=PedAnovaImportanceEvaluator(target_quantile=_GOOD_SHARE))
    except Exception:  # noqa: BLE001 - a chart in a report; whatever Optuna finds wrong must not end a search
        return {}
    shares = {name: float(share) for name, share in found.items()}
    return shares if all(isfinite(share) for share in shares.values()) and sum(shares.values()) > 0 else {}
