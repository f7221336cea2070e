"""The one composition root: what Python calls and the command line ask for, carried out with all the other rooms.

Comes in: the arguments of `search`, `diagnose` and `load`, or a Plan that the command line has
read. Goes out: results, and the files of a run folder. The modules here open launcher and folders
(setup), wire one task each (search, diagnose, check) and protect the caller's process (caller);
nothing is measured, decided or worded here.
"""
