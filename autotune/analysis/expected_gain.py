"""How much a trial is expected to win over the best so far, and which trials can't tell anything new. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from autotune.analysis.rate_model import Forecast
from autotune.analysis.statistics import Floats
from autotune.records.ceilings import device_key, loader_key
from autotune.settings.training_config import TrainingConfig

__all__ = ["AMPLE", "expected_gain", "most_gain", "without_matter"]

AMPLE = 1.25
"""A side that is this many times as fast as the other, uncertainty counted in, does not hold the rate."""


def expected_gain(forecast: Forecast, best_samples_per_s: float) -> Floats:
    """Expected improvement over the best rate so far, as a share of it: 0.04 = 4 %.

    Rates are log-normal: E[max(rate / best - 1, 0)], as the value of a call option.
    Source: Jones, Schonlau, Welch 1998, "Efficient global optimization of expensive black-box functions"; for the
    log-normal, Black and Scholes 1973.
    """
    sd = np.maximum(forecast.sd, 1e-9)
    above = forecast.log_rate - np.log(best_samples_per_s)
    mean = np.exp(np.minimum(above + sd**2 / 2, 50.0))
    gain: Floats = mean * _normal_cdf(above / sd + sd) - _normal_cdf(above / sd)
    return np.maximum(gain, 0.0)


def most_gain(forecast: Forecast, best_samples_per_s: float) -> Floats:
    """What each can win at the most: its slower side's own rate, with its standard deviation on top."""
    slower = np.minimum(forecast.loader * np.exp(forecast.loader_sd), forecast.device * np.exp(forecast.device_sd))
    return np.maximum(slower / best_samples_per_s - 1, 0.0)


def without_matter(
    configs: Sequence[TrainingConfig], forecast: Forecast, tried: Sequence[TrainingConfig]
) -> NDArray[np.bool_]:
    """Which configurations differ from one that was tried only on a side that holds the rate of neither.

    More workers than such a side needs tell nothing, nor does a faster device with as many threads behind a slow
    loader; with fewer threads workers have more of the cores. Without workers both sides may count, one after the
    other. What was tried and is not among the configurations stands for none.
    """
    slow_loader, fast_loader = _ends(forecast.loader, forecast.loader_sd)
    slow_device, fast_device = _ends(forecast.device, forecast.device_sd)
    has_ample_loader, has_ample_device = slow_loader > AMPLE * fast_device, slow_device > AMPLE * fast_loader
    places = {config: place for place, config in enumerate(configs)}
    seen = [places[config] for config in tried if config in places and config.num_workers > 0]
    devices = {device_key(configs[place]) for place in seen if has_ample_loader[place]}
    loaders = {_loader_beside(configs[place]) for place in seen if has_ample_device[place]}
    found = [
        config.num_workers > 0
        and bool((loader and device_key(config) in devices) or (device and _loader_beside(config) in loaders))
        for config, loader, device in zip(configs, has_ample_loader, has_ample_device, strict=True)
    ]
    return np.array(found, dtype=np.bool_)


def _loader_beside(config: TrainingConfig) -> tuple[object, ...]:
    """What a loader's rate depends on beside a training, whose threads may run on the workers' cores."""
    return (*loader_key(config), config.intra_op_threads)


def _ends(rate: Floats, sd: Floats) -> tuple[Floats, Floats]:
    """About the 95 % interval of a log-normal rate."""
    return rate * np.exp(-2 * sd), rate * np.exp(2 * sd)


def _normal_cdf(values: Floats) -> Floats:
    cdf = NormalDist().cdf
    return np.array([cdf(float(value)) for value in values])
