"""Parts of benchmarks/gpu.py that hold single trials against something.

All that a trial can tell; its start; its rate against plain loops.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev
from time import monotonic
from typing import Any

from autotune import Measurement
from autotune.launch.launcher import notes_of
from autotune.policy import WindowRules
from autotune.protocol.messages import NO_EXTRAS
from autotune.records.measurement import WAIT_SOURCE
from autotune.records.trial import TrialResult
from autotune.tuning.loop import THOROUGH_EXTRAS
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
from benchmarks.yardsticks.product_run import RunTrial, measurement_figures, open_trials

__all__ = [
    "compare_to_plain",
    "measure_baselines",
    "measure_start",
    "run_with_everything",
    "settings_of",
]

_FASTER = {"num_workers": 8, "pin_memory": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """A workload and settings on which trials are compared with plain loops."""

    workload: str
    held_by: str
    """The side that holds the loop up by design: "device", "host" (its launches) or "loader"."""
    settings: Mapping[str, Any]


_SETTINGS = (
    _Setting(
        workload="gpt2",
        held_by="device",
        settings={
            "micro_batch_size": 16,
            "num_workers": 2,
            "pin_memory": True,
            "amp_dtype": "bfloat16",
        },
    ),
    _Setting(
        workload="launch_bound",
        held_by="host",
        settings={"micro_batch_size": 256, "num_workers": 16, "pin_memory": True},
    ),
    _Setting(
        workload="resnet50",
        held_by="host",  # seen on an H100: blocks of one window differ by a third, and no data are waited for
        settings={
            "micro_batch_size": 64,
            **_FASTER,
            "amp_dtype": "bfloat16",
            "channels_last": True,
        },
    ),
    _Setting(workload="gpt2", held_by="device", settings={"micro_batch_size": 8}),
    _Setting(
        workload="starved", held_by="loader", settings={"micro_batch_size": 64, "num_workers": 8}
    ),
    _Setting(workload="jpeg", held_by="loader", settings={"micro_batch_size": 64, **_FASTER}),
    _Setting(
        workload="starved",
        held_by="host",
        settings={"micro_batch_size": 256, "num_workers": 16, "pin_memory": True},
    ),
)
"""Of the comparison with plain loops: with the first four both kinds of which a bias is promised can be judged."""
_MOST_BIAS = {"device": 0.005, "host": 0.02}
"""How far the signed mean error of these loops may lie from 0. Runs of a device-bound loop differ by 0.1 % on an H200,
those of a host-bound one by 5 to 20 %. Our own convention."""
_FEWEST_TRIALS = 4
"""Trials of a kind, before their mean error is judged."""
_SHORT_WINDOW_S = 2.0  # of a trial whose rate is held against nothing
_OF_CLOCKS = "clock_"  # how the codes of remarks on the window itself begin: they are no failure
_NOT_ALWAYS_TOLD = {"others_busy_fraction"}  # nobody can tell it right after another trial
_BY_DEVICE = ("reserved_bytes", "outside_bytes", "allocated_bytes", "alloc_retries")
"""What a MemorySample holds on a device with an allocator of its own."""


def run_with_everything(task: Task) -> Figures:
    """One trial with every extra: it ends well, and every figure that the device can tell is there."""
    case, window = case_of("resnet50", task.scale), WindowRules(max_s=_SHORT_WINDOW_S)
    extras = THOROUGH_EXTRAS
    with (
        one_server() as launcher,
        open_trials(
            case, device=task.scale.device, window=window, extras=extras, launcher=launcher
        ) as run,
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
        "conditions_are_there": found.conditions is not None
        and found.conditions.sm_clock_mhz is not None,
        "two_sources_tell_how_busy": len(sources) >= 2,
        "nothing_failed_after_the_window": all(
            one.code.startswith(_OF_CLOCKS) for one in found.notes
        ),
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
    return measure_trial_start(
        fork_server, trials=task.scale.start_trials, device=task.scale.device
    )


def compare_to_plain(task: Task) -> Figures:
    """Compare trials with plain loops of the same settings, as plain, trial, trial, plain; as many settings as fit.

    A host whose speed drifts slowly changes both alike in this order, so that the mean error is free of the drift.
    """
    scale = task.scale
    sets: list[Figures] = []
    longest_s = 2 * (TRIAL_S + PLAIN_STARTUP_S + scale.skip_s + scale.long_plain_s)
    with one_server() as launcher, ExitStack() as opened:
        runs: dict[str, RunTrial] = {}
        for setting in _SETTINGS:
            if task.left_s < longest_s:
                break
            begun = monotonic()
            try:
                case = case_of(setting.workload, scale)
            except ImportError:
                continue  # without Pillow there are no JPEGs
            used = settings_of(case, setting.settings, scale)
            known: Figures = {
                "workload": setting.workload,
                "held_by": setting.held_by,
                "settings": used,
            }
            try:
                if setting.workload not in runs:
                    trials = open_trials(
                        case,
                        device=scale.device,
                        window=WindowRules(),
                        extras=NO_EXTRAS,
                        launcher=launcher,
                    )
                    runs[setting.workload] = opened.enter_context(trials)
                known |= _compared(setting.workload, used, runs[setting.workload], scale)
            except Exception:  # noqa: BLE001 - one setting that fails must not cost the others
                known |= {"errors": [], "failure": traceback.format_exc()}
                say(f"fidelity: {setting.workload}: failed")
            sets.append(known)
            longest_s = max(longest_s, monotonic() - begun)
            task.keep({"settings": sets})
    if not sets:
        return {"skipped": f"{task.seconds:.0f} s are too short for a setting"}
    biases = {held_by: _bias(sets, held_by) for held_by in ("device", "host", "loader")}
    unknown = [held_by for held_by in _MOST_BIAS if biases[held_by]["trials"] < _FEWEST_TRIALS]
    return {
        "plain_s": scale.long_plain_s,
        "settings": sets,
        "bias": biases,
        "why_not_judged": f"too few trials of loops held by the {' and the '.join(unknown)}"
        if unknown
        else None,
        "promises": {
            f"bias_within_{most:.1%}_where_the_{held_by}_holds_the_loop": None
            if held_by in unknown
            else abs(biases[held_by]["mean_error"]) <= most
            for held_by, most in _MOST_BIAS.items()
        },
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
    kept = {
        name: value
        for name, value in settings.items()
        if not (scale.is_small and name == "amp_dtype")
    }
    return {"lr": case.settings["lr"], **kept, **small}


def _compared(workload: str, settings: Mapping[str, Any], run: RunTrial, scale: Scale) -> Figures:
    """Run plain, trial, trial, plain, and nothing else; an error is a trial over the plain mean, less 1."""
    plains = [plain_alone(workload, scale, settings, seconds=scale.long_plain_s)]
    results: list[TrialResult] = [run(settings) for _ in range(2)]
    plains.append(plain_alone(workload, scale, settings, seconds=scale.long_plain_s))
    truth = mean(one["samples_per_s"] for one in plains)
    seen = [one.measurement for one in results if one.measurement is not None]
    errors = [one.samples_per_s / truth - 1 for one in seen]
    say(
        f"fidelity: {workload}: {', '.join(format(one, '+.1%') for one in errors)} against {truth:,.0f} samples/s"
    )
    return {
        "errors": errors,
        "raw_errors": [_uncorrected(one) / truth - 1 for one in seen],
        "plain_samples_per_s": [one["samples_per_s"] for one in plains],
        "plain": plains,
        "outcomes": [[one.outcome, one.reason] for one in results],
        "trials": [measurement_figures(one) for one in seen],
    }


def _uncorrected(seen: Measurement) -> float:
    """Samples over seconds of all blocks, without the corrections for restarts and for batches that lay ready."""
    return sum(block.samples for block in seen.blocks) / sum(block.seconds for block in seen.blocks)


def _bias(sets: list[Figures], held_by: str) -> Figures:
    """Average the errors of a kind, each setting's mean counted once; the standard error is that between settings."""
    own = [one["errors"] for one in sets if one["held_by"] == held_by and one["errors"]]
    means = [mean(errors) for errors in own]
    return {
        "trials": sum(map(len, own)),
        "mean_error": mean(means) if means else None,
        "standard_error": stdev(means) / sqrt(len(means)) if len(means) > 1 else None,
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
