"""Judge the start of loader workers: the pause at each epoch's start, and a long first start.

Takes an Evidence whose script was watched; returns a Finding and Advice, whose gain is that of the
whole run. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from autotune.diagnosis.advice import advise, advise_saving, gain_of
from autotune.messages import advice as remedies
from autotune.messages import diagnosis as messages
from autotune.messages.advice import AdviceText
from autotune.models.forecast import with_collating
from autotune.models.statistics import t_95
from autotune.note import Note
from autotune.records.measurement import Interval
from autotune.records.result import Advice, Evidence, Finding
from autotune.records.watched_run import WatchedRun, WorkerStart

_LONG_START_S = 20.0
"""Seconds of a first start that are worth advice although they pass once: a user waits for them at
each try. Source: our convention."""
_FEW_STARTS_ERROR = 0.3
"""Relative error of the mean of one or two starts: those of the same script took 6.5 to 12 s on two
shared cores. Source: our convention."""
_LEAST_STARTS = 3
"""Starts for an interval of their mean."""
_PREPARING_FRACTION = 0.3
"""Share of a restart before the first batch, without starting the processes, from which on what
workers prepare is worth advice. Source: our convention."""


_LEAST_RESTART = 0.10
"""Share of an epoch in its restart from which shorter starts are advised. Source: our convention, as
for findings."""


class Restart(NamedTuple):
    """Cost of starting workers in each epoch."""

    restart_s: float
    """Mean seconds from `iter(loader)` to the first batch."""
    half_width_s: float
    """Half of its 95 % interval."""
    epoch_s: float
    """Seconds of an epoch with its restart."""
    ready_s: float
    """Seconds that the first batch takes with workers that run already."""
    start: WorkerStart
    """A typical start."""

    @property
    def saved_s(self) -> float:
        """Seconds of an epoch that workers save which stay."""
        return max(0.0, self.restart_s - self.ready_s)

    def saved(self, saved_s: float) -> Interval:
        """Return the share of the whole run that is saved if an epoch takes this many seconds less."""
        off_s = self.half_width_s  # a longer restart makes a longer epoch
        return Interval(
            value=saved_s / self.epoch_s,
            low=max(0.0, saved_s - off_s) / (self.epoch_s - off_s),
            high=(saved_s + off_s) / (self.epoch_s + off_s),
        )


def restart_of(evidence: Evidence) -> Restart | None:
    """Return the restart of workers in each epoch; None if they stay, or if it was not observed."""
    watched = evidence.watched
    if watched is None or evidence.config.persistent_workers or not watched.worker_starts:
        return None
    batch_s = _batch_s(watched)
    if watched.epoch_batches is None or batch_s is None:
        return None
    # The first start also imports what later ones find in memory
    starts = watched.worker_starts[1:] or watched.worker_starts
    seconds = [start.first_batch_s for start in starts]
    restart_s = fmean(seconds)
    half_width_s = _FEW_STARTS_ERROR * restart_s
    if len(seconds) >= _LEAST_STARTS:
        half_width_s = t_95(len(seconds) - 1) * stdev(seconds) / sqrt(len(seconds))
    return Restart(
        restart_s=restart_s,
        half_width_s=min(half_width_s, restart_s),
        epoch_s=restart_s + watched.epoch_batches * batch_s,
        ready_s=min(_ready_s(evidence), restart_s),
        start=starts[-1],
    )


def restart_finding(evidence: Evidence) -> Finding | None:
    """Return the share of the run that restarts take, and where it goes; None if not observed."""
    found = restart_of(evidence)
    if found is None:
        return None
    evidence_note = _start_evidence(evidence, found.start, found.restart_s, found.epoch_s)
    return Finding(
        bottleneck="restart",
        share=min(1.0, found.restart_s / found.epoch_s),
        figures=evidence_note.figures,
        evidence=evidence_note.text,
    )


def slow_start(evidence: Evidence) -> Note | None:
    """Return where a long first start of workers goes; None if it is short or was not observed."""
    start = _long_start(evidence)
    return None if start is None else _start_evidence(evidence, start, start.first_batch_s, None)


def start_remedies(evidence: Evidence) -> Iterator[Advice]:
    """Yield remedies in the order in which to try them: workers that stay, less to pickle, less to prepare."""
    found = restart_of(evidence)
    if found is not None:
        kept = found.saved(found.saved_s)
        words = remedies.keep_workers(
            settings={"persistent_workers": True},
            restart_s=found.restart_s,
            epoch_s=found.epoch_s,
            gain_low=gain_of(kept.low),
            gain_high=gain_of(kept.high),
            has_set_epoch=_has_set_epoch(evidence),
        )
        yield advise_saving(words, kept, "restart")
    start = _long_start(evidence) if found is None else found.start
    if start is None:
        return

    if found is not None and found.restart_s < _LEAST_RESTART * found.epoch_s:
        return

    def piece(words: AdviceText, seconds: float) -> Advice:
        """Return advice on shorter restarts: a fault where workers can't stay, which saves more."""
        if found is None or not _has_set_epoch(evidence):
            return advise(words, evidence.measurement.samples_per_s, None, against="restart")
        return advise_saving(words, found.saved(seconds), "restart")

    if start.pickle_s is not None and start.pickled_bytes is not None:
        words = remedies.pickle_less(
            method=start.method,
            workers=start.workers,
            pickle_s=start.pickle_s,
            pickled_bytes=start.pickled_bytes,
            is_each_epoch=found is not None,
        )
        # without what reading it in the worker takes, which is not known apart
        yield piece(words, start.workers * start.pickle_s)
    prepare_s = _prepare_s(evidence, start)
    if prepare_s >= _PREPARING_FRACTION * start.first_batch_s:
        words = remedies.prepare_workers_less(workers=start.workers, prepare_s=prepare_s)
        yield piece(words, prepare_s)


