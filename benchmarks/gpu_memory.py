"""Parts of benchmarks/gpu.py on memory: the limit, out of memory, the line over batches, the cap, the largest samples.

Peaks are compared like with like: where NVML looks on from outside, trials measure their window alone, so that nothing
that follows a window lies between a launch and its return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gpu_check_cases
from cases import Case
from gpu_scale import Task, case_of, one_server
from gpu_watch import GpuWatch
from part_guard import Figures
from product_run import TRIAL_DEADLINE_S, LaunchTimes, TimedLauncher, only, open_runner, search, search_figures
from recording import say

from autotune import SearchResult, TrainingConfig
from autotune.core.memory_line import MemoryKind, MemoryLine, MemoryPoint, fit_memory
from autotune.core.trial import TrialResult
from autotune.launch.runner import TrialRunner
from autotune.protocol import WindowRules

__all__ = ["fit_line", "run_under_limit", "stress_winner", "survive_out_of_memory"]

_SLACK = 0.01  # of a limit: NVML counts pages, torch its segments
_AGREE_WITHIN = 0.03  # of the limit
_PREDICTED_SHARES = (0.7, 0.9)  # of the limit, by the line
_AT_CAP_SHARE = 0.99
_WINDOW = WindowRules(max_s=0.5)
_TRIAL_S = 6.0  # of the line's trials with their start


def run_under_limit(task: Task) -> Figures:
    """Trials of growing batches under a limit: what fits is under it by torch's own peak and by NVML's from outside."""
    scale, case = task.scale, case_of("gpt2", task.scale)
    trials: list[Figures] = []
    with one_server() as inner, GpuWatch() as watch:
        launcher = TimedLauncher(inner)
        with open_runner(case, device=scale.device, memory_limit=scale.memory_limit, launcher=launcher) as (runner, _):
            limit = runner.limit_bytes
            assert limit is not None
            for batch in scale.limited_batches:
                result = _run(runner, case, batch)
                trials.append(_memory_of(batch, result, launcher.launches[-1], watch))
                task.keep({"limit_bytes": limit, "trials": trials})
    fitting = [one for one in trials if one["outcome"] == "ok"]
    peaks = [one[name] for one in fitting for name in ("peak_bytes", "reserved_bytes", "nvml_peak_bytes")]
    known = [peak for peak in peaks if peak is not None]
    apart = [abs(one["peak_bytes"] - one["nvml_peak_bytes"]) for one in fitting if one["nvml_peak_bytes"] is not None]
    outcomes = {one["outcome"] for one in trials}
    return {
        "nvml": watch.why_blind or "seen",
        "promises": {
            "feasible_are_under_limit": bool(known) and max(known) <= limit * (1 + _SLACK),
            "limit_was_reached": "oom" in outcomes,
            "other_outcomes_are_for_memory": outcomes <= {"ok", "oom"},
            "torch_and_nvml_agree": max(apart) <= _AGREE_WITHIN * limit if apart else None,
        },
    }


def survive_out_of_memory(task: Task) -> Figures:
    """A search whose choices hold an absurd batch: it ends in "oom", what comes after it is well."""
    scale, case = task.scale, case_of("gpt2", task.scale)
    space = only(case.settings, micro_batch_size=list(scale.absurd_batches))
    with one_server() as inner, GpuWatch() as watch:
        launcher = TimedLauncher(inner)
        result = search(
            case,
            space=space,
            memory_limit=1.0,
            n_trials=len(scale.absurd_batches),
            timeout_s=task.seconds,
            method="grid",
            device=scale.device,
            launcher=launcher,
        )
    outcomes = [record.outcome for record in result.trials]
    first = outcomes.index("oom") if "oom" in outcomes else None
    chosen = result.summary.recommendation
    again = [run is not None for one in (chosen.confirmations if chosen else ()) for run in one.rounds]
    after = 0 if first is None else outcomes[first:].count("ok")
    return {
        "outcomes": [[record.config.micro_batch_size, record.outcome] for record in result.trials],
        "ok_trials_after_it": after,
        "ok_confirmations": sum(again),
        "failed_confirmations": len(again) - sum(again),
        "left_in_use_bytes": _left_in_use(watch, launcher.launches),
        "promises": {
            "was_out_of_memory": first is not None,
            "search_went_on": first is not None and after + sum(again) > 0,
        },
        "search": search_figures(result),
    }


def fit_line(task: Task) -> Figures:
    """A line through small batches, larger ones that it predicts, and one that all but fills the cap."""
    scale, case = task.scale, case_of("gpt2", task.scale)
    with open_runner(case, device=scale.device, memory_limit=scale.line_limit) as (runner, _):
        limit = runner.limit_bytes
        assert limit is not None
        fitted = [(batch, peak) for batch in scale.fitted_batches if (peak := _peak(_run(runner, case, batch)))]
        line = _line_through(fitted, limit)
        figures: Figures = {"limit_bytes": limit, "fitted": fitted}
        if line is None or line.bytes_per_sample <= 0:
            return {**figures, "skipped": f"no line through {fitted}"}
        figures |= {"line": line.model_dump(mode="json"), "predictions": [], "at_cap": None}
        for share in _PREDICTED_SHARES:
            batch = _batch_at(line, share * limit)
            if batch > max(one for one, _ in fitted) and (task.left_s > _TRIAL_S or not figures["predictions"]):
                figures["predictions"].append(_prediction(line, batch, _peak(_run(runner, case, batch))))
                task.keep(figures)
        if task.left_s > _TRIAL_S:
            figures["at_cap"] = _at_cap(_batch_at(line, _AT_CAP_SHARE * limit), runner, case)
    told = figures["at_cap"]
    return {**figures, "promises": {"retries_at_the_cap_are_counted": None if told is None else told["is_told"]}}


def stress_winner(task: Task) -> Figures:
    """A search on samples of varying length: the winner's peak on the largest ones, against the limit and its trial."""
    case = gpu_check_cases.ragged()
    result = search(
        case,
        space=only(case.settings, micro_batch_size=[8, 16, 32]),
        n_trials=3,
        timeout_s=task.seconds,
        device=task.scale.device,
        memory_limit=task.scale.memory_limit,
    )
    return _stress_figures(result)


