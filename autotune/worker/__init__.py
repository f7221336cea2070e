"""The side of a trial: `python -m autotune.worker`. Builds the workload, trains it for a window, measures. Owns torch."""
