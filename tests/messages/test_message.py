"""A message's name, arguments and sentence make a note."""

from __future__ import annotations

from autotune.messages import message
from autotune.note import Note


@message
def too_slow(samples_per_s: float, reason: Note | str, cores: tuple[int, ...] = ()) -> str:
    return f"{samples_per_s:g} on {len(cores)} cores: {reason}"


def test_message_makes_a_note() -> None:
    found = too_slow(3.5, reason="heat", cores=(1, 2))
    assert found == Note(
        code="too_slow",
        figures={"samples_per_s": 3.5, "reason": "heat", "cores": [1, 2]},
        text="3.5 on 2 cores: heat",
    )


def test_a_default_is_a_figure() -> None:
    assert too_slow(1, "heat").figures["cores"] == []


def test_note_inside_a_message_is_its_text() -> None:
    inner = too_slow(2, "heat")
    outer = too_slow(1, inner)
    assert outer.text == f"1 on 0 cores: {inner.text}"
    assert outer.figures["reason"] == inner.model_dump()


def test_a_note_survives_json() -> None:
    written = too_slow(float("inf"), "heat")
    assert Note.model_validate_json(written.model_dump_json()).text == written.text
