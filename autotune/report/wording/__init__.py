"""The sentences of a report, and names for people.

Comes in: a RunSummary with its columns, figures, a TrainingConfig. Goes out: sentences, free of markup.
"""
