"""What runs allow to say: how far they differ, what they prove, claims, what to recommend, when to stop. Pure.

Comes in: the runs of a search. Goes out: contrasts, proofs, beliefs and choices.
"""
