"""Settings in the words of other frameworks, and read back from them.

Owns one table a target (their names for our settings), by which it writes and reads. Comes in: the values of a
TrainingConfig, or what a framework's own file holds, as plain data. Goes out: an Export (the text, what is not in it
and why, which of the target's defaults would differ), or a Reading for the baseline. Pure; no framework is imported,
and no TrainingConfig, which imports this when its `to` is called. The reasons are English here, beside the rule that
each belongs to: Python callers have them from `to` without a report between.
"""
