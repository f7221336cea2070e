"""The machine's cores: which there are, which a process is bound to, and the threads of loader workers.

Comes in: settings. Goes out: a process that is bound and limited as they say.
"""
