"""Do the jobs of a worker other than trials: probe, precision check, curves and stress run.

In: a Workload and a job. Out: WorkloadFacts, or the job's own figures; see RankReport. There is one
module for each job, and `bench` for the curves.
"""
