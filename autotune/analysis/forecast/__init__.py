"""What settings should reach that were not tried yet: the law of a rate, the model around it, what to try next. Pure.

Comes in: observations of loader and device alone and of runs. Goes out: forecasts with their uncertainty.
"""
