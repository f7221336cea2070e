"""Parts of benchmarks/gpu.py that look at a trial's window: what its edges cost, and what the device did in it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

from gpu_rates import settings_of
from gpu_scale import Task, case_of, one_server, plain
from gpu_watch import GpuWatch
from part_guard import Figures
from product_run import TRIAL_DEADLINE_S, TimedLauncher, measurement_figures, open_runner, window_s
from recording import say

from autotune import TrainingConfig
from autotune.launch.runner import TrialRunner
from autotune.protocol import WindowRules

__all__ = ["compare_blocks", "watch_conditions"]

_CELLS = {
    "0.2 s": WindowRules(max_s=2.0, precision=0.0, block_s=0.2),
    "1.0 s": WindowRules(max_s=2.0, precision=0.0, block_s=1.0),
    "0.2 s, drained": WindowRules(max_s=2.0, precision=0.0, block_s=0.2, drains_at_edges=True),
    "1.0 s, drained": WindowRules(max_s=2.0, precision=0.0, block_s=1.0, drains_at_edges=True),
}
"""Windows that run to their end. Drained: the device is waited for at each edge before more is launched."""
_CELL_S = 4.5  # a trial's start and warm-up, and its window
_MOST_ROUNDS, _ENOUGH_ROUNDS = 9, 2
_BOTH_FROM_S = 100.0  # of the part: below, the first workload alone
_SAME_WITHIN = 0.01
_POWER_WITHIN = 0.1  # the window's place in time is known to some samples of the watch
_LONG_WINDOW_S = 5.0
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "resnet50": {"micro_batch_size": 32, "num_workers": 8, "amp_dtype": "bfloat16", "channels_last": True},
    "starved": {"micro_batch_size": 256, "num_workers": 8, "pin_memory": True},
}
"""One whose steps the device holds, with copies that the host waits for, and one whose loader is the lower side."""
_BUSY_SETTINGS = {"micro_batch_size": 16, "num_workers": 2, "pin_memory": True, "amp_dtype": "bfloat16"}  # of GPT-2


def compare_blocks(task: Task) -> Figures:
    """Windows of short and long blocks, drained at their edges and not, in turns, beside the plain loop."""
    scale, has_time = task.scale, task.seconds >= _BOTH_FROM_S
    names = list(_SETTINGS) if has_time else list(_SETTINGS)[:1]
    rates: dict[str, dict[str, list[float]]] = {name: {cell: [] for cell in _CELLS} for name in names}
    rounds = 0
    with one_server() as launcher, ExitStack() as opened:
        trials = []
        for name in names:
            case = case_of(name, scale)
            runner, _ = opened.enter_context(open_runner(case, device=scale.device, launcher=launcher))
            config = TrainingConfig.model_validate(settings_of(case, _SETTINGS[name], scale))
            trials += [(name, runner, config, cell) for cell in _CELLS]
        plains = {name: plain(name, scale, settings_of(case_of(name, scale), _SETTINGS[name], scale)) for name in names}
        while rounds == 0 or (rounds < _MOST_ROUNDS and task.left_s > _CELL_S * len(trials) and not scale.is_small):
            for name, runner, config, cell in trials:
                rates[name][cell] += _rate_by(runner, name, config, cell)
            rounds += 1
            task.keep({"rates": rates, "cost": _costs(rates)})
    costs = [one["0.2 s"] for one in _costs(rates).values()]
    is_judged = rounds >= _ENOUGH_ROUNDS and None not in costs
    return {
        "rounds": rounds,
        "plain": plains,
        "why_not_judged": None if is_judged else f"{rounds} rounds",
        "promises": {
            "short_blocks_tell_the_same_within_1_percent": all(
                cost is not None and abs(cost) <= _SAME_WITHIN for cost in costs
            )
            if is_judged
            else None
        },
    }


def watch_conditions(task: Task) -> Figures:
    """What a trial tells of clocks, power and throttling, against NVML's energy counter read from outside."""
    case, name = case_of("gpt2", task.scale), "conditions"
    with one_server() as inner, GpuWatch() as watch:
        launcher = TimedLauncher(inner)
        with open_runner(case, device=task.scale.device, launcher=launcher) as (runner, _):
            config = TrainingConfig.model_validate(settings_of(case, _BUSY_SETTINGS, task.scale))
            rules = WindowRules(max_s=_LONG_WINDOW_S, precision=0.0)  # to its end
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


def _rate_by(runner: TrialRunner, name: str, config: TrainingConfig, cell: str) -> list[float]:
    """The rate of such a window; none where the trial failed."""
    found = runner.run(config, name="blocks", deadline_s=TRIAL_DEADLINE_S, window=_CELLS[cell]).measurement
    if found is None:
        return []
    say(f"blocks of {cell}: {name}: {found.samples_per_s:,.0f} samples/s")
    return [found.samples_per_s]


def _costs(rates: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float | None]]:
    """By how much less each sort of window tells than that of long blocks which is not drained, as a share."""
    return {
        name: {
            cell: 1 - median(own) / median(found["1.0 s"]) if own and found["1.0 s"] else None
            for cell, own in found.items()
        }
        for name, found in rates.items()
    }
