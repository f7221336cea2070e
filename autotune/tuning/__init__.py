"""Search: propose a trial, run it, store it, and decide which configuration is proven faster.

Comes in: a plan, a space and a runner of trials. Goes out: what was found, with the recommendation.
"""
