"""report.md: the report's sections as GitHub-flavoured Markdown, the same as the page; what it draws stands in tables.

Comes in: a RunSummary and its run folder. Goes out: Markdown, which needs no plotting library. Text that stems from the
user's code is escaped; tracebacks stand in fences longer than any run of backticks inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from autotune.records.run_summary import RunSummary
from autotune.report.blocks import Block, Bullets, Facts, Figure, Paragraph, Section, Shares, Table, TimeBars, Trace
from autotune.report.content import say_changes, say_headline
from autotune.report.formatting import format_fraction, one_line
from autotune.report.plots.plots import Plot, list_plots
from autotune.report.plots.tables import bar_table, plot_blocks
from autotune.report.sections.assembly import list_sections, result_blocks

__all__ = ["render_markdown", "render_sections"]

_MARKS = re.compile(r"([\\`*_{}\[\]<>|~&#$])")
_BACKTICKS = re.compile(r"`+")


def render_markdown(summary: RunSummary, run_dir: Path) -> str:
    """The whole report."""
    plots = {plot.name: plot for plot in list_plots(summary)}
    parts = [
        f"# autotune: {_escape(summary.name)}",
        f"**{_escape(say_headline(summary))}**",
        _escape(say_changes(summary)),
        *map(_block, result_blocks(summary)),
        *_lay_out(list_sections(summary, run_dir, own_file="report.md", drawn=plots), plots),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_sections(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """A report of other content: a title, a first sentence in bold and the rest of the lead, sections."""
    parts = [f"# {_escape(title)}", f"**{_escape(lead[0])}**", *map(_escape, lead[1:]), *_lay_out(sections, {})]
    return "\n\n".join(parts) + "\n"


def _lay_out(sections: Sequence[Section], plots: Mapping[str, Plot]) -> list[str]:
    """The sections that have something to say, each below its title."""
    parts = []
    for section in sections:
        texts = [text for block in section.blocks for text in _texts(block, plots) if text]
        if texts:
            parts += [f"## {section.title}", *texts]
    return parts


def _texts(block: Block, plots: Mapping[str, Plot]) -> list[str]:
    """A block's text; a plot's title, its table and what is to know of it."""
    if not isinstance(block, Figure):
        return [_block(block)]
    plot = plots[block.name]
    return [f"### {plot.title}", *map(_block, plot_blocks(plot))]


def _block(block: Block) -> str:
    """A block's text; "" for one without rows."""
    if isinstance(block, Paragraph):
        return _escape(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {_escape(sentence)}" for sentence in block.sentences)
    if isinstance(block, TimeBars):
        block = bar_table(block)
    if isinstance(block, Table):
        return _table(block.heads, block.rows) if block.rows else ""
    if isinstance(block, Facts):
        return _table(("", ""), list(block.facts.items()))
    if isinstance(block, Shares):
        rows = [(name, format_fraction(share)) for name, share in block.shares.items()]
        return f"### {_escape(block.title)}\n\n{_table(('setting', block.head), rows)}" if rows else ""
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
