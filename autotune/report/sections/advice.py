"""Bottlenecks and advice as tables."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.messages.units import show
from autotune.records.diagnosis import Advice
from autotune.report.blocks import Table, tabulate

__all__ = ["advice_table", "bottleneck_table"]


def advice_table(advice: Iterable[Advice], *, is_loaded: bool = False) -> Table:
    """Lay out advice: its gain, the rate that it should reach, what to do and the basis.

    Args:
        advice: The rows.
        is_loaded: Other programs slowed the measurements: gains and rates are left out, which may be their doing.
    """
    rows = (
        {
            "gain": show(piece.expected_gain, "gain"),
            "samples/s": show(piece.expected_samples_per_s, "plain_rate"),
            "advice": f"{piece.text}. Basis: {piece.basis}.",
        }
        for piece in advice
    )
    return tabulate(rows, heads=("advice",) if is_loaded else ())


def bottleneck_table(found: Iterable[tuple[float, str, str]]) -> Table:
    """Lay out bottlenecks: the share of the time that each takes, its name, and its evidence."""
    rows = tuple((show(share, "share"), name, evidence) for share, name, evidence in found)
    return Table(heads=("share", "what", "evidence"), rows=rows)
