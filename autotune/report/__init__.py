"""What a person or a script gets to see: progress while a search runs, and its summary afterwards.

Comes in: core.result's Progress and RunSummary. Goes out: text on a console, Markdown, HTML, JSON. Nothing here
measures, decides or writes a file; text that stems from user code is never taken for markup.

    formatting  units, settings and foreign text as short strings
    figures     the columns and rows of the result's table
    content     the sentences, the failures by kind, the files
    standing    how far the rates are from the ceilings, in sentences
    blocks, sections, device_sections, rank_sections, time_sections, trial_sections: the whole report as sections
                    without markup
    plots, drawing, plot_tables: what its plots show, matplotlib's drawing of it, and the same as tables
    progress, terminal, markdown, page, notebook, export: the same content in six forms; console_blocks: a section on
                    a console
"""

from __future__ import annotations

from autotune.report.render.json_document import summary_json

__all__ = ["summary_json"]
