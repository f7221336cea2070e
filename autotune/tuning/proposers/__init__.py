"""What a search tries next: proposals of a model of the machine, and what a further trial can still win.

Comes in: the study as it grows, and its space. Goes out: values to try next, or None where the study's sampler is to
draw; reasons to skip a sample, to stop a trial early, and to end the search.
"""