def _run(runner: TrialRunner, case: Case, batch: int) -> TrialResult:
    """A trial of a batch that measures its window alone."""
    config = TrainingConfig.model_validate({**case.settings, "micro_batch_size": batch})
    result = runner.run(config, name=f"batch-{batch}", deadline_s=TRIAL_DEADLINE_S, window=_WINDOW)
    say(f"batch {batch}: {result.outcome}")
    return result


def _peak(result: TrialResult) -> int | None:
    return None if result.measurement is None else result.measurement.peak_memory_bytes


def _memory_of(batch: int, result: TrialResult, launch: LaunchTimes, watch: GpuWatch) -> Figures:
    """A trial's peaks; NVML's is from the launch to the report, which is written right after the window."""
    memory = None if result.measurement is None else result.measurement.memory
    reported_s = launch.returned_s - (launch.after_report_s or 0.0)
    return {
        "micro_batch_size": batch,
        "outcome": result.outcome,
        "reason": result.reason,
        "peak_bytes": None if memory is None else memory.peak_bytes,
        "nvml_peak_bytes": watch.peak_bytes(launch.called_s, reported_s),
        "reserved_bytes": None if memory is None else memory.reserved_bytes,
        "memory": None if memory is None else memory.model_dump(mode="json"),
    }


def _left_in_use(watch: GpuWatch, launches: Sequence[LaunchTimes]) -> int | None:
    """Device memory that was still in use after the last trial had ended, beyond what was before the first."""
    after = [one.used_bytes for one in watch.samples if launches and one.at_s > launches[-1].returned_s]
    return min(after) - watch.idle_bytes if after and watch.idle_bytes is not None else None


def _line_through(fitted: Sequence[tuple[int, int]], limit: int) -> MemoryLine | None:
    """Through those that take up to half of the limit."""
    below = [(batch, peak) for batch, peak in fitted if peak <= limit / 2]
    return fit_memory(MemoryKind(amp_dtype="float32"), [MemoryPoint(*one) for one in below])


def _batch_at(line: MemoryLine, peak_bytes: float) -> int:
    return int((peak_bytes - line.intercept_bytes) / line.bytes_per_sample)


def _prediction(line: MemoryLine, batch: int, seen: int | None) -> Figures:
    predicted = line.predict_bytes(batch)
    return {
        "micro_batch_size": batch,
        "predicted_bytes": predicted,
        "error_bytes": line.error_at(batch),
        "seen_bytes": seen,
        "relative_error": None if seen is None else predicted / seen - 1,
    }


def _at_cap(batch: int, runner: TrialRunner, case: Case) -> Figures:
    """What a trial tells that has next to no room: it is out of memory, or says how often its allocator asked again."""
    result = _run(runner, case, batch)
    memory = None if result.measurement is None else result.measurement.memory
    return {
        "micro_batch_size": batch,
        "outcome": result.outcome,
        "reason": result.reason,
        "memory": None if memory is None else memory.model_dump(mode="json"),
        "is_told": result.outcome == "oom" if memory is None else memory.alloc_retries is not None,
    }


def _stress_figures(result: SearchResult) -> Figures:
    chosen, limit = result.summary.recommendation, result.summary.limit_bytes
    told = None if chosen is None else chosen.stress
    trial = next((one for one in result.trials if chosen is not None and one.number == chosen.number), None)
    seen: Any = None if trial is None or trial.measurement is None else trial.measurement.peak_memory_bytes
    return {
        "stress": None if told is None else told.model_dump(mode="json"),
        "limit_bytes": limit,
        "trial_peak_bytes": seen,
        "verdict": None if chosen is None else chosen.verdict,
        "notes": list(result.summary.notes),
        "promises": {"stress_is_under_limit": None if told is None else told.memory.peak_bytes <= limit},
        "search": search_figures(result),
    }
