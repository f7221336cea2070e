"""A note for the user, as a code with its figures: what every room hands on in place of a sentence.

The sentences are in report/wording alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, JsonValue
from pydantic_core import to_jsonable_python

from autotune.frozen import FrozenModel

__all__ = ["Note", "note"]


class Note(FrozenModel):
    """A code and its figures."""

    code: str
    """What happened, in snake_case: "no_time_for_stress"."""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    """What the sentence is filled with, by the names that it has for them: seconds, bytes, shares in 0..1, numbers of
    trials, names of settings and files; units in the name (`_s`, `_bytes`, `_fraction`)."""
    text: str = ""
    """Its sentence, free of markup."""

    def __hash__(self) -> int:  # figures are a mapping; equal notes have equal hashes all the same
        return hash((self.code, *sorted(self.figures)))


def note(code: str, **figures: JsonValue | Sequence[JsonValue] | Note) -> Note:
    """Write a note as a call, with its figures as keywords: `note("no_time_for_stress", number=3)`.

    A figure may be a note itself, such as the reason for something.
    """
    return Note(code=code, figures=to_jsonable_python(figures, inf_nan_mode="constants"))
