"""What a worker does beside a plain trial: the probe, the precision check, the curves of a diagnosis, the stress run.

Comes in: a Workload and a Job. Goes out: WorkloadFacts, PrecisionFigures, Curves or StressFigures. One file a job; the
curves have two more, for their points and for what is refused before it fills the memory.
"""
