"""Run a trial in a process of its own; the only package that imports torch and runs user code.

Comes in: a job in a trial's folder. Goes out: one `RankReport`, whatever happens. `rank` is a
rank's whole life; `serve` and `__main__` start ranks. `trial` runs a trial: `build`, `loader` and
`step` make what is trained, `feed` and `window` time it, `conditions` reads what explains it,
`extras` measures more after the window. `jobs` holds jobs that are not plain trials, `script` runs
the user's own script, `failures` and `outcome` classify exceptions.
"""
