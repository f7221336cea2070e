"""Parts of benchmarks/gpu.py that look at a trial's window: what its edges cost, and what the device did in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from time import monotonic
from typing import Any

from autotune import Measurement, TrainingConfig
from autotune.launch.runner import TrialRunner
from autotune.policy import WindowRules
from benchmarks.measures.gpu_rates import settings_of
from benchmarks.measures.gpu_scale import PLAIN_STARTUP_S, TRIAL_S, Task, case_of, one_server, plain
from benchmarks.measures.gpu_watch import GpuWatch
from benchmarks.measures.pairs import MeanRatio, mean_ratio
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
_MOST_ROUNDS = 9
_ALL_FROM_S = 100.0  # of the part: below, the first workload alone
_SAME_WITHIN = 0.01
_POWER_WITHIN = 0.1  # the window's place in time is known to some samples of the watch
_LONG_WINDOW_S = 5.0
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "launch_bound": {"micro_batch_size": 256, "num_workers": 16, "pin_memory": True},
    "resnet50": {
        "micro_batch_size": 32,
        "num_workers": 8,
        "amp_dtype": "bfloat16",
        "channels_last": True,
    },
    "starved": {"micro_batch_size": 256, "num_workers": 8, "pin_memory": True},
}
"""Two held by the host that launches, the only kind that an edge can cost time, one of them with copies that the host
waits for; one held by the loader."""
_BUSY_SETTINGS = {
    "micro_batch_size": 16,
    "num_workers": 2,
    "pin_memory": True,
    "amp_dtype": "bfloat16",
}  # of GPT-2


def compare_blocks(task: Task) -> Figures:
    """Compare windows of short and long blocks, interleaved; then plain loops, if time is left."""
    scale = task.scale
    names = list(_SETTINGS) if task.seconds >= _ALL_FROM_S else list(_SETTINGS)[:1]
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    windows: list[Figures] = []
    rounds, round_s = 0, TRIAL_S
    with one_server() as launcher, ExitStack() as opened:
        runners: dict[str, tuple[TrialRunner, TrainingConfig]] = {}
        for name in names:
            case = case_of(name, scale)
            runner, _ = opened.enter_context(
                open_runner(case, device=scale.device, launcher=launcher)
            )
            runners[name] = (
                runner,
                TrainingConfig.model_validate(settings_of(case, _SETTINGS[name], scale)),
            )
        while rounds == 0 or (
            rounds < _MOST_ROUNDS and task.left_s > round_s and not scale.is_small
        ):
            begun = monotonic()
            for name, (runner, config) in runners.items():
                pair: dict[str, float] = {}
                for cell in sorted(
                    _CELLS, reverse=rounds % 2 == 1
                ):  # a drift within rounds cancels
                    seen = _window_by(runner, name, config, cell)
                    if seen is not None:
                        pair[cell] = seen.samples_per_s
                        windows.append(
                            {
                                "workload": name,
                                "cell": cell,
                                "round": rounds,
                                **measurement_figures(seen),
                            }
                        )
                rates[name].append(pair)
            rounds, round_s = rounds + 1, monotonic() - begun
            costs = {name: _short_over_long(pairs) for name, pairs in rates.items()}
            told = {name: None if cost is None else asdict(cost) for name, cost in costs.items()}
            task.keep({"rates": rates, "short_over_long": told, "windows": windows})
    kept = _all(
        [None if cost is None else cost.is_one_within(_SAME_WITHIN) for cost in costs.values()]
    )
    figures: Figures = {
        "rounds": rounds,
        "plain": {},
        "why_not_judged": None
        if kept is not None
        else f"{rounds} rounds leave open which side of 1 % it lies",
        "promises": {"short_blocks_tell_the_same_within_1_percent": kept},
    }
    task.keep(figures)
    for name in names:
        if task.left_s > PLAIN_STARTUP_S + scale.skip_s + scale.plain_s:
            figures["plain"][name] = plain(
                name, scale, settings_of(case_of(name, scale), _SETTINGS[name], scale)
            )
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
    is_near = (
        None
        if outside_w is None or told_w is None
        else abs(told_w / outside_w - 1) <= _POWER_WITHIN
    )
    return {
        "nvml": watch.why_blind or "seen",
        "conditions": None if told is None else told.model_dump(mode="json"),
        "clock_moved_by": None if told is None else told.clock_moved_by,
        "joules_per_sample": found.joules_per_sample,
        "power_w_from_outside": outside_w,
        "notes": [note.model_dump() for note in found.notes],
        "promises": {
            "clocks_were_read": told is not None and told.sm_clock_mhz is not None,
            "energy_was_read": found.joules_per_sample is not None,
            "power_is_within_10_percent_of_nvml_from_outside": is_near,
        },
        "measurement": measurement_figures(found),
    }


def _window_by(
    runner: TrialRunner, name: str, config: TrainingConfig, cell: str
) -> Measurement | None:
    """Measure such a window; None where the trial failed."""
    seen = runner.run(
        config, name="blocks", deadline_s=TRIAL_DEADLINE_S, window=_CELLS[cell]
    ).measurement
    if seen is not None:
        say(f"blocks of {cell}: {name}: {seen.samples_per_s:,.0f} samples/s")
    return seen


def _all(told: Collection[bool | None]) -> bool | None:
    return False if False in told else None if None in told else True


def _short_over_long(rounds: Sequence[Mapping[str, float]]) -> MeanRatio | None:
    """Average the rounds' ratios of short blocks' rate over long blocks'; None where no round has both."""
    ratios = [pair["0.2 s"] / pair["1.0 s"] for pair in rounds if len(pair) == len(_CELLS)]
    return mean_ratio(ratios) if ratios else None
