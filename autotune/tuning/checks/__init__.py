"""What a configuration must pass before it may win: its precision against float32, and the largest samples.

Comes in: a trial that ran well, a runner. Goes out: figures, and whether it may win.
"""
