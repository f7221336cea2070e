"""Parts of benchmarks/gpu.py that hold single trials against something.

All that a trial can tell; its start; its rate against plain loops.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median
from time import monotonic
from typing import Any

from autotune import Measurement
from autotune.launch.launcher import notes_of
from autotune.protocol.jobs import NO_EXTRAS, WindowRules
from autotune.records.trial import TrialResult
from autotune.records.utilization import WAIT_SOURCE
from autotune.tuning.extra_measurements import everything
from benchmarks.cases.cpu import Case
from benchmarks.measures.gpu_scale import (
    PLAIN_STARTUP_S,
    TRIAL_S,
    WORKLOADS,
    Scale,
    Task,
    case_of,
    fork_server,
    one_server,
    plain,
    plain_alone,
)
from benchmarks.measures.part_guard import Figures
from benchmarks.measures.recording import say
from benchmarks.overhead import measure_trial_start
from benchmarks.yardsticks.product_run import RunTrial, measurement_figures, open_trials, window_s

__all__ = ["compare_to_plain", "measure_baselines", "measure_start", "run_with_everything", "settings_of"]

_WITHIN = 0.02
_ENOUGH_PAIRS = 4  # settings, before their median is judged
_LONG_PLAINS_FROM_S = 150.0  # of a part: below, plain loops of full length leave room for two settings at the most
_FASTER = {"num_workers": 8, "pin_memory": True}
_SETTINGS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("gpt2", {"micro_batch_size": 16, "num_workers": 2, "pin_memory": True, "amp_dtype": "bfloat16"}),
    ("jpeg", {"micro_batch_size": 64, **_FASTER}),
    ("starved", {"micro_batch_size": 64, "num_workers": 8}),
    ("resnet50", {"micro_batch_size": 64, **_FASTER, "amp_dtype": "bfloat16", "channels_last": True}),
    ("gpt2", {"micro_batch_size": 8}),
    ("jpeg", {"micro_batch_size": 32, "num_workers": 2}),
    ("starved", {"micro_batch_size": 32}),
    ("resnet50", {"micro_batch_size": 64, "num_workers": 4, "amp_dtype": "tf32"}),
    ("gpt2", {"micro_batch_size": 8, "grad_accum_steps": 2, "amp_dtype": "float16", "pin_memory": True}),
    ("starved", {"micro_batch_size": 256, "num_workers": 16, "pin_memory": True}),
    ("jpeg", {"micro_batch_size": 128, "num_workers": 16, "pin_memory": True, "amp_dtype": "bfloat16"}),
    ("resnet50", {"micro_batch_size": 128, "num_workers": 8, "channels_last": True}),
)
"""Of the comparison with plain loops, the most telling first; workloads in turns, so that a cut leaves several."""
_OF_CLOCKS = "clock_"  # how the codes of remarks on the window itself begin: they are no failure
_NOT_ALWAYS_TOLD = {"others_busy_fraction"}  # nobody can tell it right after another trial
_BY_DEVICE = ("reserved_bytes", "outside_bytes", "allocated_bytes", "alloc_retries")
"""What a MemorySample holds on a device with an allocator of its own."""


def run_with_everything(task: Task) -> Figures:
    """One trial with every extra: it ends well, and every figure that the device can tell is there."""
    case, window = case_of("resnet50", task.scale), WindowRules()
    extras = everything(window)
    with (
        one_server() as launcher,
        open_trials(case, device=task.scale.device, window=window, extras=extras, launcher=launcher) as run,
    ):
        result = run({**case.settings, "pin_memory": True, "amp_dtype": "bfloat16"})
        notes = notes_of(launcher)
    found = result.measurement
    ended = {"ended_ok": result.outcome == "ok", "trials_are_forked": notes == ()}
    figures: Figures = {
        "outcome": result.outcome,
        "reason": result.reason,
        "launcher_notes": [note.code for note in notes],
        "promises": ended,
    }
    if found is None:
        return figures
    missing = _missing(found)
    sources = [one.source for one in found.busy_readings if one.source != WAIT_SOURCE]
    promises = {
        "every_figure_is_there": not missing,
        "conditions_are_there": found.conditions is not None and found.conditions.sm_clock_mhz is not None,
        "two_sources_tell_how_busy": len(sources) >= 2,
        "nothing_failed_after_the_window": all(one.code.startswith(_OF_CLOCKS) for one in found.remarks),
    }
    return {
        **figures,
        "missing": missing,
        "busy": {one.source: one.fraction for one in found.busy_readings},
        "promises": {**ended, **promises},
        "measurement": measurement_figures(found),
    }


def measure_start(task: Task) -> Figures:
    """A trial's start, the CUDA context included."""
    return measure_trial_start(fork_server, trials=task.scale.start_trials, device=task.scale.device)


