"""torchrun: the beginning of a command line, which the script follows.

Source: torch/distributed/run.py, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.settings.exports.export import Differing, Export, Wanted
from autotune.settings.exports.table import Table, dropped
from autotune.settings.exports.text import as_options

__all__ = ["TORCHRUN", "to_torchrun"]

TORCHRUN = Table(title="torchrun")


def to_torchrun(found: Wanted) -> Export:
    """How to start the processes; all else is the script's."""
    settings: dict[str, Any] = {"standalone": True, "nnodes": 1, "nproc_per_node": found.processes}
    threads = found["intra_op_threads"]
    before = "" if threads is None else f"env OMP_NUM_THREADS={threads} "
    return Export(
        target="torchrun",
        text=f"{before}torchrun {as_options(settings)}",
        settings=settings,
        dropped=dropped(found, TORCHRUN, but="world_size intra_op_threads"),
        defaults=(*_defaults(found),),
    )


def _defaults(found: Wanted) -> Iterator[Differing]:
    if found.processes > 1 and found["intra_op_threads"] is None:
        yield Differing("OMP_NUM_THREADS", "1 where it is not set; in trials the ranks shared all cores of a machine")
