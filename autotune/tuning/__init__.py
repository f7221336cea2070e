"""Search: propose a trial, run it, store it, and prove which configuration is faster.

Comes in: a plan, a space and a runner of trials. Goes out: a SearchOutcome and the recommendation.
"""
