"""What passes between the parent and a trial's processes, on disk: jobs, reports and the workload's payload.

Comes in: a typed job and the user's workload. Goes out: files in the trial's folder that each rank reads and answers
beside. Owns the file names of a trial and the atomic writes, which other rooms use for their own files too.
"""
