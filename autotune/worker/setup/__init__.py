"""From a job to something that can be trained: device, process group, model, dataset, loader and optimizer.

Comes in: a Workload, a TrainingConfig and the name of a device. Goes out: an open Device, a Group of ranks, and the
user's objects, built and placed; and the Environment, the machine as trials see it. Nothing is timed here.
"""
