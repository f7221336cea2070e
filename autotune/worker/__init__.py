"""The side of a trial, `python -m autotune.worker`: builds the workload, trains it for a window, measures."""
