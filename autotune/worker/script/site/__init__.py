"""A folder on PYTHONPATH through which autotune attaches to the Python processes of a command.

In: the start of an interpreter. Out: an attached process, with the user's own sitecustomize run
afterwards.
"""
