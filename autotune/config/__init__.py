"""Frozen models of the user's request: the plan of a search, the settings of a training run, the environment.

Comes in: YAML documents and Python arguments. Goes out: models that are checked once and never
changed.
"""