def compare_to_plain(task: Task) -> Figures:
    """Trials against plain loops of the same settings, in turns; as many settings as there is time for."""
    scale = task.scale
    is_long = task.seconds >= _LONG_PLAINS_FROM_S
    plain_s = scale.long_plain_s if is_long else scale.plain_s
    pairs: list[Figures] = []
    longest_s = TRIAL_S + PLAIN_STARTUP_S + scale.skip_s + plain_s
    with one_server() as launcher, ExitStack() as opened:
        runs: dict[str, RunTrial] = {}
        for index, (name, settings) in enumerate(_SETTINGS):
            if task.left_s < longest_s:
                break
            begun = monotonic()
            try:
                case = case_of(name, scale)
            except ImportError:
                continue  # without Pillow there are no JPEGs
            used = settings_of(case, settings, scale)
            try:
                if name not in runs:
                    trials = open_trials(
                        case, device=scale.device, window=WindowRules(), extras=NO_EXTRAS, launcher=launcher
                    )
                    runs[name] = opened.enter_context(trials)
                pairs.append(_pair(name, used, runs[name], scale, plain_s, is_trial_first=index % 2 == 0))
            except Exception:  # noqa: BLE001 - one pair that fails must not cost the others
                pairs.append({"workload": name, "settings": used, "error": None, "failure": traceback.format_exc()})
                say(f"fidelity: {name}: failed")
            longest_s = max(longest_s, monotonic() - begun)
            task.keep({"pairs": pairs})
    if not pairs:
        return {"skipped": f"{task.seconds:.0f} s are too short for a pair"}
    errors = [abs(pair["error"]) for pair in pairs if pair["error"] is not None]
    is_judged = plain_s >= scale.long_plain_s and len(errors) >= _ENOUGH_PAIRS
    return {
        "plain_s": plain_s,
        "pairs": pairs,
        "median_error": median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "why_not_judged": None if is_judged else f"{len(errors)} settings against plain loops of {plain_s:.0f} s",
        "promises": {"median_within_2_percent": median(errors) <= _WITHIN if is_judged else None},
    }


def measure_baselines(task: Task) -> Figures:
    """The plain loop on the baselines, as many as there is time for."""
    found: Figures = {}
    for name in WORKLOADS:
        if task.left_s < PLAIN_STARTUP_S + task.scale.skip_s + task.scale.plain_s:
            break
        try:
            case = case_of(name, task.scale)
        except ImportError as error:
            found[name] = {"skipped": f"Pillow is not installed ({error})"}
            continue
        found[name] = plain(name, task.scale, case.settings)
        task.keep(found)
    if not found:
        return {"skipped": f"{task.seconds:.0f} s are too short for a plain loop"}
    return {**found, "left_out": [name for name in WORKLOADS if name not in found]}


def settings_of(case: Case, settings: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    """Settings with the case's learning rate; small ones where everything is."""
    small = {"micro_batch_size": 4, "num_workers": 1} if scale.is_small else {}
    kept = {name: value for name, value in settings.items() if not (scale.is_small and name == "amp_dtype")}
    return {"lr": case.settings["lr"], **kept, **small}


def _pair(
    name: str, settings: Mapping[str, Any], run: RunTrial, scale: Scale, plain_s: float, *, is_trial_first: bool
) -> Figures:
    """A trial and a plain loop of the same settings, in either order; nobody watches either."""
    result: TrialResult | None = run(settings) if is_trial_first else None
    figures = plain_alone(name, scale, settings, seconds=plain_s)
    result = run(settings) if result is None else result
    seen, truth = result.measurement, figures["samples_per_s"]
    error = None if seen is None else seen.samples_per_s / truth - 1
    say(f"fidelity: {name}: {'-' if error is None else format(error, '+.1%')} against {truth:,.0f} samples/s")
    return {
        "workload": name,
        "settings": dict(settings),
        "outcome": result.outcome,
        "reason": result.reason,
        "error": error,
        "trial_samples_per_s": None if seen is None else seen.samples_per_s,
        "trial_ci": None if seen is None else list(seen.samples_per_s_ci),
        "trial_window_s": None if seen is None else window_s(seen),
        "plain": {**figures, "settings": dict(settings)},
    }


def _missing(found: Measurement) -> list[str]:
    """The figures of a trial with every extra that a device of its own should give, and did not."""
    given = {
        "busy_fraction": found.busy_fraction,
        "fullness": found.fullness,
        "loader_ceiling": found.loader_ceiling,
        "device_ceiling": found.device_ceiling,
        "breakdown": found.breakdown,
        "loader_costs": found.loader_costs,
        "conditions": found.conditions,
        "joules_per_sample": found.joules_per_sample,
        **{f"memory.{name}": getattr(found.memory, name) for name in _BY_DEVICE},
    }
    if found.conditions is not None:
        told = found.conditions.model_dump(exclude=_NOT_ALWAYS_TOLD)
        given |= {f"conditions.{name}": value for name, value in told.items()}
    return sorted(name for name, value in given.items() if value is None)
