"""The script's training loop under measure/: found by a Session, turned inside out, and put to each kind of job.

Comes in: what the seams tell. Goes out: a job's report, and the end of the process. `loaders` finds the loader that
trains, `conductor` drives the loop, `feeds` take its batches, `sightings` says what was seen of it, `scenes`, `bench`
and `guard` do the jobs.
"""
