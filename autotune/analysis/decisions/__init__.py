"""What runs allow to say: the spread between them, ratios of rounds, claims, what to recommend, when to stop. Pure.

Comes in: measurements of trials and confirmations. Goes out: intervals, beliefs and choices.
"""