def _batch_s(watched: WatchedRun) -> float | None:
    """Return the mean seconds of a batch without restarts; None if none was observed."""
    if watched.batches < 1:
        return None
    return max(0.0, watched.watched_s - watched.parts_s.get("restart", 0.0)) / watched.batches


def _ready_s(evidence: Evidence) -> float:
    """Return the seconds in which running workers make an epoch's first batch; 0 if unknown."""
    costs = evidence.measurement.loader_costs
    if costs is None:
        return 0.0
    batch = evidence.config.micro_batch_size
    return batch * with_collating(evidence, costs, costs.item_s) + (costs.transfer_s or 0.0)


def _prepare_s(evidence: Evidence, start: WorkerStart) -> float:
    """Return the seconds of a start that are neither starting processes nor making the first batch."""
    return max(0.0, start.first_batch_s - start.start_s - _ready_s(evidence))


def _long_start(evidence: Evidence) -> WorkerStart | None:
    """Return the first start if it takes long."""
    starts = () if evidence.watched is None else evidence.watched.worker_starts
    if not starts or starts[0].first_batch_s < _LONG_START_S:
        return None
    return starts[0]


def _start_evidence(
    evidence: Evidence, start: WorkerStart, restart_s: float, epoch_s: float | None
) -> Note:
    return messages.worker_start_evidence(
        restart_s=restart_s,
        epoch_s=epoch_s,
        method=start.method,
        workers=start.workers,
        start_s=start.start_s,
        prepare_s=_prepare_s(evidence, start),
        pickle_s=start.pickle_s,
        pickled_bytes=start.pickled_bytes,
    )


def _has_set_epoch(evidence: Evidence) -> bool:
    """Return whether the script changes its dataset by epoch, which workers that stay would miss."""
    script = evidence.facts.script
    if script is None:
        return False
    return any(
        note.figures.get("setting") == "persistent_workers"
        and note.figures.get("reason") == "data_by_epoch"
        for note in script.unreached
    )
