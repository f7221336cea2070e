"""What a worker does beside a plain trial: probe, precision check, curves of a diagnosis, stress run, gradients' noise.

Comes in: a Workload and a Job. Goes out: WorkloadFacts or the job's own figures, see RankReport.
One file a job; the curves have two more, for their points and for what is refused before it fills
the memory.
"""
