"""Parts of benchmarks/gpu.py that look at what a trial measures beside its rate.

The precision guard, the memory line and the stress run are each held against what happens; a diagnosis is made;
`sides_of` lays the busy sources, the breakdowns and the ceilings of a search's baseline and winner side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

import gpu_check_cases
from cases import Case
from product_run import RunTrial, only, open_trials, search, search_figures

import autotune
from autotune import Measurement, SearchResult
from autotune.core.busy import PROFILER_SOURCE, disagreement
from autotune.core.ceilings import standing_of
from autotune.core.memory_line import MemoryKind, MemoryLine, MemoryPoint, fit_memory
from autotune.protocol import NO_EXTRAS, WindowRules

__all__ = ["PROMISES", "check_diagnosis", "check_guard", "check_memory_line", "check_stress", "sides_of"]

PROMISES = ("healthy_model_passed", "broken_float16_diverged", "stress_is_under_limit", "profiler_was_read")
"""Figures that are false where a promise was not kept; the memory line is told by its errors, without a promise."""
_PRECISIONS = ("float32", "bfloat16", "float16")
_PREDICTED_SHARES = (0.7, 0.9)  # of the limit, by the line
_LINE_WINDOW = WindowRules(max_s=0.5)
_TRIAL_S = 15.0  # of a line's trial, at most as long as this is expected


def sides_of(result: SearchResult) -> dict[str, Any]:
    """Baseline and recommendation: every busy source, fullness, where the time goes, and the ceilings."""
    chosen = result.summary.recommendation
    numbers = {"baseline": 0, "recommended": None if chosen is None else chosen.number}
    return {name: _side(_best_seen(result, number)) for name, number in numbers.items() if number is not None}


def _best_seen(result: SearchResult, number: int) -> Measurement | None:
    """A trial's own measurement, or the first of its confirmations that says where the time goes."""
    chosen = result.summary.recommendation
    own = next((one.measurement for one in result.trials if one.number == number), None)
    again = [run for one in (chosen.confirmations if chosen else ()) if one.number == number for run in one.runs]
    return next((run for run in (own, *again) if run is not None and run.breakdown is not None), own)


def _side(measurement: Measurement | None) -> dict[str, Any]:
    if measurement is None:
        return {}
    loader, device = measurement.loader_ceiling, measurement.device_ceiling
    standing = None
    if loader is not None and device is not None:
        standing = standing_of(measurement.samples_per_s, loader_ceiling=loader, device_ceiling=device)
    parts = {} if measurement.breakdown is None else measurement.breakdown.shares()
    rivals = disagreement(measurement.busy_readings)
    return {
        "samples_per_s": measurement.samples_per_s,
        "busy": {one.source: one.fraction for one in measurement.busy_readings},
        "one_minus_data_wait": 1 - measurement.data_wait_fraction,
        "disagreement": None if rivals is None else rivals[1].fraction - rivals[0].fraction,
        "fullness": None if measurement.fullness is None else measurement.fullness.model_dump(mode="json"),
        "breakdown": {name: share.fraction for name, share in parts.items()},
        "standing": None if standing is None else standing.model_dump(mode="json"),
        "remarks": list(measurement.remarks),
    }


def check_diagnosis(case: Case, device: str, _seconds: float) -> dict[str, Any]:
    """What a diagnosis says of a case's own settings, and whether the kernels' times were read for it."""
    found = autotune.diagnose(
        case.model,
        case.dataset,
        step=case.step,
        optimizer=case.optimizer,
        collate_fn=case.collate_fn,
        loader={"shuffle": case.shuffle},
        baseline=case.settings,
        device=device,
        progress=False,
    )
    readings = found.diagnosis.evidence.measurement.busy_readings
    return {
        "headline": found.headline,
        "verdict": found.verdict,
        "is_healthy": found.is_healthy,
        "profiler_was_read": PROFILER_SOURCE in {one.source for one in readings},
        "diagnosis": found.diagnosis.model_dump(mode="json"),
    }


