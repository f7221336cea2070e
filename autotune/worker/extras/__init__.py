"""Measure the causes of a window's throughput once it is over: profile, items, communication, roofline.

In: the workload of a trial and its window. Out: records for the diagnosis and the report.
"""
