"""Measure what explains a window, once it is over: profile, cost of items, communication, roofline.

Comes in: the workload of a trial and its window. Goes out: records for the diagnosis and the
report.
"""
