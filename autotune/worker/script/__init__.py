"""Run a job inside the user's training script: observe its loop, apply settings, measure, end it.

In: a job and the script's command. Out: the job's report, as from any trial.
"""
