"""Render report.md: the sections of the page as GitHub-flavoured Markdown, without its plots.

Takes a ReportModel; returns Markdown. Text that comes from the user's code is escaped; tracebacks
are in fences longer than any run of backticks inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from autotune.report.blocks import (
    Block,
    Bullets,
    Facts,
    Paragraph,
    Section,
    Table,
    Trace,
)
from autotune.report.model import ReportModel
from autotune.report.words import one_line

_MARKS = re.compile(r"([\\`*_{}\[\]<>|~&#$])")
_BACKTICKS = re.compile(r"`+")


def render_markdown(report: ReportModel) -> str:
    """Render a report as Markdown."""
    return render_sections(
        f"autotune: {report.summary.name}", report.headline, report.lead, report.sections
    )


def render_sections(
    title: str, headline: str, lead: Iterable[Block], sections: Iterable[Section]
) -> str:
    """Render a title, a headline, the blocks that follow it, and sections."""
    parts = [f"# {_escape(title)}", f"**{_escape(headline)}**", *map(_block, lead)]
    for section in sections:
        if any(texts := list(map(_block, section.blocks))):
            parts += [f"## {section.title}", *texts]
    return "\n\n".join(filter(None, parts)) + "\n"


def _block(block: Block) -> str:
    """Render a block; "" for a plot, and for one without content."""
    match block:
        case Paragraph():
            return _escape(block.text)
        case Bullets():
            return "\n".join(f"- {_escape(sentence)}" for sentence in block.sentences)
        case Table():
            return _table(block.heads, block.rows)
        case Facts():
            return _table(("", ""), block.facts.items())
        case Trace():
            head = f"**{_escape(block.count)}** {_escape(block.text)}"
            return f"{head}\n\n{_fence(block.traceback)}" if block.traceback else head
    return ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [map(_escape, heads), ["---"] * len(heads), *(map(_escape, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape(text: str) -> str:
    """Put text on one line, with the markup of Markdown and HTML escaped."""
    return _MARKS.sub(r"\\\1", one_line(text))


def _fence(text: str) -> str:
    """Return text as a block of code."""
    fence = max(("```", *(f"{run}`" for run in _BACKTICKS.findall(text))), key=len)
    return f"{fence}text\n{text}\n{fence}"
