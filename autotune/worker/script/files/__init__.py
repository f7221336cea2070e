"""Keep the user's files unchanged while a script runs in a trial.

Comes in: the script's calls that read and change files. Goes out: the same results, with changes
kept in scratch.
"""
