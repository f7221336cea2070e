"""Inside somebody else's training script: seen from torch's own seams, steered batch by batch, ended after its window.

Comes in: a job whose workload is a command. Goes out: the same report as of any job. `start` runs the command, `hooks`
patches torch's seams, `session` finds the training loop behind them, `conductor` turns the loop inside out so that
`measure/` can drive it, `overrides` and `precision` change settings, `sightings` says what was seen, `files` and
`quiet` keep the script from harm. The script's files are never changed; its process does not outlive the measurement.
"""
