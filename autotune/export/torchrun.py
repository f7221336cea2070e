"""Export to torchrun: the beginning of a command line, before the script.

Source: torch/distributed/run.py and torch/numa/binding.py, torch 2.13.
"""

from __future__ import annotations

from typing import Any

from autotune.export.table import Defaults, Export, Table, Wanted, as_options, export

TORCHRUN = Table(target="torchrun", title="torchrun")
_BINDS_ON = {None, "cuda"}
"""Kinds of device whose processes it binds, by torch's names; on any other it raises."""


def to_torchrun(found: Wanted) -> Export:
    """Return the command that starts the processes; all other settings belong into the script."""
    settings: dict[str, Any] = {"standalone": True, "nnodes": 1, "nproc_per_node": found.processes}
    if _binds(found):
        settings["numa_binding"] = found.config.numa_binding
    threads = found.config.intra_op_threads
    before = "" if threads is None else f"env OMP_NUM_THREADS={threads} "
    text = f"{before}torchrun {as_options(settings)}"
    return export(found, TORCHRUN, text=text, settings=settings, defaults=_defaults(found))


def _binds(found: Wanted) -> bool:
    return found.config.numa_binding is not None and found.device in _BINDS_ON


def _defaults(found: Wanted) -> Defaults:
    if _binds(found):
        differs = ""
        if found.config.numa_binding == "exclusive":
            differs = ", and divides a node's cores among all of its GPUs, used or not; in trials among its ranks"
        yield (
            "--numa-binding",
            f"needs the program numactl, and no config.prepare with it, which binds too{differs}",
        )
    if found.processes > 1 and found.config.intra_op_threads is None:
        yield (
            "OMP_NUM_THREADS",
            "1 where it is not set; in trials the ranks shared all cores of a machine",
        )
