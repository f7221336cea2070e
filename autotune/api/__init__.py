"""Carry out Python calls and commands with all other packages: the composition root.

Comes in: the arguments of `search`, `diagnose` and `load`, or a Plan that the command line has
read. Goes out: results, and the files of a run folder. The modules here open launcher and folders
(setup), wire one task each (search, diagnose, check) and protect the caller's process (caller);
nothing is measured, decided or worded here.
"""
