"""A note as its sentence.

Comes in: a Note, or the text of an error. Goes out: a sentence, free of markup.
"""

from __future__ import annotations

from pydantic import JsonValue

from autotune.note import Note
from autotune.report.wording.catalogue import fill, load_sentences

__all__ = ["say"]


def say(note: Note | str) -> str:
    """The sentence of a note; code and figures where the code is unknown, since another version has stored it."""
    if isinstance(note, str):
        return note
    if note.text:
        return note.text
    if note.code not in load_sentences():
        return f"{note.code}: " + ", ".join(f"{name}={value}" for name, value in note.figures.items())
    ranks = note.figures.get("on_ranks")
    sentence = fill(note.code, {name: _said(value) for name, value in note.figures.items()})
    return f"rank {', '.join(map(str, ranks))}: {sentence}" if isinstance(ranks, list) else sentence


def _said(figure: JsonValue) -> JsonValue:
    """A figure that is a note itself, as its sentence; any other as it is."""
    is_note = isinstance(figure, dict) and {"code", "figures"} <= figure.keys()
    return say(Note.model_validate(figure)) if is_note else figure
