"""Templates of sentences: str.format with units ("{peak_bytes:bytes}", "{share:share}") for figures inside text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any, TypeAlias

from autotune.phrasing import say_bytes, say_gain, say_mib, say_rate, say_seconds, say_settings, say_share

__all__ = ["Wording", "fill"]

Wording: TypeAlias = str | Callable[[Mapping[str, Any]], str]
"""A template, or a function of the figures where the sentence depends on them."""

_UNITS: dict[str, Callable[[Any], str]] = {
    "bytes": say_bytes,
    "gain": say_gain,
    "list": lambda values: ", ".join(map(str, values)),
    "mib": say_mib,
    "rate": say_rate,
    "seconds": say_seconds,
    "settings": say_settings,
    "share": say_share,
}


class _Units(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        unit = _UNITS.get(format_spec)
        return str(super().format_field(value, format_spec)) if unit is None else unit(value)


def fill(wording: Wording, figures: Mapping[str, Any]) -> str:
    """The sentence of a template or function for these figures."""
    return _Units().vformat(wording, (), figures) if isinstance(wording, str) else wording(figures)
