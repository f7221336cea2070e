"""Templates of sentences: str.format with units for the figures inside text.

`{share:share}` and `{peak_bytes:bytes}` name a unit of `units`; `{peak_bytes:beside={limit_bytes}}` writes a size in
the unit and precision of the limit that it is compared with; `{low:to={high}}` writes an interval of ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any, TypeAlias

from autotune.report.wording.units import UNITS, format_bytes_beside, show_interval

__all__ = ["Wording", "fill"]

Wording: TypeAlias = str | Callable[[Mapping[str, Any]], str]
"""A template, or a function of the figures where the sentence depends on them."""


class _Units(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in UNITS:
            return UNITS[format_spec](value)
        if format_spec.startswith("beside="):
            return format_bytes_beside(value, float(format_spec.removeprefix("beside=")))
        if format_spec.startswith("to="):
            return show_interval(value, float(format_spec.removeprefix("to=")), "times")
        return str(super().format_field(value, format_spec))


def fill(wording: Wording, figures: Mapping[str, Any]) -> str:
    """The sentence of a template or function for these figures."""
    return _Units().vformat(wording, (), figures) if isinstance(wording, str) else wording(figures)
