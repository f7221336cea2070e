"""Calculate from measurements: statistics, throughput model, memory model, decisions, time estimates.

Comes in: records. Goes out: numbers and decisions. Pure functions: no clock, no device, no files.
"""
