"""Text of any origin made safe to show: without terminal escapes, on one line, no longer than there is room.

Comes in: what user code, drivers or file systems have said. Goes out: plain strings, free of markup.
"""

from __future__ import annotations

from rich.text import Text

__all__ = ["cut_middle", "one_line", "shorten", "without_controls"]


def without_controls(text: str) -> str:
    """Foreign text without terminal escapes and other characters that don't print; line ends stay."""
    if text.isprintable():  # as nearly all of a table's thousands of cells
        return text
    lines = text.replace("\r\n", "\n").replace("\r", "\n")  # rich drops what stands before a carriage return
    plain = Text.from_ansi(lines.expandtabs(4)).plain
    return "".join(char for char in plain if char == "\n" or char.isprintable())


def cut_middle(text: str, longest: int) -> str:
    """Foreign text of at most so many characters and a line that says how many of its middle are left out."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"


def one_line(text: str) -> str:
    """Foreign text on a single line, safe to print."""
    return " ".join(without_controls(text).split())


def shorten(text: str, width: int) -> str:
    """Foreign text on a single line of at most so many terminal cells, cut with an ellipsis."""
    line = Text(one_line(text))
    line.truncate(max(width, 1), overflow="ellipsis")
    return line.plain
