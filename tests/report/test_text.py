"""Text of any origin is made safe to show."""

from __future__ import annotations

import pytest

from autotune.report.words import one_line, without_controls

HOSTILE = {
    "a colour": "\x1b[31mred\x1b[0m",
    "a title": "\x1b]0;title\x07",
    "a link": "\x1b]8;;http://x\x1b\\text\x1b]8;;\x1b\\",
    "the clipboard": "\x1b]52;c;eA==\x07",
    "a screen wiped": "\x1b[2J\x1b[H",
    "an eight-bit sequence": "\x9b31mred\x9d0;title\x9c",
    "a bell and backspaces": "safe\x07\x08\x08\x08\x08evil",
    "text turned round": "\u202egnp.exe\u202c \u2066x\u2069 \u200fy",
    "invisible letters": "pass\u200bword\ufeff\u00ad",
    "a device's answer": "\x1bP+q544e\x1b\\ \x05 \x1b[6n",
    "half a character": "\udcff",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_foreign_text_can_not_steer_a_terminal(text: str) -> None:
    assert all(char == "\n" or char.isprintable() for char in without_controls(text))
    assert one_line(f"a\n{text}\rb").isprintable()
