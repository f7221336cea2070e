"""Jinja2 over the templates of this package: every text that a template shows is escaped."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from autotune.report.blocks import TEXT_HEADS
from autotune.report.text import one_line, without_controls
from autotune.report.wording.names import PART_NAMES
from autotune.report.wording.units import format_fraction

__all__ = ["render_template"]


def render_template(name: str, values: dict[str, object]) -> str:
    """Fill a template; a value that it names and is not given is an error."""
    return _environment().get_template(name).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("autotune.report.render"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(plain=one_line, lines=without_controls, percent=format_fraction)
    environment.tests["block"] = lambda block, kind: type(block).__name__ == kind
    environment.globals.update(text_heads=TEXT_HEADS, part_names=PART_NAMES)
    return environment
