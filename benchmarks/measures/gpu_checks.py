"""Parts of benchmarks/gpu.py on what a search says beside rates: the precision guard, and a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.api.diagnose import MeasuringTime, diagnose_plan
from autotune.config.training_config import AMP_DTYPES
from autotune.launch.launcher import Launcher
from autotune.records.measurement import PROFILER_SOURCE
from benchmarks.cases import gpu_checks as gpu_check_cases
from benchmarks.cases.cpu import Case
from benchmarks.measures.gpu_scale import Task, case_of, one_server
from benchmarks.measures.part_guard import Figures
from benchmarks.yardsticks.product_run import only, open_runner, plan_for, search, search_figures

__all__ = ["check_diagnosis", "check_guard"]

_SHORTEST_S = 5.0
_CUT_OFF = frozenset({"timeout", "pruned"})  # how a trial ends that tells nothing of its precision
_PACE = MeasuringTime(
    window_s=2.0, stretch_s=0.3
)  # of some twenty ceilings: with a second each they take most of a minute


def check_diagnosis(task: Task) -> Figures:
    """What a diagnosis says of the JPEG workload's own settings, and whether the kernels' times were read for it."""
    try:
        case = case_of("jpeg", task.scale)
    except ImportError as error:
        return {"skipped": f"Pillow is not installed ({error})"}
    with one_server() as launcher:
        found = diagnose_plan(
            plan_for(case, task.scale.device), progress=False, launcher=launcher, measuring=_PACE
        )
    readings = found.diagnosis.evidence.measurement.busy_readings
    task.keep({"headline": found.headline, "diagnosis": found.diagnosis.model_dump(mode="json")})
    return {
        "verdict": found.verdict,
        "is_healthy": found.is_healthy,
        "promises": {
            "profiler_was_read": PROFILER_SOURCE in {one.source for one in readings},
            "loader_is_named": found.verdict in {"data_cpu", "data_io", "data_tail"},
        },
    }


def check_guard(task: Task) -> Figures:
    """A healthy model passes in every precision that it is tried in; one that overflows in float16 is refused it."""
    with one_server() as launcher:
        case, device = gpu_check_cases.healthy(), task.scale.device
        with open_runner(case, device=device, launcher=launcher) as (_, space):
            native = space.environment.native_amp_dtypes
        precisions = [
            "float32",
            *(one for one in AMP_DTYPES if one in {"bfloat16", "float16", *native} - {"float32"}),
        ]
        healthy = _over_precisions(case, precisions, device, launcher, task.left_s / 2)
        task.keep({"healthy": healthy})
        broken = _over_precisions(
            gpu_check_cases.breaks_in_float16(),
            ["float32", "float16"],
            device,
            launcher,
            task.left_s,
        )
    cheaper = _outcomes(healthy, [one for one in precisions if one != "float32"])
    float16 = _outcomes(broken, ["float16"])
    promises = {
        "healthy_model_passed": _all_ended(cheaper, "ok"),
        "broken_float16_diverged": _all_ended(float16, "diverged"),
    }
    unseen = [f"{name} (healthy)" for name, outcome in cheaper.items() if outcome is None]
    unseen += [f"{name} (broken)" for name, outcome in float16.items() if outcome is None]
    return {
        "healthy": healthy,
        "broken": broken,
        "why_not_judged": f"never came to its end: {', '.join(unseen)}" if unseen else None,
        "promises": promises,
    }


def _outcomes(found: Figures, precisions: Sequence[str]) -> dict[str, str | None]:
    """How each precision's trial ended; None where there was none, or it was cut off."""
    ended = {
        one["precision"]: one["outcome"]
        for one in found["trials"]
        if one["outcome"] not in _CUT_OFF
    }
    return {name: ended.get(name) for name in precisions}


def _all_ended(outcomes: Mapping[str, str | None], wanted: str) -> bool | None:
    """Whether all ended so; one that ended otherwise decides, one that is not known leaves it open."""
    known = [outcome for outcome in outcomes.values() if outcome is not None]
    if any(outcome != wanted for outcome in known):
        return False
    return True if len(known) == len(outcomes) else None


def _over_precisions(
    case: Case, precisions: Sequence[str], device: str, launcher: Launcher, seconds: float
) -> Figures:
    result = search(
        case,
        space=only(case.settings, amp_dtype=list(precisions)),
        n_trials=len(precisions),
        timeout_s=max(seconds, _SHORTEST_S),
        device=device,
        method="grid",
        launcher=launcher,
    )
    return {
        "trials": [
            {
                "precision": one.config.amp_dtype,
                "outcome": one.outcome,
                "reason": one.reason,
                "gradient_cosine": None
                if one.result.guard is None
                else one.result.guard.gradient_cosine,
                "loss_deviation": None
                if one.result.guard is None
                else one.result.guard.loss_deviation,
            }
            for one in result.trials
        ],
        "search": search_figures(result),
    }
