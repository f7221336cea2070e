"""Why is it slow: bottlenecks with their shares of the time, and advice with its expected gain. Pure.

Comes in: an Evidence (measurement, curves, machine, workload) for one job; a search's records, where several devices
were tried. Goes out: findings, advice and remarks as codes with figures; a StrategyComparison for several devices. The
sentences are in report/wording/english/diagnosis.yaml.
"""
