"""The folder that stands first on the PYTHONPATH of what a command starts; Python runs its sitecustomize by itself.

Comes in: the variable AUTOTUNE_ATTACH. Goes out: a process in which torch is watched (bootstrap), or one as it was.
"""
