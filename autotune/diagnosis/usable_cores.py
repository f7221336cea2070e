"""Find cores that a script could use but does not, and advise how to get them.

Takes an Evidence whose script was watched; returns a Finding and Advice. The affinity was read
while the script trained, in the training thread and in its loader workers. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Literal, NamedTuple

from autotune.diagnosis.advice import advise
from autotune.messages import advice as remedies
from autotune.messages import diagnosis as messages
from autotune.messages.advice import AdviceText
from autotune.models.forecast import (
    device_ceiling,
    device_cores,
    join_rates,
    loader_ceiling,
    loader_cpu_s,
    loader_processes,
)
from autotune.note import Note
from autotune.records.result import Advice, Evidence, Finding
from autotune.records.watched_run import Modes

_LOADER_BOUND_FRACTION = 0.1
"""Share of waiting for data from which on more cores are expected to help. Source: as for a
finding's least share (bottlenecks.py)."""
_WORKS_FRACTION = 0.5
"""Share of an item's time on a core above which more cores speed it up, not only more workers.
Source: as WAITING_CPU_FRACTION in bottlenecks.py."""


class _Cores(NamedTuple):
    """Cores that are used, those that could be, and the reason."""

    used: int
    wanted: int
    evidence: Note
    remedy: AdviceText


def cores_finding(evidence: Evidence) -> Finding | None:
    """Return the cores that can't be used, with the share of time that they should save.

    The share is 0 where no gain can be computed: the fault then stands, without a size.
    """
    found = _unused_cores(evidence)
    if found is None:
        return None
    rate = _rate_with(evidence, found)
    share = 0.0 if rate is None else max(0.0, 1 - evidence.measurement.samples_per_s / rate)
    return Finding(
        bottleneck="cores",
        share=share,
        figures=found.evidence.figures,
        evidence=found.evidence.text,
    )


def cores_remedies(evidence: Evidence) -> Iterator[Advice]:
    """Yield how to get the cores, with a gain where loading is what lacks them."""
    found = _unused_cores(evidence)
    if found is not None:
        yield advise(
            found.remedy,
            evidence.measurement.samples_per_s,
            _rate_with(evidence, found),
            is_fault=True,
            against="cores",
        )


def _unused_cores(evidence: Evidence) -> _Cores | None:
    """Return the first reason that applies: bound after the start, in workers, at the start, by a limit."""
    if evidence.watched is None:
        return None
    modes = evidence.watched.modes
    start = modes.start_cores
    if modes.process_cores is None or start is None:
        return None
    # OpenMP binds each thread by itself: together they use all cores
    threads = modes.thread_cores or modes.process_cores
    if threads < start:
        return _Cores(
            used=threads,
            wanted=start,
            evidence=messages.process_cores_evidence(
                cores=threads, start_cores=start, pinned_by=modes.pinned_by
            ),
            remedy=remedies.release_cores(
                cores=threads, start_cores=start, pinned_by=modes.pinned_by
            ),
        )
    workers = modes.worker_cores
    if workers is not None and workers < start:
        return _Cores(
            used=workers,
            wanted=start,
            evidence=messages.worker_cores_evidence(
                cores=workers,
                start_cores=start,
                num_workers=evidence.config.num_workers,
                pinned_by=modes.pinned_by,
            ),
            remedy=remedies.release_cores(
                cores=workers, start_cores=start, pinned_by=modes.pinned_by
            ),
        )
    granted = modes.granted_cores
    if granted is not None and start < min(granted, modes.machine_cores or granted):
        return _Cores(
            used=start,
            wanted=granted,
            evidence=messages.granted_cores_evidence(
                cores=start, granted_cores=granted, grant_source=modes.grant_source
            ),
            remedy=remedies.pass_slurm_grant(
                cores=start, granted_cores=granted, grant_source=modes.grant_source
            ),
        )
    return _limited_cores(evidence, modes, start)


def _limited_cores(evidence: Evidence, modes: Modes, start: int) -> _Cores | None:
    """Return a limit below the machine's cores, if loading and computing need more than it allows."""
    machine = modes.machine_cores
    limit: Literal["quota", "slurm", "affinity"] = "affinity"
    cores: float = start
    if modes.quota_cores is not None and modes.quota_cores < start:
        limit = "quota"
        cores = modes.quota_cores
    elif modes.granted_cores is not None:
        limit = "slurm"
        cores = min(start, modes.granted_cores)
    if machine is None or cores >= machine or not _lacks_cores(evidence):
        return None
    needed = ceil(device_ceiling(evidence) * loader_cpu_s(evidence) + device_cores(evidence))
    wanted = min(machine, needed)
    if wanted <= cores:
        return None
    return _Cores(
        used=max(1, int(cores)),
        wanted=wanted,
        evidence=messages.machine_cores_evidence(
            cores=cores, machine_cores=machine, limit=limit, grant_source=modes.grant_source
        ),
        remedy=remedies.ask_for_cores(limit=limit, cores=cores, wanted_cores=wanted),
    )


def _lacks_cores(evidence: Evidence) -> bool:
    """Return whether training waits for items that keep a core busy."""
    costs = evidence.measurement.loader_costs
    waiting = evidence.measurement.data_wait_fraction or 0.0
    if costs is None or costs.cpu_fraction < _WORKS_FRACTION:
        return False
    return waiting >= _LOADER_BOUND_FRACTION


def _rate_with(evidence: Evidence, found: _Cores) -> float | None:
    """Return the throughput with all of the wanted cores; None if loading is not what lacks them.

    The loader makes as many items at once as it has cores and processes. Computing on a CPU is
    expected to stay as it is, although it may gain too.
    """
    if not _lacks_cores(evidence):
        return None
    processes = loader_processes(evidence.config)
    more = min(processes, found.wanted) / min(processes, found.used)
    if more <= 1:
        return None
    loader = loader_ceiling(evidence)
    device = device_ceiling(evidence)
    before = join_rates(evidence, loader, device)
    after = join_rates(evidence, more * loader, device)
    return evidence.measurement.samples_per_s * max(1.0, after / before)
