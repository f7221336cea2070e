"""Parts of benchmarks/gpu.py on what a search says beside rates: the precision guard, and a diagnosis."""

from __future__ import annotations

import gpu_check_cases
from cases import Case
from gpu_scale import Task, case_of
from part_guard import Figures
from product_run import only, search, search_figures

import autotune
from autotune.core.busy import PROFILER_SOURCE

__all__ = ["check_diagnosis", "check_guard"]

_PRECISIONS = ("float32", "bfloat16", "float16")


def check_diagnosis(task: Task) -> Figures:
    """What a diagnosis says of the JPEG workload's own settings, and whether the kernels' times were read for it."""
    try:
        case = case_of("jpeg", task.scale)
    except ImportError as error:
        return {"skipped": f"Pillow is not installed ({error})"}
    found = autotune.diagnose(
        case.model,
        case.dataset,
        step=case.step,
        optimizer=case.optimizer,
        collate_fn=case.collate_fn,
        loader={"shuffle": case.shuffle},
        baseline=case.settings,
        device=task.scale.device,
        progress=False,
    )
    readings = found.diagnosis.evidence.measurement.busy_readings
    return {
        "headline": found.headline,
        "verdict": found.verdict,
        "is_healthy": found.is_healthy,
        "promises": {
            "profiler_was_read": PROFILER_SOURCE in {one.source for one in readings},
            "loader_is_named": found.verdict in {"data_cpu", "data_io", "data_tail"},
        },
        "diagnosis": found.diagnosis.model_dump(mode="json"),
    }


def check_guard(task: Task) -> Figures:
    """A healthy model passes in every precision that it is tried in; one that overflows in float16 is refused it."""
    device, seconds = task.scale.device, task.seconds / 2
    healthy = _over_precisions(gpu_check_cases.healthy(), device, seconds)
    task.keep({"healthy": healthy})
    broken = _over_precisions(gpu_check_cases.breaks_in_float16(), device, seconds)
    cheaper = [trial for trial in healthy["trials"] if trial["precision"] != "float32"]
    float16 = [trial["outcome"] for trial in broken["trials"] if trial["precision"] == "float16"]
    return {
        "healthy": healthy,
        "broken": broken,
        "promises": {
            "healthy_model_passed": all(trial["outcome"] == "ok" for trial in cheaper) if cheaper else None,
            "broken_float16_diverged": all(outcome == "diverged" for outcome in float16) if float16 else None,
        },
    }


def _over_precisions(case: Case, device: str, seconds: float) -> Figures:
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
