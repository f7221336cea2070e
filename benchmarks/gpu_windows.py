"""Parts of benchmarks/gpu.py that look at a trial's window: what its edges cost, and what the device did in it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

from gpu_rates import settings_of
from gpu_scale import Task, case_of, one_server
from gpu_watch import GpuWatch
from part_guard import Figures
from product_run import TRIAL_DEADLINE_S, TimedLauncher, measurement_figures, open_runner, window_s
from recording import say

from autotune import TrainingConfig
from autotune.launch.runner import TrialRunner
from autotune.protocol import WindowRules

__all__ = ["compare_blocks", "watch_conditions"]

_BLOCKS_S = (0.2, 1.0)
_BLOCK_WINDOW_S = 3.0
_MOST_ROUNDS = 9
_TRIAL_START_S = 4.0
_SAME_WITHIN = 0.01
_POWER_WITHIN = 0.1  # the window's place in time is known to some samples of the watch
_LONG_WINDOW_S = 5.0
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"micro_batch_size": 16, "num_workers": 2, "pin_memory": True, "amp_dtype": "bfloat16"},
    "starved": {"micro_batch_size": 256, "num_workers": 8, "pin_memory": True},
}
"""One whose steps the device holds, for the host to run ahead of it, and one of short steps."""


def compare_blocks(task: Task) -> Figures:
    """Windows of 0.2 s blocks against such of 1.0 s, in turns: at each edge the device's queue runs dry."""
    rates: dict[str, dict[str, list[float]]] = {name: {str(one): [] for one in _BLOCKS_S} for name in _SETTINGS}
    round_s = len(_SETTINGS) * len(_BLOCKS_S) * (_BLOCK_WINDOW_S + _TRIAL_START_S)
    with one_server() as launcher, ExitStack() as opened:
        trials = []
        for name, settings in _SETTINGS.items():
            case = case_of(name, task.scale)
            runner, _ = opened.enter_context(open_runner(case, device=task.scale.device, launcher=launcher))
            config = TrainingConfig.model_validate(settings_of(case, settings, task.scale))
            trials += [(name, runner, config, block_s) for block_s in _BLOCKS_S]
        for number in range(1 if task.scale.is_small else _MOST_ROUNDS):
            if number and task.left_s < round_s:
                break
            for name, runner, config, block_s in trials:
                rates[name][str(block_s)] += _rate_by(runner, name, config, block_s)
            task.keep({"rates": rates, "cost": _costs(rates)})
    costs = _costs(rates)
    known = [cost for cost in costs.values() if cost is not None]
    promise = all(abs(cost) <= _SAME_WITHIN for cost in known) if len(known) == len(_SETTINGS) else None
    return {"rates": rates, "cost": costs, "promises": {"short_blocks_tell_the_same_within_1_percent": promise}}


def watch_conditions(task: Task) -> Figures:
    """What a trial tells of clocks, power and throttling, against NVML's energy counter read from outside."""
    case, name = case_of("gpt2", task.scale), "conditions"
    with one_server() as inner, GpuWatch() as watch:
        launcher = TimedLauncher(inner)
        with open_runner(case, device=task.scale.device, launcher=launcher) as (runner, _):
            config = TrainingConfig.model_validate(settings_of(case, _SETTINGS["gpt2"], task.scale))
            rules = WindowRules(max_s=_LONG_WINDOW_S, precision=1e-9)  # to its end
            result = runner.run(config, name=name, deadline_s=TRIAL_DEADLINE_S, window=rules)
    found, launch = result.measurement, next(one for one in launcher.launches if one.name == name)
    if found is None:
        return {"outcome": result.outcome, "reason": result.reason, "promises": {"ended_ok": False}}
    end_s = launch.returned_s - (launch.after_report_s or 0.0)
    outside_w = watch.power_w(end_s - window_s(found), end_s)
    told = found.conditions
    told_w = None if told is None else told.power_w
    is_near = None if outside_w is None or told_w is None else abs(told_w / outside_w - 1) <= _POWER_WITHIN
    return {
        "nvml": watch.why_blind or "seen",
        "conditions": None if told is None else told.model_dump(mode="json"),
        "clock_moved_by": None if told is None else told.clock_moved_by,
        "joules_per_sample": found.joules_per_sample,
        "power_w_from_outside": outside_w,
        "remarks": list(found.remarks),
        "promises": {
            "clocks_were_read": told is not None and told.sm_clock_mhz is not None,
            "energy_was_read": found.joules_per_sample is not None,
            "power_is_within_10_percent_of_nvml_from_outside": is_near,
        },
        "measurement": measurement_figures(found),
    }


def _rate_by(runner: TrialRunner, name: str, config: TrainingConfig, block_s: float) -> list[float]:
    """The rate of a window of such blocks that runs to its end; none where the trial failed."""
    rules = WindowRules(max_s=_BLOCK_WINDOW_S, precision=1e-9, block_s=block_s)
    found = runner.run(config, name="blocks", deadline_s=TRIAL_DEADLINE_S, window=rules).measurement
    if found is None:
        return []
    say(f"blocks of {block_s} s: {name}: {found.samples_per_s:,.0f} samples/s")
    return [found.samples_per_s]


def _costs(rates: Mapping[str, Mapping[str, list[float]]]) -> dict[str, float | None]:
    """By how much less the short blocks tell, as a share; None where either was not measured."""
    short, long = (str(one) for one in _BLOCKS_S)
    return {
        name: 1 - median(found[short]) / median(found[long]) if found[short] and found[long] else None
        for name, found in rates.items()
    }
