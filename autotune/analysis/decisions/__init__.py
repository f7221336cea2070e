"""Decide by runs: how far they differ, what is proven, claimed and recommended, and when to stop. Pure.

Comes in: the runs of a search. Goes out: contrasts, proofs, beliefs and choices.
"""
