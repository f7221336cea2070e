"""Why is it slow: bottlenecks with their shares of the time, and advice with its expected gain. Pure.

Comes in: an Evidence (measurement, curves, machine, workload) for one job; a search's records,
where several devices were tried. Goes out: a Diagnosis with findings, advice and remarks; a
StrategyComparison for several devices. Their sentences are functions in messages/.
"""
