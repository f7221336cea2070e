"""The folder on PYTHONPATH through which autotune attaches to the Python processes of a command.

Comes in: the interpreter's start. Goes out: an attached process, and the user's own sitecustomize
after it.
"""
