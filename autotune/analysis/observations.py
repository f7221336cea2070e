"""What a search's looks and trials tell a model of the machine: rates and peaks of memory, each with how sure it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.analysis.early_stopping import seen_rate
from autotune.analysis.rate_model import Observation
from autotune.records.ceilings import Ceiling
from autotune.records.diagnosis import CurvePoint, Curves
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import TrainingConfig
from autotune.space.constraints import normalised
from autotune.space.resolved_space import ResolvedSpace

__all__ = ["Look", "changed", "looks_of", "peaks_seen", "rate_seen", "sightings_of"]

_LOOK_SD = {"cpu": 0.08}
"""How far a side alone differs from what it does in a run, relatively: by chance, and since cores are shared."""
_OTHER_LOOK_SD = 0.02
_LEAST_RUN_SD = 0.01
_STOPPED_SD = 0.05  # a trial that was stopped early: its restarts and its queue were not seen through
_NORMAL_95 = 1.96
_UNKNOWN_EXCESS = 0.25  # of an out-of-memory that does not tell how much was missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A point of a curve, with the configuration that it stands for."""

    side: Literal["loader", "device"]
    config: TrainingConfig
    point: CurvePoint


def changed(space: ResolvedSpace, changes: dict[str, object]) -> TrainingConfig:
    """The baseline on one device with other values of some settings, as a curve's point has it."""
    alone = {"strategy": "single", "world_size": 1, "ddp": None}
    settings = {**space.baseline.model_dump(), **alone, **changes}
    return TrainingConfig.model_validate(normalised(settings, space.facts, space.environment))


def looks_of(curves: Curves, space: ResolvedSpace) -> list[Look]:
    """The points of both curves, those that were not reached among them."""
    loader = [Look(side="loader", config=changed(space, one.changes), point=one) for one in curves.loader]
    return loader + [Look(side="device", config=changed(space, one.changes), point=one) for one in curves.device]


def sightings_of(looks: Sequence[Look], records: Sequence[TrialRecord], device_kind: str) -> Iterator[Observation]:
    """Every look at one side, and every trial that measured something.

    A trial that looked at its own sides too, as the baseline does, is another process: it tells how far they differ.
    """
    look_sd = _LOOK_SD.get(device_kind, _OTHER_LOOK_SD)
    for look in looks:
        if look.point.ceiling is not None:
            yield Observation(
                kind=look.side,
                config=look.config,
                samples_per_s=look.point.ceiling.samples_per_s,
                relative_sd=look_sd,
                cpu_s_per_sample=look.point.cpu_s_per_sample,
            )
    for record in records:
        run = _run_of(record)
        if run is not None:
            yield run
        yield from _own_sides(record, look_sd)


def peaks_seen(
    looks: Sequence[Look], records: Sequence[TrialRecord], limit_bytes: int, *, limit_is_ram: bool
) -> list[tuple[TrainingConfig, int]]:
    """Peak memory of each look and trial, in bytes; of what ran out of it, by how much it passed the limit.

    A look at the device has no workers. Of a trial that ran out of something else than what the limit is on (RAM beside
    a GPU, shared memory, open files), nothing is known. A trial that thrashed has shown what it was allowed, and counts
    as one that ran out of memory.
    """
    found = [
        (_without_workers(one.config), one.point.peak_memory_bytes)
        for one in looks
        if one.point.peak_memory_bytes is not None
    ]
    for record in records:
        if record.measurement is not None and record.measurement.memory.is_thrashing:
            found.append((record.config, int(limit_bytes * (1 + _UNKNOWN_EXCESS))))
        elif record.measurement is not None:
            found.append((record.config, record.measurement.peak_memory_bytes))
        elif record.outcome == "oom" or (
            record.outcome == "host_oom" and limit_is_ram and record.result.violation is not None
        ):
            excess = _UNKNOWN_EXCESS if record.result.violation is None else record.result.violation
            found.append((record.config, int(limit_bytes * (1 + excess))))
    return found


def rate_seen(record: TrialRecord) -> float | None:
    """The rate that a trial has shown, stopped early or not, in samples per second; None where it has shown none."""
    run = _run_of(record)
    return None if run is None else run.samples_per_s


def _own_sides(record: TrialRecord, relative_sd: float) -> Iterator[Observation]:
    own = None if record.measurement is None else record.measurement.ceilings
    sides: dict[Literal["loader", "device"], Ceiling | None] = (
        {} if own is None else {"loader": own.loader, "device": own.device}
    )
    for side, ceiling in sides.items():
        if ceiling is not None:
            rate = ceiling.samples_per_s
            yield Observation(kind=side, config=record.config, samples_per_s=rate, relative_sd=relative_sd)


def _without_workers(config: TrainingConfig) -> TrainingConfig:
    return config.model_copy(update={"num_workers": 0, "prefetch_factor": None, "persistent_workers": False})


def _run_of(record: TrialRecord) -> Observation | None:
    """What a trial has seen; of one that was stopped early, less sure."""
    if record.measurement is not None:
        rate, low = record.measurement.samples_per_s, record.measurement.samples_per_s_ci[0]
        sd = max(_LEAST_RUN_SD, (rate - low) / rate / _NORMAL_95)
        return Observation(kind="run", config=record.config, samples_per_s=rate, relative_sd=sd)
    if record.result.blocks:
        seen = seen_rate(record.result.blocks)
        sd = _STOPPED_SD + seen.half_width / seen.samples_per_s / _NORMAL_95
        return Observation(kind="run", config=record.config, samples_per_s=seen.samples_per_s, relative_sd=sd)
    return None