def check_guard(device: str, seconds: float) -> dict[str, Any]:
    """A healthy model passes in every precision that it is tried in; one that overflows in float16 is refused it."""
    healthy = _over_precisions(gpu_check_cases.healthy(), device, seconds / 2)
    broken = _over_precisions(gpu_check_cases.breaks_in_float16(), device, seconds / 2)
    cheaper = [trial for trial in healthy["trials"] if trial["precision"] != "float32"]
    float16 = [trial["outcome"] for trial in broken["trials"] if trial["precision"] == "float16"]
    return {
        "healthy_model_passed": all(trial["outcome"] == "ok" for trial in cheaper) if cheaper else None,
        "broken_float16_diverged": all(outcome == "diverged" for outcome in float16) if float16 else None,
        "healthy": healthy,
        "broken": broken,
    }


def _over_precisions(case: Case, device: str, seconds: float) -> dict[str, Any]:
    space = only(case.settings, amp_dtype=list(_PRECISIONS))
    result = search(case, space=space, n_trials=len(_PRECISIONS), timeout_s=seconds, device=device, method="grid")
    return {
        "trials": [
            {
                "precision": one.config.amp_dtype,
                "outcome": one.outcome,
                "reason": one.reason,
                "gradient_cosine": None if one.result.guard is None else one.result.guard.gradient_cosine,
                "loss_deviation": None if one.result.guard is None else one.result.guard.loss_deviation,
            }
            for one in result.trials
        ],
        "search": search_figures(result),
    }


def check_memory_line(
    case: Case, device: str, seconds: float, *, batches: Sequence[int], limit_bytes: int
) -> dict[str, Any]:
    """Fit a line through trials of some batches, predict larger ones, and run these; relative errors of the line."""
    ends_at = monotonic() + seconds
    with open_trials(case, device=device, window=_LINE_WINDOW, extras=NO_EXTRAS) as run_trial:
        fitted = [(batch, peak) for batch in batches if (peak := _peak_bytes(run_trial, case, batch)) is not None]
        below = [(batch, peak) for batch, peak in fitted if peak <= limit_bytes / 2]
        line = fit_memory(MemoryKind(amp_dtype="float32"), [MemoryPoint(*one) for one in below])
        if line is None or line.bytes_per_sample <= 0:
            return {"fitted": fitted, "predictions": [], "skipped": f"no line through {below}"}
        predictions: list[dict[str, Any]] = []
        for share in _PREDICTED_SHARES:
            if monotonic() + _TRIAL_S > ends_at and predictions:
                break
            batch = int((share * limit_bytes - line.intercept_bytes) / line.bytes_per_sample)
            if batch > max(one for one, _ in below):
                predictions.append(_prediction(line, batch, _peak_bytes(run_trial, case, batch)))
    return {
        "limit_bytes": limit_bytes,
        "fitted": fitted,
        "line": line.model_dump(mode="json"),
        "predictions": predictions,
    }


def _peak_bytes(run_trial: RunTrial, case: Case, batch: int) -> int | None:
    result = run_trial({**case.settings, "micro_batch_size": batch})
    return None if result.measurement is None else result.measurement.peak_memory_bytes


def _prediction(line: MemoryLine, batch: int, seen: int | None) -> dict[str, Any]:
    predicted = line.predict_bytes(batch)
    return {
        "micro_batch_size": batch,
        "predicted_bytes": predicted,
        "error_bytes": line.error_at(batch),
        "seen_bytes": seen,
        "relative_error": None if seen is None else predicted / seen - 1,
    }


def check_stress(device: str, memory_limit: str, seconds: float) -> dict[str, Any]:
    """A search on samples of varying length: the winner's peak on the largest ones, against the limit and its trial."""
    case = gpu_check_cases.ragged()
    space = only(case.settings, micro_batch_size=[8, 16, 32])
    result = search(case, space=space, n_trials=3, timeout_s=seconds, device=device, memory_limit=memory_limit)
    chosen = result.summary.recommendation
    figures = None if chosen is None else chosen.stress
    limit = result.summary.limit_bytes
    trial = next((one for one in result.trials if chosen is not None and one.number == chosen.number), None)
    seen = None if trial is None or trial.measurement is None else trial.measurement.peak_memory_bytes
    return {
        "stress": None if figures is None else figures.model_dump(mode="json"),
        "stress_is_under_limit": None if figures is None else figures.memory.peak_bytes <= limit,
        "limit_bytes": limit,
        "trial_peak_bytes": seen,
        "verdict": None if chosen is None else chosen.verdict,
        "notes": list(result.summary.notes),
        "search": search_figures(result),
    }
