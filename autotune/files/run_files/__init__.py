"""Files of a run folder that are read back: whatever has become of one, it is named with what is wrong.

Comes in: paths, or the bytes of lines. Goes out: a RunSummary, records; or a ConfigError. Which files there are, and
what is written, stands in files/run_folder.
"""
