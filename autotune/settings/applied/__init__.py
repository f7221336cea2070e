"""What a TrainingConfig's helpers do to torch: trials and the user's own loop apply settings by this one code.

Owns precision, layout, threads, devices and accumulation. Comes in: a model, a batch, an optimizer, and single
settings; nothing here knows a TrainingConfig. Goes out: the same, as the settings have them. Imports torch.
"""
