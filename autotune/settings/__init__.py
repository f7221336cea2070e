"""What the user says, as frozen models, and the machine that trials run on.

Owns every setting by its name, type and default, and the rules between settings that need nothing else. Comes in:
plain values, from a YAML file, a Python call or a stored result. Goes out: a Plan (workload, baseline, search space,
objective, budget, options, executor), a TrainingConfig with its helpers for the user's own loop, and an Environment.
Reads no files and knows no results. torch is imported only inside the helpers, when they are called.
"""
