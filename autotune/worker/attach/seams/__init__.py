"""Where a script is seen and changed: torch's own seams, imports as they happen, settings put in from outside.

Comes in: a Watcher that is told of everything, and a configuration. Goes out: calls to the watcher, in the script's own
thread. Nothing is measured here.
"""
