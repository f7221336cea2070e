"""The catalogue of English: sentences by their note's code, and words by what they name, from english/*.yaml.

A sentence is a Jinja2 template of its note's figures: `{{ share | share }}` writes a figure in a unit of `units`, and a
template may include another; one whose code begins with an underscore is such a part. A figure that a template needs
and the note lacks is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from importlib.resources import files
from math import isinf
from typing import Any

import yaml
from jinja2 import DictLoader, Environment, StrictUndefined

from autotune.messages.units import UNITS, format_bytes_beside, format_count, show, show_interval
from autotune.messages.words import OUTCOMES, THROTTLE_REASONS
from autotune.report.text import one_line
from autotune.settings.environment import COMPARED

__all__ = ["fill", "load_codes", "load_english", "load_sentences", "make_environment"]

_ENGLISH = files("autotune.report.wording") / "english"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader, where it is there in C: that takes a tenth of the time, in whatever says a word."""


@cache
def load_english(name: str) -> dict[str, Any]:
    """What one file holds: a room's templates by code; of "words" the words by what they name, and then by code."""
    return dict(yaml.load((_ENGLISH / f"{name}.yaml").read_text(encoding="utf-8"), Loader=_LOADER))  # noqa: S506 - safe


def load_codes(room: str) -> frozenset[str]:
    """The codes of a room's sentences, without the parts that others include."""
    return frozenset(code for code in load_english(room) if not code.startswith("_"))


@cache
def load_sentences() -> dict[str, str]:
    """The templates of all rooms by code; a code stands in one room alone."""
    names = sorted(path.name for path in _ENGLISH.iterdir() if path.name.endswith(".yaml"))
    rooms = [name.removesuffix(".yaml") for name in names if name != "words.yaml"]
    return {code: template for room in rooms for code, template in load_english(room).items()}


def fill(code: str, figures: Mapping[str, Any]) -> str:
    """The sentence of a code for these figures."""
    return make_environment().get_template(code).render(figures)


@cache
def make_environment() -> Environment:
    """What fills templates. They write plain text: a renderer escapes it."""
    environment = Environment(loader=DictLoader(load_sentences()), undefined=StrictUndefined)  # noqa: S701 - plain text
    environment.filters.update({unit: partial(show, unit=unit) for unit in UNITS})
    environment.filters.update(
        beside=format_bytes_beside, counted=format_count, to=partial(show_interval, unit="times")
    )
    environment.filters.update(capital=_capitalise, one_line=one_line, spec=format)
    environment.tests["infinite"] = isinf
    words = {**load_english("words"), "outcomes": OUTCOMES, "throttle_reasons": THROTTLE_REASONS}
    environment.globals.update(words=words, compared=COMPARED)
    return environment


def _capitalise(text: str) -> str:
    return text[0].upper() + text[1:]
