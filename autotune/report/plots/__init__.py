"""The report's plots: what they show as plain numbers, matplotlib's drawing of it, and the same as tables.

Comes in: a RunSummary, its columns and memory lines. Goes out: Plots, SVG, and Tables for a text that can't draw.
"""
