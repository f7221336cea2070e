"""report.md: the report's sections as GitHub-flavoured Markdown; plots are left out, their data stand in its tables.

Comes in: a RunSummary and its run folder. Goes out: Markdown. Text that stems from the user's code is escaped;
tracebacks stand in fences longer than any run of backticks inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from autotune.core.result import RunSummary
from autotune.report.blocks import Block, Bullets, Facts, Paragraph, Section, Shares, Table, Trace
from autotune.report.content import say_changes, say_headline
from autotune.report.formatting import format_fraction, one_line
from autotune.report.sections import list_sections, result_blocks

__all__ = ["render_markdown", "render_sections"]

_MARKS = re.compile(r"([\\`*_{}\[\]<>|~&#$])")
_BACKTICKS = re.compile(r"`+")


def render_markdown(summary: RunSummary, run_dir: Path) -> str:
    """The whole report."""
    parts = [
        f"# autotune: {_escape(summary.name)}",
        f"**{_escape(say_headline(summary))}**",
        _escape(say_changes(summary)),
        *map(_block, result_blocks(summary)),
    ]
    for section in list_sections(summary, run_dir, own_file="report.md"):
        blocks = [text for text in map(_block, section.blocks) if text]
        if blocks:
            parts += [f"## {section.title}", *blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_sections(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """A report of other content: a title, a first sentence in bold and the rest of the lead, sections."""
    parts = [f"# {_escape(title)}", f"**{_escape(lead[0])}**", *map(_escape, lead[1:])]
    for section in sections:
        blocks = [text for text in map(_block, section.blocks) if text]
        if blocks:
            parts += [f"## {section.title}", *blocks]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    """A block's text; "" for one without rows, and for what only a page can show."""
    if isinstance(block, Paragraph):
        return _escape(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {_escape(sentence)}" for sentence in block.sentences)
    if isinstance(block, Table):
        return _table(block.heads, block.rows) if block.rows else ""
    if isinstance(block, Facts):
        return _table(("", ""), list(block.facts.items()))
    if isinstance(block, Shares):
        rows = [(name, format_fraction(share)) for name, share in block.shares.items()]
        return _table(("setting", block.head), rows) if rows else ""
    return _trace(block) if isinstance(block, Trace) else ""


def _trace(block: Trace) -> str:
    head = f"**{_escape(block.count)}** {_escape(block.text)}"
    return f"{head}\n\n{_fence(block.traceback)}" if block.traceback else head


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [
        [_escape(head) for head in heads],
        ["---"] * len(heads),
        *([_escape(cell) for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape(text: str) -> str:
    """Any text on one line, with everything that Markdown or HTML would obey made plain."""
    return _MARKS.sub(r"\\\1", one_line(text))


def _fence(text: str) -> str:
    """Any text as a block of code."""
    longest = max((len(run) for run in _BACKTICKS.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
