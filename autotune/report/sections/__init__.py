"""The parts of a report, each as Sections, Tables and notes without markup.

Comes in: a RunSummary with its columns, or a Diagnosis. Goes out: blocks that any renderer can lay out. A section that
has nothing to show has no content in its blocks, and is left out of the report.
"""
