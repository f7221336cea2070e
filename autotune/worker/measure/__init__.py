"""The measuring core: batches, steps, and the timed window over both.

Comes in: a loader and a model, built. Goes out: the raw Window of blocks, the ceilings of loader and device alone, and
what the device did meanwhile (how busy it was, its clocks, who else used it). The clock covers the whole loop; nothing
that explains a figure is measured while it runs.
"""
