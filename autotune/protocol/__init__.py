"""Pass jobs, reports and the workload between the parent and a trial's processes, on disk.

Comes in: a typed job and the user's workload. Goes out: files in the trial's folder that each rank
reads, and its answer next to them. Owns the file names of a trial, the atomic writes, and what keeps
other users out of a folder (private folders, a run folder's lock), which other packages use too.
"""
