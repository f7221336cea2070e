"""Which share of what makes rates of the same settings differ is explained by looks at the machine; pure.

Each run is foretold by a linear regression over the other runs (leave one out), so that chance explains nothing: what
is worse than the others' mean is below 0. What a result would gain by it is another question, which `errors_of_ratio`
answers: how much a ratio from a few rounds scatters as it is, and adjusted by a slope from the same rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "COVARIATES",
    "Turn",
    "adjusted_mean",
    "errors_of_ratio",
    "explained_share",
    "explained_shares",
]

_ROUNDS, _DRAWS = 6, 500
_SLOPE_SD = 0.5
"""Of a slope before any data, around 0."""

Turn = dict[str, Any]
"""A run: `samples_per_s`, looks `inside` and `between` as pairs (before, after) of speeds by kind, `others`' share."""
Numbers = NDArray[np.float64]


def explained_shares(turns: Sequence[Sequence[Turn]]) -> dict[str, dict[str, float]]:
    """For either settings and for the ratio of neighbours: the spread, and the share that each covariate explains."""
    rates = [np.log([turn["samples_per_s"] for turn in own]) for own in turns]
    targets = {str(which): own for which, own in enumerate(rates)} | {"ratio": rates[0] - rates[1]}
    found = {}
    for kind, target in targets.items():
        shares = {"sd": float(np.std(target, ddof=1))}
        for name, covariates in COVARIATES.items():
            own = [np.array([covariates(turn) for turn in side]) for side in turns]
            shares[name] = explained_share(
                target, own[0] - own[1] if kind == "ratio" else own[int(kind)]
            )
        found[kind] = shares
    return found


def explained_share(target: Numbers, covariates: Numbers) -> float:
    """1 less the squared errors of foretelling each from the others by its covariates, over those by their mean."""
    rows = np.column_stack([np.ones(len(target)), covariates])
    errors, plain = [], []
    for left_out in range(len(target)):
        others = np.arange(len(target)) != left_out
        slopes, *_ = np.linalg.lstsq(rows[others], target[others], rcond=None)
        errors.append(target[left_out] - rows[left_out] @ slopes)
        plain.append(target[left_out] - target[others].mean())
    return float(1 - np.sum(np.square(errors)) / np.sum(np.square(plain)))


def errors_of_ratio(turns: Sequence[Sequence[Turn]]) -> dict[str, float]:
    """The spread of the log of a ratio from six rounds drawn of all: plain, and adjusted by one covariate at a time."""
    first, second = (np.log([turn["samples_per_s"] for turn in own]) for own in turns)
    draw = np.random.default_rng(0)
    chosen = [
        draw.choice(len(first), min(_ROUNDS, len(first)), replace=False) for _ in range(_DRAWS)
    ]
    ratios = first - second
    errors = {"plain": float(np.std([ratios[rounds].mean() for rounds in chosen]))}
    for name in ("one", "others"):
        sides = [np.array([COVARIATES[name](turn)[0] for turn in own]) for own in turns]
        moved = sides[0] - sides[1]
        errors[name] = float(
            np.std([adjusted_mean(ratios[rounds], moved[rounds]) for rounds in chosen])
        )
    return errors


def adjusted_mean(target: Numbers, covariate: Numbers) -> float:
    """The mean as if the covariate had been 0, by a slope that is shrunk towards none."""
    centred, moved = target - target.mean(), covariate - covariate.mean()
    variance = float(centred @ centred) / (len(target) - 1)
    if variance == 0:
        return float(target.mean())
    slope = (moved @ centred / variance) / (moved @ moved / variance + 1 / _SLOPE_SD**2)
    return float(target.mean() - slope * covariate.mean())


def _log_speeds(looks: Sequence[Mapping[str, float]]) -> list[float]:
    """Of each kind the mean log over the looks before and after."""
    return [float(np.mean([np.log(look[kind]) for look in looks])) for kind in looks[0]]


COVARIATES: Mapping[str, Callable[[Turn], list[float]]] = {
    "inside": lambda turn: _log_speeds(turn["inside"]),
    "one": lambda turn: [sum(_log_speeds(turn["inside"]))],
    "between": lambda turn: _log_speeds(turn["between"]),
    "others": lambda turn: [turn["others"]],
    "both": lambda turn: [sum(_log_speeds(turn["inside"])), turn["others"]],
}
"""What is explained by, by name: the short looks inside the trial, kind by kind and as one figure; the long ones
between trials; what others took of the cores; the second and the fourth."""
