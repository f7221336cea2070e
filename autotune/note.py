"""Something that a person should know, as a code with its figures: what every room hands on in place of a sentence.

The sentences stand in report/wording alone; a test holds that each code that is used has one there.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, JsonValue

__all__ = ["Note", "note"]


class Note(BaseModel):
    """A code and its figures."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    code: str
    """What is the case, in snake_case: "no_time_for_stress"."""
    figures: dict[str, JsonValue] = {}
    """What the sentence is filled with, by the names that it has for them: seconds, bytes, shares in 0..1, numbers of
    trials, names of settings and files; units in the name (`_s`, `_bytes`, `_fraction`)."""


def note(code: str, **figures: JsonValue) -> Note:
    """Write a note as a call, with its figures as keywords: `note("no_time_for_stress", number=3)`."""
    return Note(code=code, figures=figures)
