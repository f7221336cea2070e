"""What an exception means: whose memory was full, whether a kernel or another rank failed, where the user's code did.

Comes in: an exception of any code (the user's, torch's, a library's, one quoted from another process). Goes out: an
outcome with its reason and the user's own traceback; and, before a rank is ended, a dump of where it hangs.
"""
