"""Parts of benchmarks/gpu.py on memory: the limit, out of memory, the line over batches, the cap, the largest samples.

Peaks are compared like with like: where NVML looks on from outside, trials measure their window alone, so that nothing
that follows a window lies between a launch and its return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune import SearchResult, TrainingConfig
from autotune.launch.runner import TrialRunner
from autotune.models.memory import MemoryLine, MemoryModel, Peak
from autotune.models.statistics import memory_fault
from autotune.policy import WindowRules
from autotune.records.trial import TrialResult
from benchmarks.cases import gpu_checks as gpu_check_cases
from benchmarks.cases.cpu import Case
from benchmarks.measures.gpu_scale import TRIAL_S, Task, case_of, one_server
from benchmarks.measures.gpu_watch import GpuWatch
from benchmarks.measures.part_guard import Figures
from benchmarks.measures.recording import say
from benchmarks.yardsticks.product_run import (
    TRIAL_DEADLINE_S,
    LaunchTimes,
    TimedLauncher,
    only,
    open_runner,
    search,
    search_figures,
)

__all__ = ["fit_line", "run_under_limit", "stress_winner", "survive_out_of_memory"]

_SLACK = 0.01  # of a limit: NVML counts pages, torch its segments
_AGREE_WITHIN = 0.03  # of the limit, or of a peak: processes differ by 1.3 % on a CPU (a smoke run), unseen on a GPU
_PREDICTED_SHARES = (0.7, 0.9)  # of the limit, by the line
_AT_CAP_SHARE = 0.99
_WINDOW = WindowRules(max_s=0.5)
_SHORTEST_SEARCH_S = 5.0
_STRESSED_BATCHES = (
    2,
    16,
    64,
)  # the baseline is the least: where it wins, nothing is run on the largest samples
_AFTER_SEARCH_S = 5.0  # reports, and ending the server


def run_under_limit(task: Task) -> Figures:
    """Trials of growing batches under a limit: what fits is under it by torch's own peak and by NVML's from outside."""
    scale, case = task.scale, case_of("gpt2", task.scale)
    trials: list[Figures] = []
    with one_server() as inner, GpuWatch() as watch:
        launcher = TimedLauncher(inner)
        with open_runner(
            case, device=scale.device, memory_limit=scale.memory_limit, launcher=launcher
        ) as (runner, _):
            limit = runner.limits.limit_bytes
            assert limit is not None
            for batch in scale.limited_batches:
                if trials and task.left_s < TRIAL_S:
                    break
                result = _run(runner, case, batch)
                trials.append(_memory_of(batch, result, limit, launcher.launches[-1], watch))
                task.keep({"limit_bytes": limit, "trials": trials})
    fitting = [one for one in trials if one["outcome"] == "ok" and one["fault"] is None]
    peaks = [
        one[name] for one in fitting for name in ("peak_bytes", "reserved_bytes", "nvml_peak_bytes")
    ]
    known = [peak for peak in peaks if peak is not None]
    apart = [
        abs(one["peak_bytes"] - one["nvml_peak_bytes"])
        for one in fitting
        if one["nvml_peak_bytes"] is not None
    ]
    outcomes = {one["outcome"] for one in trials} - {"timeout"}
    was_reached = "oom" in outcomes or any(one["fault"] is not None for one in trials)
    is_whole = len(trials) == len(scale.limited_batches) and trials[-1]["outcome"] != "timeout"
    return {
        "nvml": watch.why_blind or "seen",
        "why_not_judged": None
        if was_reached or is_whole
        else f"{len(trials)} batches were tried, the largest was not",
        "promises": {
            "feasible_are_under_limit": max(known) <= limit * (1 + _SLACK) if known else None,
            "limit_was_reached": True if was_reached else False if is_whole else None,
            "other_outcomes_are_for_memory": outcomes <= {"ok", "oom"} if outcomes else None,
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
            timeout_s=max(task.left_s - _AFTER_SEARCH_S, _SHORTEST_SEARCH_S),
            method="grid",
            device=scale.device,
            launcher=launcher,
        )
    outcomes = [record.outcome for record in result.trials]
    absurd = [
        one.outcome
        for one in result.trials
        if one.config.micro_batch_size == max(scale.absurd_batches)
    ]
    was_tried = bool(absurd) and not set(absurd) <= {"timeout", "pruned", "invalid"}
    first = outcomes.index("oom") if "oom" in outcomes else None
    again = [run.outcome == "ok" for one in result.trials for run in one.repeats]
    after = 0 if first is None else outcomes[first:].count("ok")
    was_followed = first is not None and (len(outcomes) > first + 1 or bool(again))
    why = (
        "the absurd batch was not tried"
        if not was_tried
        else None
        if was_followed
        else "nothing came after it"
    )
    return {
        "outcomes": [[record.config.micro_batch_size, record.outcome] for record in result.trials],
        "ok_trials_after_it": after,
        "ok_repeats": sum(again),
        "failed_repeats": len(again) - sum(again),
        "left_in_use_bytes": _left_in_use(watch, launcher.launches),
        "why_not_judged": why,
        "promises": {
            "was_out_of_memory": "oom" in absurd if was_tried else None,
            "search_went_on": after + sum(again) > 0 if was_followed else None,
        },
        "search": search_figures(result),
    }


def fit_line(task: Task) -> Figures:
    """A line through small batches, larger ones that it predicts, and one that all but fills the cap."""
    scale, case = task.scale, case_of("gpt2", task.scale)
    with (
        one_server() as launcher,
        open_runner(
            case, device=scale.device, memory_limit=scale.line_limit, launcher=launcher
        ) as (runner, _),
    ):
        limit = runner.limits.limit_bytes
        assert limit is not None
        fitted = [
            (batch, peak)
            for batch in scale.fitted_batches
            if (peak := _peak(_run(runner, case, batch)))
        ]
        line = _line_through(case, fitted, limit)
        figures: Figures = {"limit_bytes": limit, "fitted": fitted}
        if line is None or line.bytes_per_sample <= 0:
            return {**figures, "skipped": f"no line through {fitted}"}
        told = {
            name: getattr(line, name)
            for name in ("intercept_bytes", "bytes_per_sample", "error_bytes", "batches")
        }
        figures |= {"line": told, "predictions": [], "at_cap": None}
        for share in _PREDICTED_SHARES:
            batch = _batch_at(line, share * limit)
            if batch > max(one for one, _ in fitted) and (
                task.left_s > TRIAL_S or not figures["predictions"]
            ):
                figures["predictions"].append(
                    _prediction(line, batch, _run(runner, case, batch), limit)
                )
                task.keep(figures)
        if task.left_s > TRIAL_S:
            figures["at_cap"] = _at_cap(_batch_at(line, _AT_CAP_SHARE * limit), runner, case, limit)
    told, held = (
        figures["at_cap"],
        [one["holds"] for one in figures["predictions"] if one["holds"] is not None],
    )
    promises = {
        "larger_batches_are_within_error": all(held) if held else None,
        "no_room_at_the_cap_is_told": None if told is None else told["is_told"],
    }
    return {**figures, "why_not_judged": _why_open(promises), "promises": promises}


def stress_winner(task: Task) -> Figures:
    """A search on samples of varying length: the winner's peak on the largest ones, against the limit and its trial."""
    ragged = gpu_check_cases.ragged()
    case = replace(ragged, settings={**ragged.settings, "micro_batch_size": min(_STRESSED_BATCHES)})
    with one_server() as launcher:
        result = search(
            case,
            space=only(case.settings, micro_batch_size=list(_STRESSED_BATCHES)),
            n_trials=len(_STRESSED_BATCHES),
            timeout_s=max(task.left_s - _AFTER_SEARCH_S, _SHORTEST_SEARCH_S),
            device=task.scale.device,
            memory_limit=task.scale.memory_limit,
            launcher=launcher,
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


def _memory_of(
    batch: int, result: TrialResult, limit: int, launch: LaunchTimes, watch: GpuWatch
) -> Figures:
    """A trial's peaks; NVML's is from the launch to the report, which is written right after the window."""
    memory = None if result.measurement is None else result.measurement.memory
    reported_s = launch.returned_s - (launch.after_report_s or 0.0)
    return {
        "micro_batch_size": batch,
        "outcome": result.outcome,
        "reason": result.reason,
        "fault": None if result.measurement is None else memory_fault(result.measurement, limit),
        "peak_bytes": None if memory is None else memory.peak_bytes,
        "nvml_peak_bytes": watch.peak_bytes(launch.called_s, reported_s),
        "reserved_bytes": None if memory is None else memory.reserved_bytes,
        "memory": None if memory is None else memory.model_dump(mode="json"),
    }


def _left_in_use(watch: GpuWatch, launches: Sequence[LaunchTimes]) -> int | None:
    """Device memory that was still in use after the last trial had ended, beyond what was before the first."""
    after = [
        one.used_bytes for one in watch.samples if launches and one.at_s > launches[-1].returned_s
    ]
    return min(after) - watch.idle_bytes if after and watch.idle_bytes is not None else None


def _line_through(case: Case, fitted: Sequence[tuple[int, int]], limit: int) -> MemoryLine | None:
    """Through those that take up to half of the limit; None for fewer than two."""
    config = TrainingConfig.model_validate(case.settings)
    below = [
        Peak(config.model_copy(update={"micro_batch_size": batch}), peak)
        for batch, peak in fitted
        if peak <= limit / 2
    ]
    if len(below) < 2:
        return None
    model = MemoryModel(observed=below, has_workers_in_ram=False)
    return MemoryLine(
        model=model, config=config, batches=tuple(peak.config.micro_batch_size for peak in below)
    )


def _batch_at(line: MemoryLine, peak_bytes: float) -> int:
    return int((peak_bytes - line.intercept_bytes) / line.bytes_per_sample)


def _prediction(line: MemoryLine, batch: int, result: TrialResult, limit: int) -> Figures:
    """What the line said of a batch, what it took, and whether that is within the line's own error.

    One that was out of memory took more than the limit; of one that ended otherwise nothing is known.
    """
    (predicted, error), seen = line.predict(batch), _peak(result)
    holds = None if seen is None else abs(predicted - seen) <= error
    if result.outcome == "oom":
        holds = predicted + error >= limit
    return {
        "micro_batch_size": batch,
        "outcome": result.outcome,
        "predicted_bytes": predicted,
        "error_bytes": error,
        "seen_bytes": seen,
        "relative_error": None if seen is None else predicted / seen - 1,
        "holds": holds,
    }


def _at_cap(batch: int, runner: TrialRunner, case: Case, limit: int) -> Figures:
    """What a trial tells that has next to no room: it is out of memory, is at fault, or fits without asking again.

    A run whose allocator asked again, and which the product still takes for one that fits, is neither: not judged.
    """
    result = _run(runner, case, batch)
    found = result.measurement
    fault = None if found is None else memory_fault(found, limit)
    is_told: bool | None = result.outcome == "oom" or None
    if found is not None:
        retries, is_under = found.memory.alloc_retries, found.peak_memory_bytes <= limit
        is_told = fault is not None or (None if retries and is_under else retries == 0 and is_under)
    return {
        "micro_batch_size": batch,
        "outcome": result.outcome,
        "reason": result.reason,
        "fault": fault,
        "memory": None if found is None else found.memory.model_dump(mode="json"),
        "is_told": is_told,
    }


def _why_open(promises: Mapping[str, bool | None]) -> str | None:
    """Why some promises were not judged; None where all were."""
    unseen = [name for name, kept in promises.items() if kept is None]
    return f"no trial that tells: {', '.join(unseen)}" if unseen else None


def _stress_figures(result: SearchResult) -> Figures:
    chosen, limit = result.summary.recommendation, result.summary.limit_bytes
    told = None if chosen is None else chosen.stress
    trial = next(
        (one for one in result.trials if chosen is not None and one.number == chosen.number), None
    )
    seen: Any = (
        None if trial is None or trial.measurement is None else trial.measurement.peak_memory_bytes
    )
    promises: dict[str, bool | None] = {
        "largest_samples_were_trained_on": None if told is None else not told.note,
        "largest_sample_is_above_the_median": None
        if told is None
        else told.largest_item_bytes > told.median_item_bytes,
        "stress_peak_is_not_below_trial": None
        if told is None or seen is None
        else told.memory.peak_bytes >= seen * (1 - _AGREE_WITHIN),
        "stress_is_under_limit": None if told is None else told.memory.peak_bytes <= limit,
    }
    return {
        "why_not_judged": _why_open(promises),
        "stress": None if told is None else told.model_dump(mode="json"),
        "limit_bytes": limit,
        "trial_peak_bytes": seen,
        "verdict": None if chosen is None else chosen.verdict,
        "notes": list(map(str, result.summary.notes)),
        "promises": promises,
        "search": search_figures(result),
    }
