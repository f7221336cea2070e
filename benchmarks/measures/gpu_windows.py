"""Parts of benchmarks/gpu.py that look at a trial's window: what its edges cost, and what the device did in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from statistics import median
from time import monotonic
from typing import Any

from autotune import Measurement, TrainingConfig
from autotune.launch.runner import TrialRunner
from autotune.protocol.jobs import WindowRules
from benchmarks.measures.gpu_rates import settings_of
from benchmarks.measures.gpu_scale import PLAIN_STARTUP_S, TRIAL_S, Task, case_of, one_server, plain
from benchmarks.measures.gpu_watch import GpuWatch
from benchmarks.measures.part_guard import Figures
from benchmarks.measures.recording import say
from benchmarks.yardsticks.product_run import (
    TRIAL_DEADLINE_S,
    TimedLauncher,
    measurement_figures,
    open_runner,
    window_s,
)

__all__ = ["compare_blocks", "watch_conditions"]

_CELLS = {
    "0.2 s": WindowRules(max_s=2.0, precision=0.0, block_s=0.2),
    "1.0 s": WindowRules(max_s=2.0, precision=0.0, block_s=1.0),
}
"""Windows that run to their end."""
_MOST_ROUNDS, _ENOUGH_ROUNDS = 9, 2
_ALL_FROM_S = 100.0  # of the part: below, the first workload alone
_SAME_WITHIN = 0.01
_POWER_WITHIN = 0.1  # the window's place in time is known to some samples of the watch
_LONG_WINDOW_S = 5.0
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "launch_bound": {"micro_batch_size": 256, "num_workers": 16, "pin_memory": True},
    "resnet50": {"micro_batch_size": 32, "num_workers": 8, "amp_dtype": "bfloat16", "channels_last": True},
    "starved": {"micro_batch_size": 256, "num_workers": 8, "pin_memory": True},
}
"""Two held by the host that launches, the only kind that an edge can cost time, one of them with copies that the host
waits for; one held by the loader."""
_BUSY_SETTINGS = {"micro_batch_size": 16, "num_workers": 2, "pin_memory": True, "amp_dtype": "bfloat16"}  # of GPT-2


def compare_blocks(task: Task) -> Figures:
    """Compare windows of short and long blocks, interleaved; then plain loops, if time is left."""
    scale = task.scale
    names = list(_SETTINGS) if task.seconds >= _ALL_FROM_S else list(_SETTINGS)[:1]
    rates: dict[str, dict[str, list[float]]] = {name: {cell: [] for cell in _CELLS} for name in names}
    windows: list[Figures] = []
    rounds, round_s = 0, TRIAL_S
    with one_server() as launcher, ExitStack() as opened:
        trials = []
        for name in names:
            case = case_of(name, scale)
            runner, _ = opened.enter_context(open_runner(case, device=scale.device, launcher=launcher))
            config = TrainingConfig.model_validate(settings_of(case, _SETTINGS[name], scale))
            trials += [(name, runner, config, cell) for cell in _CELLS]
        while rounds == 0 or (rounds < _MOST_ROUNDS and task.left_s > round_s and not scale.is_small):
            begun = monotonic()
            for name, runner, config, cell in trials:
                seen = _window_by(runner, name, config, cell)
                if seen is not None:
                    rates[name][cell].append(seen.samples_per_s)
                    windows.append({"workload": name, "cell": cell, "round": rounds, **measurement_figures(seen)})
            rounds, round_s = rounds + 1, monotonic() - begun
            task.keep({"rates": rates, "cost": _costs(rates), "windows": windows})
    told = [_tell_the_same(one) for one in rates.values()]
    kept = _all(told, rounds)
    why = f"{rounds} rounds are too few"
    if rounds >= _ENOUGH_ROUNDS:
        why = "what differs by more than 1 % differs no more than equal windows do"
    figures: Figures = {
        "rounds": rounds,
        "spread": {name: _spread(one) for name, one in rates.items()},
        "plain": {},
        "why_not_judged": why if kept is None else None,
        "promises": {"short_blocks_tell_the_same_within_1_percent": kept},
    }
    task.keep(figures)
    for name in names:
        if task.left_s > PLAIN_STARTUP_S + scale.skip_s + scale.plain_s:
            figures["plain"][name] = plain(name, scale, settings_of(case_of(name, scale), _SETTINGS[name], scale))
    return figures


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
        "remarks": [remark.model_dump() for remark in found.remarks],
        "promises": {
            "clocks_were_read": told is not None and told.sm_clock_mhz is not None,
            "energy_was_read": found.joules_per_sample is not None,
            "power_is_within_10_percent_of_nvml_from_outside": is_near,
        },
        "measurement": measurement_figures(found),
    }


def _window_by(runner: TrialRunner, name: str, config: TrainingConfig, cell: str) -> Measurement | None:
    """Measure such a window; None where the trial failed."""
    seen = runner.run(config, name="blocks", deadline_s=TRIAL_DEADLINE_S, window=_CELLS[cell]).measurement
    if seen is not None:
        say(f"blocks of {cell}: {name}: {seen.samples_per_s:,.0f} samples/s")
    return seen


def _all(told: Collection[bool | None], rounds: int) -> bool | None:
    if rounds < _ENOUGH_ROUNDS:
        return None
    return False if False in told else None if None in told else True


def _spread(cells: Mapping[str, list[float]]) -> float | None:
    """The largest less the smallest rate of equal windows, over their median; of the two sorts the larger one."""
    both = [cells["0.2 s"], cells["1.0 s"]]
    return max((max(own) - min(own)) / median(own) for own in both) if all(both) else None


def _tell_the_same(cells: Mapping[str, list[float]]) -> bool | None:
    """Whether short blocks cost at most 1 %; None where they cost more, but no more than equal windows differ by."""
    cost, spread = _costs({"": cells})[""]["0.2 s"], _spread(cells)
    if cost is None or spread is None:
        return None
    return True if abs(cost) <= _SAME_WITHIN else None if abs(cost) <= spread else False


def _costs(rates: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float | None]]:
    """By how much less each sort of window shows than that of long blocks, as a share."""
    return {
        name: {
            cell: 1 - median(own) / median(found["1.0 s"]) if own and found["1.0 s"] else None
            for cell, own in found.items()
        }
        for name, found in rates.items()
    }
