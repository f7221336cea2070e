"""What a host's cores did while a window ran: how much of them the trial had, and how much other programs took.

Filled by the worker from two readings at the window's edges, stored raw beside the rate that it explains; what others
took is derived. `note_on_load` turns it into a note.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from autotune.frozen import FrozenModel
from autotune.messages.devices import cores_taken
from autotune.note import Note

__all__ = ["HostLoad", "join_loads", "note_on_load"]

_OTHERS_LEAST = 0.10
"""Share of the cores from which on other programs count: two cores lose that to an editor and a browser at work, and
more explains a rate by itself. Our own convention."""
_FULL_FROM = 0.5
"""Share of the cores from which on programs hold each other up: hyperthreads then share a core, and fewer cores stand
idle than are taken. Our own convention."""
_LEAST_S = 0.05
"""CPU time that others must have taken: the kernel counts it in hundredths of a second, for each core by itself. Our
own convention."""


class HostLoad(FrozenModel):
    """CPU time on one host during a window; of a group over several hosts that of the one that others loaded most.

    Source: man 5 proc, /proc/stat and /proc/pid/stat; Linux kernel, admin-guide/cgroup-v2 (cpu.stat), accounting/psi.
    """

    seconds: Annotated[float, Field(gt=0)]
    """Between the two readings; a little more than the window."""
    cores: Annotated[int, Field(ge=1)]
    """That the trial may use at once: affinity and cgroup quota."""
    reachable_cores: Annotated[int, Field(ge=1)]
    """That it may run on; more than `cores` where a quota limits it."""
    busy_s: Annotated[float, Field(ge=0)]
    """CPU time of all programs on the reachable cores, what the hypervisor gave to other machines included."""
    own_s: Annotated[float, Field(ge=0)]
    """Of the trial's processes: every rank on the host, and their loader workers."""
    stolen_s: Annotated[float, Field(ge=0)]
    """The share of `busy_s` that went to other virtual machines."""
    group_s: Annotated[float, Field(ge=0)] | None = None
    """Of all processes under the same quota; None where there is no quota, and where its group does not tell."""
    pressure_s: Annotated[float, Field(ge=0)] | None = None
    """In which some process that could run had to wait for a core. More workers than cores wait for each other, so
    nothing is judged by it; None where the kernel does not count it."""

    @property
    def others_cores(self) -> float:
        """Of the cores that the trial may use, how many other programs took from it in the mean.

        A quota leaves cores unused; what others take of these costs the trial nothing.
        """
        beside = self.reachable_cores - self.cores
        outside = (self.busy_s - self.own_s) / self.seconds - beside
        inside = 0.0 if self.group_s is None else (self.group_s - self.own_s) / self.seconds
        return min(max(0.0, outside, inside), float(self.cores))

    @property
    def is_loaded(self) -> bool:
        """Whether others took enough, of cores that are not mostly idle, to hold the trial up."""
        used = self.others_cores + self.own_s / self.seconds
        is_much = self.others_cores >= _OTHERS_LEAST * self.cores and self.others_cores * self.seconds >= _LEAST_S
        return is_much and used >= _FULL_FROM * self.cores


def join_loads(loads: Iterable[HostLoad | None]) -> HostLoad | None:
    """Several windows as one; None where none is known."""
    known = [load for load in loads if load is not None]
    if not known:
        return None
    return HostLoad(
        cores=min(load.cores for load in known),
        reachable_cores=min(load.reachable_cores for load in known),
        group_s=_sum(load.group_s for load in known),
        pressure_s=_sum(load.pressure_s for load in known),
        **{name: sum(getattr(load, name) for load in known) for name in ("seconds", "busy_s", "own_s", "stolen_s")},
    )


def note_on_load(load: HostLoad | None) -> Note | None:
    """Return that other programs slowed a window; None where they did not, or nothing is known."""
    if load is None or not load.is_loaded:
        return None
    return cores_taken(others_cores=load.others_cores, cores=load.cores)


def _sum(parts: Iterable[float | None]) -> float | None:
    known = list(parts)
    return None if None in known else sum(part for part in known if part is not None)
