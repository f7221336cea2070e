"""What is measured and stored, as frozen models.

Owns the types of a trial's measurement (window, ceilings, breakdown, utilization, conditions,
ranks), of its checks (precision, stress), of a recommendation, a diagnosis and a search's summary,
and the identity of a study. Comes in: figures from the worker, or JSON of a run folder. Goes out:
the same figures, raw, with properties that follow from one record alone; whatever compares or
estimates is in analysis/.
"""
