"""Inside a training script that is not ours: observe its loop at torch's seams, apply settings, end it.

Comes in: a job and the script's command. Goes out: the job's report, as from any trial.
"""
