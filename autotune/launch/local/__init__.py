"""Launchers on this machine: a Launch in, an Exit out.

Owns a trial's processes from their start to the end of the last one: the fork server or fresh interpreters, the log,
deadline and memory, and the sweep that leaves no process behind. `hang_report` reads where they stood.
"""
