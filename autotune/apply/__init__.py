"""Apply settings to a training loop: in trials, and through TrainingConfig's methods in a user's own loop.

Comes in: a TrainingConfig and the user's model, loader or optimizer. Goes out: these, with the
settings in force.
"""
