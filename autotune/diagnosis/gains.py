"""Advice with its expected gain, which advice is worth giving, and the bounds of a loader's rate. Pure.

Comes in: a kind of advice, the rate that it should reach, the present rate and the figures behind both. Goes out:
Advice without words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import JsonValue

from autotune.analysis.forecast.observations import side_observation
from autotune.analysis.statistics import NORMAL_95
from autotune.records.diagnosis import Advice, Evidence

__all__ = ["LEAST_GAIN", "advise", "figures_of", "loader_bounds", "worth_giving"]

LEAST_GAIN = 0.03
"""Expected gain below which nothing is advised: our own convention; ceilings are not measured better than that."""


def advise(
    kind: str, present: float, expected: float | None, settings: Mapping[str, object], **figures: JsonValue
) -> Advice:
    """Advice of this kind, from the present and the expected rate in samples per second (None: no figure)."""
    gain = None if expected is None else expected / present - 1.0
    changes = dict(settings)
    return Advice(kind=kind, figures=figures, settings=changes, expected_samples_per_s=expected, expected_gain=gain)


def figures_of(record: object, *names: str) -> dict[str, JsonValue]:
    """The figures of a record that have these names."""
    return {name: getattr(record, name) for name in names}


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
