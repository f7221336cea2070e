"""The targets, a module each: its table, what it writes, and what it does by itself.

Comes in: a Wanted; for the four that have files of their own, also what such a file holds. Goes out: an Export, or a
Reading. Each names the source that its table was read in.
"""
