"""A note for the user: a code, its figures, and its text. The functions that write notes are in `messages`."""

from __future__ import annotations

from pydantic import Field, JsonValue

from autotune.frozen import FrozenModel


class Note(FrozenModel):
    """A sentence for the user, with a code and figures for programs."""

    code: str
    """Name of the function in `messages` that wrote the note: "no_time_for_a_trial"."""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of that function: seconds, bytes, fractions in 0..1, counts, names."""
    text: str = ""
    """Plain text without markup."""

    def __str__(self) -> str:
        """Return the text, so that a message can contain a note or a string as its reason."""
        return self.text or self.code

    def __hash__(self) -> int:  # a dict of figures can't be hashed
        return hash((self.code, self.text))
