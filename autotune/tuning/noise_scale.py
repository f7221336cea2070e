"""The gradient noise scale of the user's own training, once, before the search that ranks batches by it.

Comes in: a Plan and its Search, before the first trial. Goes out: the noise scale; the study's space has it where
it may rank.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from autotune.analysis.noise_scale import noise_scale_of
from autotune.errors import WorkloadError
from autotune.launch.runner import TrialRunner
from autotune.note import Note, note
from autotune.records.noise_scale import KeptNoiseScale, NoiseScale
from autotune.records.run_summary import Progress
from autotune.records.study_identity import describe_part
from autotune.settings.plan import Plan
from autotune.settings.training_config import TrainingConfig
from autotune.space.efficiency import NoiseBounds
from autotune.space.resolved_space import ResolvedSpace
from autotune.tuning.loop import Search
from autotune.tuning.time_budget import BASELINE_DEADLINE_S, TimeBudget

__all__ = ["rank_batches"]

_SECONDS, _TIME_SHARE = 20.0, 0.05
"""Of gradients, and the most of a time-out that they may take: our own convention."""


def rank_batches(plan: Plan, search: Search) -> NoiseScale | None:
    """The gradient noise scale where the objective wants it, by which the search ranks batches from then on.

    What an earlier call has measured at a checkpoint is kept: trials were scored by it.

    Raises:
        WorkloadError: the checkpoint can't be used.
    """
    checkpoint, study, clock = plan.workload.checkpoint, search.study, search.time.clock
    if plan.objective.global_batch != "goodput":
        search.notes += [] if checkpoint is None else [note("checkpoint_unused")]
        return None
    known, stamp = study.noise_scale, _stamp_of(checkpoint)
    if known is None and not study.records:
        search.show(Progress(phase="probe", elapsed_s=clock.elapsed_s, remaining_s=clock.left_s))
        measured = _measured(search.runner, study.space, search.time)
        if isinstance(measured, Note):
            search.notes.append(measured)
            return None
        known = KeptNoiseScale(noise_scale=measured, checkpoint=stamp)
        study.keep_noise_scale(known)
    if known is None or (checkpoint is not None and not known.noise_scale.has_checkpoint):
        search.notes.append(note("noise_scale_too_late"))
    elif known.checkpoint != stamp:
        search.notes.append(note("noise_scale_of_before"))
    if known is None:
        return None
    search.notes.append(_note_of(known.noise_scale))
    study.space = _ranked_by(known.noise_scale, study.space)
    return known.noise_scale


def _measured(runner: TrialRunner, space: ResolvedSpace, time: TimeBudget) -> NoiseScale | Note:
    """Measure it at the baseline's micro batch and precision; where that failed, a note of why.

    Raises:
        WorkloadError: the checkpoint can't be used.
    """
    left_s = time.clock.left_s
    seconds = min(_SECONDS, _TIME_SHARE * (time.budget.timeout_s or inf))
    deadline_s = min(BASELINE_DEADLINE_S, inf if left_s is None else left_s)
    report = runner.gradients(_as_measured(space.baseline), deadline_s=deadline_s, seconds=seconds)
    if report.is_workload_fault:
        raise WorkloadError(report.result.reason)
    if report.gradients is None:
        reason = report.result.reason or report.result.outcome
        return note("noise_scale_not_measured", reason=reason, log=report.result.log)
    found = noise_scale_of(report.gradients)
    return found or note("noise_scale_unknown", groups=len(report.gradients.groups), log=report.result.log)


def _note_of(noise_scale: NoiseScale) -> Note:
    """What was measured."""
    figures = {"value": noise_scale.value if noise_scale.is_bounded else None, "low": noise_scale.low}
    figures |= {"high": noise_scale.high if noise_scale.is_bounded else None, "samples": noise_scale.samples}
    return note("noise_scale", has_checkpoint=noise_scale.has_checkpoint, **figures)


def _ranked_by(noise_scale: NoiseScale, space: ResolvedSpace) -> ResolvedSpace:
    """The space in which batches are ranked by it; as it was where it was not measured at a checkpoint."""
    if not noise_scale.has_checkpoint:
        return space
    bounds = NoiseBounds(value=noise_scale.value, low=noise_scale.low, high=noise_scale.high)
    return replace(space, noise_scale=bounds)


def _stamp_of(checkpoint: Any) -> str:
    """What tells a checkpoint from another: a file's path, size and time; else what tells a function or weights."""
    if not isinstance(checkpoint, str):
        return describe_part(checkpoint)
    try:
        found = Path(checkpoint).stat()
    except OSError:  # measuring it says so
        return checkpoint
    return f"{checkpoint}, {found.st_size} bytes, {found.st_mtime_ns} ns"


def _as_measured(baseline: TrainingConfig) -> TrainingConfig:
    """Without what changes no gradient, and without a GradScaler: small gradients would be lost in float16."""
    dtype = "float32" if baseline.amp_dtype == "float16" else baseline.amp_dtype
    return baseline.model_copy(update={"amp_dtype": dtype, "compile": False, "compile_mode": "default"})
