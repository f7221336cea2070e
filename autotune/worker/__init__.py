"""Inside a trial's process: the only room that uses torch.

Comes in: a job in a trial's folder. Goes out: one RankReport, whatever happens. `rank` is a rank's
whole life; `serve` and `__main__` start ranks. `setup` opens the device and builds what is trained,
`measure` times it, `after_window` explains the figures, `jobs` holds what is not a plain trial, and
`failure` says what an exception means. The user's code runs here and nowhere else.
"""
