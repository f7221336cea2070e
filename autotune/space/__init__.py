"""The settings that are searched on this machine, for this workload.

Owns default ranges, the rules that depend on machine or data, and how the learning rate follows the
global batch. Comes in: the user's SearchSpace, baseline and objective, with the facts of the probe.
Goes out: a ResolvedSpace with a domain for every setting, notes on what has no effect, and
TrainingConfigs composed of proposed values, or the reason against them. Pure.
"""
