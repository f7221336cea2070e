"""One table of all sentences, joined from the rooms' own, and the function that looks a note up in it."""

from __future__ import annotations

from pydantic import JsonValue

from autotune.note import Note
from autotune.report.wording.tables.advice import ADVICE
from autotune.report.wording.tables.analysis import ANALYSIS
from autotune.report.wording.tables.api import API
from autotune.report.wording.tables.devices import DEVICES
from autotune.report.wording.tables.diagnosis import DIAGNOSIS
from autotune.report.wording.tables.launch import LAUNCH
from autotune.report.wording.tables.scaling import SCALING
from autotune.report.wording.tables.space import SPACE
from autotune.report.wording.tables.tuning import TUNING
from autotune.report.wording.tables.worker import WORKER
from autotune.report.wording.template import Wording, fill

__all__ = ["WORDINGS", "say"]

WORDINGS: dict[str, Wording] = {
    **ADVICE,
    **ANALYSIS,
    **API,
    **DEVICES,
    **DIAGNOSIS,
    **LAUNCH,
    **SCALING,
    **SPACE,
    **TUNING,
    **WORKER,
}
"""Every sentence by its note's code; a code stands in one room's table alone."""


def say(note: Note | str) -> str:
    """The sentence of a note; code and figures where the code is unknown, since another version has stored it."""
    if isinstance(note, str):
        return note
    wording = WORDINGS.get(note.code)
    if wording is None:
        return f"{note.code}: " + ", ".join(f"{name}={value}" for name, value in note.figures.items())
    ranks = note.figures.get("on_ranks")
    sentence = fill(wording, {name: _said(value) for name, value in note.figures.items()})
    return f"rank {', '.join(map(str, ranks))}: {sentence}" if isinstance(ranks, list) else sentence


def _said(figure: JsonValue) -> JsonValue:
    """A figure that is a note itself, as its sentence; any other as it is."""
    is_note = isinstance(figure, dict) and figure.keys() == {"code", "figures"}
    return say(Note.model_validate(figure)) if is_note else figure
