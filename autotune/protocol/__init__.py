"""What passes between the parent and a trial's processes, on disk: jobs, reports and the workload's payload.

Comes in: a typed job and the user's workload. Goes out: files in the trial's folder that each rank
reads and answers beside. Owns the file names of a trial, the atomic writes, and what keeps others
out of a folder (private folders, a run folder's lock), which other rooms use for their own files
too.
"""
