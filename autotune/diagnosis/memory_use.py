"""Warn of memory that is still to come, and advise against it: copies in workers, kept graphs, validation.

Takes an Evidence whose script was watched; returns Notes and Advice. Pure functions. A note's
figure `is_beyond_limit` is True if memory will not suffice.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Literal

from autotune.diagnosis.advice import advise
from autotune.messages import advice as remedies
from autotune.messages import diagnosis as messages
from autotune.models.growing_memory import Copying, copying_of, kept_graphs_of
from autotune.note import Note
from autotune.policy import POLICY
from autotune.records.result import Advice, Evidence
from autotune.records.watched_run import MemoryUse
from autotune.space import constraints as rules

_LEAST_COPIED_BYTES = 64 * 2**20
"""Memory copied by all workers, with what is to come, that is worth a note: less is what any worker writes to
of the interpreter and libraries. Workers of a dataset of NumPy arrays copied 4 MiB in 0.2 million
samples. Source: our convention."""
_MORE_IN_VALIDATION = 1.1
"""Peak of validation over training's that is worth a note; between runs a process's peak varies by
some percent. Source: our convention."""


_LARGE_COPIES_BYTES = 64 * 2**20
"""Copies observed from which they are worth a remedy before any setting; less may be the workers' own
memory, of which an extrapolation makes much. Source: our convention."""


def memory_warnings(evidence: Evidence) -> tuple[Note, ...]:
    """Return notes on memory that grows or that validation needs; those beyond a limit first."""
    if evidence.watched is None:
        return ()
    found = [
        *_copied(evidence, evidence.watched.memory),
        *_kept(evidence, evidence.watched.memory),
        *_validation(evidence, evidence.watched.memory),
    ]
    found.sort(key=lambda note: not note.figures["is_beyond_limit"])
    return tuple(found)


_WARNINGS = {
    "store_index_compactly": "memory_copied_by_workers",
    "detach_kept_tensors": "graphs_kept",
    "validate_with_less_memory": "validation_needs_more_memory",
}
"""Warning that each remedy answers."""


def warning_for(evidence: Evidence, remedy: str) -> Note | None:
    """Return the warning that a remedy answers; None if it is against no memory."""
    code = _WARNINGS.get(remedy)
    return next((note for note in memory_warnings(evidence) if note.code == code), None)


def memory_remedies(evidence: Evidence) -> Iterator[Advice]:
    """Yield what helps against what `memory_warnings` notes; without a gain, since speed stays."""
    present = evidence.measurement.samples_per_s
    watched = evidence.watched
    if watched is None:
        return
    copying = copying_of(watched.memory)
    for note in memory_warnings(evidence):
        if note.code == "memory_copied_by_workers" and copying is not None:
            further_bytes, _ = _further_bytes(evidence, copying)
            words = remedies.store_index_compactly(
                further_bytes=further_bytes,
                workers=copying.workers,
                fewer_workers=_workers_that_fit(evidence, copying),
            )
            is_large = copying.workers * copying.copied_bytes >= _LARGE_COPIES_BYTES
            is_fault = is_large or bool(note.figures["is_beyond_limit"])
            yield advise(words, present, None, is_fault=is_fault)
    kept = kept_graphs_of(watched.memory)
    if kept is not None:
        words = remedies.detach_kept_tensors(
            variable=watched.memory.kept_graph, nodes_per_step=kept.nodes_per_step
        )
        yield advise(words, present, None, is_fault=True)
    peaks = _larger_validation(watched.memory)
    if peaks is not None:
        training_bytes, validation_bytes = peaks
        words = remedies.validate_with_less_memory(
            training_bytes=training_bytes, validation_bytes=validation_bytes
        )
        yield advise(words, present, None, is_fault=True)


# Pages that workers copy


def _copied(evidence: Evidence, use: MemoryUse) -> Iterator[Note]:
    copying = copying_of(use)
    if copying is None:
        return
    further_bytes, by = _further_bytes(evidence, copying)
    if copying.workers * copying.copied_bytes + further_bytes < _LEAST_COPIED_BYTES:
        return
    left_bytes = _left_ram_bytes(evidence, use)
    per_s = copying.bytes_per_sample * evidence.measurement.samples_per_s
    is_beyond = further_bytes > left_bytes
    yield messages.memory_copied_by_workers(
        workers=copying.workers,
        bytes_per_sample=round(copying.bytes_per_sample),
        copied_bytes=round(copying.copied_bytes),
        further_bytes=round(further_bytes),
        left_bytes=None if left_bytes == inf else round(left_bytes),
        by=by,
        is_beyond_limit=is_beyond,
        full_after_s=left_bytes / per_s if is_beyond and per_s > 0 else None,
    )


def _further_bytes(evidence: Evidence, copying: Copying) -> tuple[float, Literal["epoch", "end"]]:
    """Return what the workers of all ranks on a host still copy, and by when.

    Workers that end with the epoch give their copies back. Those that stay go on copying in the
    next ones.
    """
    ranks = rules.ranks_on_host(evidence.config.process_count, evidence.environment)
    samples = evidence.measurement.window.epoch_samples or evidence.facts.dataset_length
    if evidence.config.persistent_workers or samples is None:
        return ranks * copying.further_bytes(inf), "end"
    left = samples / evidence.config.process_count - copying.samples
    return ranks * copying.further_bytes(left), "epoch"


def _left_ram_bytes(evidence: Evidence, use: MemoryUse) -> float:
    """Return the RAM that is left for growth, from the last reading; infinite if unknown."""
    last = use.readings[-1]
    held = (last.process_bytes or 0) + sum(last.worker_private_bytes)
    ranks = rules.ranks_on_host(evidence.config.process_count, evidence.environment)
    free = evidence.environment.ram_bytes
    if evidence.free_ram_bytes is not None:
        free = min(free, evidence.free_ram_bytes)
    if evidence.environment.has_only_ram:
        free = min(free, evidence.limit_bytes)
    return max(0.0, float(free - ranks * held))


def _workers_that_fit(evidence: Evidence, copying: Copying) -> int:
    """Return the workers, at least one, whose copies fit into the RAM that is left."""
    assert evidence.watched is not None  # noqa: S101 - a copying was observed
    further_bytes, _ = _further_bytes(evidence, copying)
    left_bytes = _left_ram_bytes(evidence, evidence.watched.memory)
    if further_bytes <= left_bytes:
        return copying.workers
    return max(1, int(copying.workers * left_bytes / further_bytes))


# Graphs that are kept


def _kept(evidence: Evidence, use: MemoryUse) -> Iterator[Note]:
    kept = kept_graphs_of(use)
    if kept is None:
        return
    full_after_s = None
    if kept.bytes_per_step > 0:
        left_bytes = _left_ram_bytes(evidence, use)
        if kept.is_on_device:
            left_bytes = max(0, evidence.limit_bytes - evidence.measurement.peak_memory_bytes)
        step_s = evidence.config.global_batch_size / evidence.measurement.samples_per_s
        full_after_s = left_bytes / kept.bytes_per_step * step_s
    is_soon = full_after_s is not None and full_after_s <= POLICY.memory.no_leak_for_s
    yield messages.graphs_kept(
        variable=use.kept_graph,
        place=use.kept_graph_place,
        nodes_per_step=kept.nodes_per_step,
        bytes_per_step=round(kept.bytes_per_step),
        is_on_device=kept.is_on_device,
        is_beyond_limit=is_soon,
        full_after_s=full_after_s if is_soon else None,
    )


# Validation


def _validation(evidence: Evidence, use: MemoryUse) -> Iterator[Note]:
    peaks = _larger_validation(use)
    if peaks is None:
        return
    training_bytes, validation_bytes = peaks
    is_on_device = not evidence.environment.has_only_ram
    more_bytes = validation_bytes - training_bytes
    yield messages.validation_takes_more_memory(
        training_bytes=training_bytes,
        validation_bytes=validation_bytes,
        is_on_device=is_on_device,
        is_beyond_limit=evidence.measurement.peak_memory_bytes + more_bytes > evidence.limit_bytes,
    )


def _larger_validation(use: MemoryUse) -> tuple[int, int] | None:
    """Return the peaks of training and of validation; None if validation's is not clearly larger."""
    training_bytes = use.training_peak_bytes
    validation_bytes = use.validation_peak_bytes
    if training_bytes is None or validation_bytes is None:
        return None
    if validation_bytes < _MORE_IN_VALIDATION * training_bytes:
        return None
    return training_bytes, validation_bytes
