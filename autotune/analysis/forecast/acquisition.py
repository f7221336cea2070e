"""Which trial to run next: how much each is expected to gain, whether it is redundant, and whether it is likely to run.

Comes in: a Forecast of the rate model, and the trials so far. Goes out: one value per configuration. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from autotune.analysis.forecast.rate_model import Forecast
from autotune.analysis.statistics import Floats
from autotune.records.ceilings import device_key, loader_key
from autotune.records.trial import OUT_OF_MEMORY, TrialRecord
from autotune.settings.training_config import TrainingConfig

__all__ = ["AMPLE", "chance_to_run", "expected_gain", "has_failed", "most_gain", "redundant_among"]

AMPLE = 1.25
"""A side that is this many times as fast as the other, uncertainty included, does not limit the rate: our own
convention."""
_SHORT_COPY = 0.01
"""Share of a run's time, uncertainty included, below which its copies can't matter, however they are made: our own
convention, as little as a search expects to win before it ends."""
_INTERVAL_SDS = (-2, 2)
"""Standard deviations of a log-normal rate: about its 95 % interval."""
_SETTINGS = tuple(name for name in TrainingConfig.model_fields if name != "lr")


def expected_gain(forecast: Forecast, best_samples_per_s: float) -> Floats:
    """Expected improvement over the best rate so far, as a share of it: 0.04 = 4 %.

    Rates are log-normal: E[max(rate / best - 1, 0)], as the value of a call option.
    Source: Jones, Schonlau, Welch 1998, "Efficient global optimization of expensive black-box functions"; for the
    log-normal, Black and Scholes 1973.
    """
    from scipy.special import ndtr

    sd = np.maximum(forecast.sd, 1e-9)  # keeps a division finite
    above = forecast.log_rate - np.log(best_samples_per_s)
    mean = np.exp(np.minimum(above + sd**2 / 2, 50.0))  # keeps the exponential finite
    gain: Floats = mean * ndtr(above / sd + sd) - ndtr(above / sd)
    return np.maximum(gain, 0.0)


def most_gain(forecast: Forecast, best_samples_per_s: float) -> Floats:
    """The most that each can gain: the rate of its slowest side, at the upper end of its interval.

    Even copies that computing hides wholly hold a run up to their own rate.
    """
    _, fast = _sides(forecast)
    gain: Floats = np.maximum(np.min(fast, axis=0) / best_samples_per_s - 1, 0.0)
    return gain


def redundant_among(
    configs: Sequence[TrainingConfig], forecast: Forecast, tried: Sequence[TrainingConfig]
) -> NDArray[np.bool_]:
    """Which configurations are redundant: they differ from one that was tried only on a side that limits neither.

    More workers than a slow device needs change nothing, nor does a faster device with as many threads behind a slow
    loader; with fewer threads workers have more of the cores. Without workers both sides may limit the rate, one after
    the other. Copies that are short change nothing, from memory that is pinned or not, unless the host may be the
    limit, which takes pinned batches in less time. A tried configuration counts only if it is among `configs`.
    """
    (slow_loader, slow_device, slow_copy, slow_host), fast = _sides(forecast)
    fast_loader, fast_training = fast[0], np.min(fast[1:], axis=0)
    # at worst nothing of a copy is hidden, at best all of it
    slow_training = np.minimum(1 / (1 / slow_device + 1 / slow_copy), slow_host)
    has_ample_loader, has_ample_device = slow_loader > AMPLE * fast_training, slow_training > AMPLE * fast_loader
    has_ample_host = slow_host > AMPLE * np.min(fast[:3], axis=0)
    has_short_copy = (fast_training <= _SHORT_COPY * slow_copy) & has_ample_host
    places = {config: place for place, config in enumerate(configs)}
    tried_places = [places[config] for config in tried if config in places and config.num_workers > 0]

    def trained(place: int) -> tuple[object, ...]:
        """What the rate depends on of a configuration whose loader is ample."""
        return (device_key(configs[place]), None if has_short_copy[place] else configs[place].pin_memory)

    devices = {trained(place) for place in tried_places if has_ample_loader[place]}
    loaders = {_loader_with_threads(configs[place]) for place in tried_places if has_ample_device[place]}
    redundant = [
        config.num_workers > 0
        and ((loads and trained(place) in devices) or (trains and _loader_with_threads(config) in loaders))
        for place, (config, loads, trains) in enumerate(zip(configs, has_ample_loader, has_ample_device, strict=True))
    ]
    return np.array(redundant, dtype=np.bool_) | _pins_in_vain(configs, forecast, tried)


def has_failed(record: TrialRecord) -> bool:
    """Whether a trial ended without a rate, for another reason than memory."""
    has_rate = record.measurement is not None or bool(record.result.blocks)
    return not has_rate and record.outcome not in OUT_OF_MEMORY | {"pruned"}


def chance_to_run(
    configs: Sequence[TrainingConfig], failed: Collection[TrainingConfig], ran: Collection[TrainingConfig]
) -> Floats:
    """The probability that each does not fail for the same reason as another.

    A failure is blamed on one of the settings in which it differs from everything that ran, each with equal
    probability: a configuration that shares half of these values has half a chance.
    """
    chances: Floats = np.ones(len(configs))
    values = {name: {getattr(config, name) for config in ran} for name in _SETTINGS}
    for failure in failed:
        suspects = {name: getattr(failure, name) for name in _SETTINGS if getattr(failure, name) not in values[name]}
        if suspects:
            shared = [sum(getattr(config, name) == suspects[name] for name in suspects) for config in configs]
            # almost certainly one of the suspects failed, not the machine
            chances *= 1 - 0.99 * np.array(shared) / len(suspects)
    return chances


def _pins_in_vain(
    configs: Sequence[TrainingConfig], forecast: Forecast, tried: Sequence[TrainingConfig]
) -> NDArray[np.bool_]:
    """Which have a value of `pin_memory` that was not tried, and copies that can't limit them with either.

    The same with a value that was tried tells as much, or has told it. Where copies were not measured, or all that is
    left has other values and was not tried otherwise, none.
    """
    (_, _, slow_copy, slow_host), (fast_loader, fast_device, _, _) = _sides(forecast)
    known, has_run = {config.pin_memory for config in tried}, set(tried)
    slowest = min(
        (rate for config, rate in zip(configs, slow_copy, strict=True) if config.pin_memory in known), default=inf
    )
    fastest = np.minimum(fast_loader, fast_device)
    is_short = (fastest <= _SHORT_COPY * np.minimum(slow_copy, slowest)) & (slow_host > AMPLE * fastest)
    are_left = any(config.pin_memory in known and config not in has_run for config in configs)
    is_other = [
        config.pin_memory not in known
        and (are_left or config.model_copy(update={"pin_memory": not config.pin_memory}) in has_run)
        for config in configs
    ]
    return np.asarray(np.isfinite(forecast.copy) & is_short & np.array(is_other, dtype=np.bool_), dtype=np.bool_)


def _sides(forecast: Forecast) -> tuple[Floats, Floats]:
    """Rates of loader, device, copies and host at the lower and at the upper end of their intervals, (4, configs)."""
    rates = np.stack([forecast.loader, forecast.device, forecast.copy, forecast.host])
    spread = _INTERVAL_SDS[1] * np.stack([forecast.loader_sd, forecast.device_sd, forecast.copy_sd, forecast.host_sd])
    return rates * np.exp(-spread), rates * np.exp(spread)


def _loader_with_threads(config: TrainingConfig) -> tuple[object, ...]:
    """What the loader's rate depends on during training, whose threads may use the workers' cores."""
    return (*loader_key(config), config.intra_op_threads)
