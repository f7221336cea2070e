"""One table of all sentences, joined from the rooms' own, and the function that looks a note up in it."""

from __future__ import annotations

from autotune.note import Note
from autotune.report.wording.devices import DEVICES
from autotune.report.wording.space import SPACE
from autotune.report.wording.template import Wording, fill

__all__ = ["WORDINGS", "say"]

WORDINGS: dict[str, Wording] = {**DEVICES, **SPACE}
"""Every sentence by its note's code; a code stands in one room's table alone."""


def say(note: Note | str) -> str:
    """The sentence of a note; code and figures where the code is unknown, since another version has stored it."""
    if isinstance(note, str):
        return note
    wording = WORDINGS.get(note.code)
    if wording is None:
        return f"{note.code}: " + ", ".join(f"{name}={value}" for name, value in note.figures.items())
    ranks = note.figures.get("on_ranks")
    sentence = fill(wording, note.figures)
    return f"rank {', '.join(map(str, ranks))}: {sentence}" if isinstance(ranks, list) else sentence
