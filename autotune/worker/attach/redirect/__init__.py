"""A trial's view of the file system: what existed before stays as it is, what the trial changes lies in scratch.

Comes in: the calls of `os`, `io` and native writers that a script makes. Goes out: the same calls on other paths.
`real` keeps the functions as they were, `journal` shares what was redirected between the trial's processes, `view` says
where a path really lies, `reads`, `changes` and `amendments` stand in for the functions, `native` prepares files for
C++ and Rust, `protection` puts all of it in place.
"""
