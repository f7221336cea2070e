"""Write recommended settings in the words of other frameworks, one module for each framework.

Comes in: a TrainingConfig. Goes out: the text of a framework's file, and what it cannot carry.
"""
