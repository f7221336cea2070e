"""Frozen models of what is measured and stored.

Holds the types of a trial's measurement (window, ceilings, breakdown, utilization, conditions,
ranks), of its checks (precision, stress), of a recommendation, a diagnosis and a search's summary,
and the identity of a study. Comes in: figures from the worker, or JSON of a run folder. Goes out:
the same figures, raw, with properties that follow from one record alone; comparisons and estimates
are in models/.
"""
