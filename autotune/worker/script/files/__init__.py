"""Keep the user's files unchanged while a script runs in a trial.

In: the script's calls that read and change files. Out: the same results, with changes kept in
scratch.
"""
