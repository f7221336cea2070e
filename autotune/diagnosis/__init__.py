"""Diagnose slow training: bottlenecks with their shares of the time, advice with expected gains.

Takes an Evidence (measurement, curves, machine, workload) of a job and returns a Diagnosis; takes
a search's records and returns a StrategyComparison for several devices. Pure functions; their
sentences are in `messages`.
"""
