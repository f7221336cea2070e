"""One model of peak memory, for the search, the curves, the report and the diagnosis.

Comes in: peaks of configurations. Goes out: forecasts with their uncertainty, and what they say of the micro batch.
"""
