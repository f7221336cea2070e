"""Inside somebody else's training script: seen from torch's own seams, steered batch by batch, ended after its window.

Comes in: a job whose workload is a command. Goes out: the same report as of any job. `start` runs the command, `seams`
are where torch is watched and settings are put in, `loop` finds the training loop behind them and turns it inside out
so that `measure/` can drive it, `redirect` keeps the script from changing files that existed before. The script's
process does not outlive the measurement.
"""
