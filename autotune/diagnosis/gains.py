"""Advice with its expected gain, which advice is worth giving, and the bounds of a loader's rate. Pure.

Comes in: advice in words, the rate that it should reach, and the present rate. Goes out: Advice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from autotune.analysis.forecast.observations import side_observation
from autotune.analysis.statistics import NORMAL_95
from autotune.messages.advice import AdviceText
from autotune.records.diagnosis import Advice, Evidence

__all__ = ["LEAST_GAIN", "advise", "loader_bounds", "worth_giving"]

LEAST_GAIN = 0.03
"""Expected gain below which nothing is advised: our own convention; ceilings are not measured better than that."""


def advise(words: AdviceText, present: float, expected: float | None) -> Advice:
    """Return advice with its expected gain.

    Args:
        words: What to do, and why.
        present: The present rate, in samples per second.
        expected: The rate that it should reach; None where no figure can be given.
    """
    figures = dict(words.note.figures)
    settings = cast("dict[str, object]", figures.pop("settings", {}))
    return Advice(
        kind=words.note.code,
        figures=figures,
        settings=settings,
        expected_samples_per_s=expected,
        expected_gain=None if expected is None else expected / present - 1.0,
        text=words.note.text,
        basis=words.basis,
    )


def worth_giving(advice: Iterable[Advice]) -> list[Advice]:
    """The advice that gains at least 3 %, the largest gain first, then the advice without a figure."""
    worth = [piece for piece in advice if piece.expected_gain is None or piece.expected_gain >= LEAST_GAIN]
    return sorted(worth, key=lambda piece: -1.0 if piece.expected_gain is None else piece.expected_gain, reverse=True)


def loader_bounds(evidence: Evidence, loader: float) -> tuple[float, float]:
    """Return the rates between which the loader of a run lies with 95 %, where the loader alone reaches this rate.

    Where it was measured, what that stretch leaves open is part of it: a loader that pauses may tell nothing.
    """
    ceilings, kind = evidence.measurement.ceilings, evidence.environment.device_kind
    own_sd = None if ceilings is None or ceilings.loader is None else ceilings.loader.relative_sd
    off = NORMAL_95 * side_observation("loader", evidence.config, loader, kind, own_sd or 0.0).relative_sd
    return loader * max(1e-9, 1 - off), loader * (1 + off)  # more than nothing is left of a loader
