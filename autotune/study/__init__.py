"""The only user of Optuna: what a search has measured and what it may still try, kept in a SQLite file.

Comes in: a resolved space, the name of a search method, and results of trials. Goes out: trials to run, their records
in order, and how much each setting matters. Proposals that need no sampler (an expert's guesses, variants of the best,
candidates for a model) are made here as well, as pure functions of the space.
"""
