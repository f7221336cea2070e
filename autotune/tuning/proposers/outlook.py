"""Estimate what a further trial can win: the candidates' forecasts against the best trial so far.

Reads the study, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from autotune.analysis.forecast.acquisition import chance_to_run, expected_gain, has_failed, most_gain, redundant_among
from autotune.analysis.forecast.observations import ConfiguredPoint
from autotune.analysis.forecast.rate_model import RateModel
from autotune.analysis.memory.model import MemoryModel
from autotune.analysis.statistics import Floats
from autotune.analysis.time_estimate import (
    first_batches_s,
    measuring_s,
    steps_s,
)
from autotune.launch.launcher import shares_process
from autotune.settings.training_config import TrainingConfig
from autotune.study.proposals import Params, params_of
from autotune.study.study import Study
from autotune.tuning.time_budget import TimeBudget

__all__ = ["Outlook", "foresee", "measured_to_fit", "tried_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What can still be expected of a search."""

    params: Params | None
    """The trial with the largest expected gain; None where nothing is left that could tell more."""
    gain: float
    """What a trial is expected to win at most over the best so far, as a share of it, however long it takes."""
    same_batch: Params | None
    """The settings that should be the fastest at the baseline's global batch."""
    best_rate: float
    """Throughput that the best trial so far is believed to reach."""
    lower_ceiling: float
    """Throughput that nothing that fits should pass: the lowest of what the fastest loader, device, copies and host
    reach, each with a standard deviation on top."""
    lower_side: Literal["loader", "device", "copy", "host"]
    """The side of that ceiling."""
    scatter_sd: float
    """What measuring the same settings anew may differ by on this machine, relatively."""


def tried_in(study: Study) -> list[TrainingConfig]:
    """The configurations that have shown a rate."""
    return [record.config for record in study.ended if record.measurement is not None or record.result.blocks]


def measured_to_fit(sides: Sequence[ConfiguredPoint], study: Study) -> Params | None:
    """Of what the device was measured alone with, and which may be tried, the fastest."""
    rates = {
        side.config: side.point.ceiling.samples_per_s
        for side in sides
        if side.side == "device" and side.point.ceiling is not None
    }
    ranked = (params_of(config, study.space) for config in sorted(rates, key=rates.__getitem__, reverse=True))
    return next((params for params in ranked if study.may_propose(params)), None)


def foresee(
    candidates: Sequence[tuple[Params, TrainingConfig]],
    time: TimeBudget,
    rates: RateModel,
    memory: MemoryModel,
    best_rate: float,
) -> Outlook:
    """Weigh candidates: the largest expected gain among those that fit, are open and could tell something.

    The largest gain for each second of its trial counts, and what takes too long to measure for the time left is chosen
    only where nothing else is left.

    Args:
        candidates: What may be tried.
        time: What is left of it, and the study.
        rates: What each should reach.
        memory: What each should take.
        best_rate: The highest that is believed of a feasible trial, since a lucky window is no yardstick. Source of the
            plug-in: Picheny, Wagner, Ginsbourger 2013, "A benchmark of kriging-based infill criteria for noisy
            optimization".
    """
    configs, study = [config for _, config in candidates], time.study
    space, tried, trials = study.space, tried_in(study), time.policy.trials
    running = [trial.config for trial in study.running]
    forecast, fits = rates.forecast(configs, running), memory.chance_to_fit(configs, space.limit_bytes)
    failed = [record.config for record in study.ended if has_failed(record)]
    feasible = [record.config for record in study.ended if record.is_feasible]
    # a further trial is to win over what runs as well
    bar = max([best_rate, *np.exp(rates.forecast(running).log_rate)]) if running else best_rate
    gains = np.minimum(expected_gain(forecast, bar), most_gain(forecast, bar))
    gains = gains * fits * chance_to_run(configs, failed, feasible)
    may_try = np.array([study.is_open(config) for config in configs]) & (fits >= trials.sure_to_fit)
    tells = may_try & ~redundant_among(configs, forecast, tried)
    inside = (fits >= trials.likely_to_fit) & ~np.array([study.is_left_out(config) for config in configs])
    sides: dict[Literal["loader", "device", "copy", "host"], tuple[Floats, Floats]] = {
        "loader": (forecast.loader, forecast.loader_sd),
        "device": (forecast.device, forecast.device_sd),
        "copy": (forecast.copy, forecast.copy_sd),
        "host": (forecast.host, forecast.host_sd),
    }
    ceilings = {
        name: float((side * np.exp(trials.ceiling_sds * sd))[inside].max(initial=0.0))
        for name, (side, sd) in sides.items()
    }
    lower_side = min(ceilings, key=ceilings.__getitem__)
    has_run = set(tried)
    keeps = np.array([config.global_batch_ratio(space.baseline) == 1 for config in configs])
    keeps &= tells | np.array([config in has_run for config in configs])
    same = int(np.argmax(np.where(keeps, forecast.log_rate, -inf)))
    epoch_samples = space.facts.dataset_length
    expected = np.exp(forecast.log_rate)
    waits_s, trials_s = (
        np.array([seconds(config, rate, epoch_samples) for config, rate in zip(configs, expected, strict=True)])
        for seconds in (first_batches_s, measuring_s)
    )
    if time.is_brief:
        trials_s += [0.0 if shares_process(config) else trials.rebuilds * time.build_s for config in configs]
    else:  # what takes long to begin with, or has long steps, must promise more
        slow_s = np.array([steps_s(config, rate) for config, rate in zip(configs, expected, strict=True)])
        beyond_s = np.maximum(waits_s - trials.short_wait_s, 0.0) + np.maximum(
            slow_s - time.limits.shortest_window_s, 0.0
        )
        trials_s = time.shortest_trial_s + beyond_s
    soon = tells & (trials_s <= time.longest_s())
    chosen = int(np.argmax(np.where(soon if soon.any() else tells, gains / trials_s, -1.0)))
    return Outlook(
        params=candidates[chosen][0] if tells.any() else None,
        gain=float(gains[tells].max(initial=0.0)),
        same_batch=candidates[same][0] if keeps.any() else None,
        best_rate=best_rate,
        lower_ceiling=ceilings[lower_side] or inf,
        lower_side=lower_side,
        scatter_sd=forecast.scatter_sd,
    )
