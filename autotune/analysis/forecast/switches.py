"""Switches that are not known to win anything: settings that stay as they are today unless something speaks for them.

Comes in: the points of the look at both sides, or a rate model. Goes out: which switches the look has shown to win
nothing, and a configuration without those that are not believed to. Of what was not tried yet little is known, so that
the largest expected gain would often be that of a switch which does nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from autotune.analysis.decisions.claims import WORTHWHILE
from autotune.analysis.forecast.observations import ConfiguredPoint
from autotune.analysis.forecast.rate_model import RateModel
from autotune.settings.training_config import TrainingConfig
from autotune.space.resolved_space import ResolvedSpace

__all__ = ["has_idle_switch", "idle_switches", "without_idle_switches"]

_LOOKED_AT = ("in_order", "worker_threads", "fused", "cudnn_benchmark")
"""Switches whose effect on a side the look measures, others unchanged; of pinning the copies tell."""
_SWITCHES = (*_LOOKED_AT, "pin_memory", "compile_mode", "numa_binding")
"""With those that trials show."""


def idle_switches(sides: Sequence[ConfiguredPoint], baseline: TrainingConfig) -> frozenset[str]:
    """Switches that the look has measured and none of whose values has won 2 % on its side.

    So much counts as equal when a winner is chosen.
    """
    ratios = {name: list(_ratios(name, sides, baseline)) for name in _LOOKED_AT}
    return frozenset(name for name, found in ratios.items() if found and max(found) < 1 + WORTHWHILE)


def has_idle_switch(config: TrainingConfig, baseline: TrainingConfig, idle: Collection[str]) -> bool:
    """Whether a configuration has one of these switches otherwise than today, though it could have it as today."""
    neutral_order = config.num_workers == 0  # without workers there is one value, whatever today's is
    return any(
        getattr(config, name) != getattr(baseline, name)
        and not (neutral_order and name in {"in_order", "worker_threads"})
        for name in idle
    )


def without_idle_switches(config: TrainingConfig, space: ResolvedSpace, rates: RateModel) -> dict[str, object]:
    """The switches to put back to the baseline's values: they are believed to win less than 2 %."""
    found: dict[str, object] = {}
    for name in _SWITCHES:
        own, current = getattr(space.baseline, name), config.model_copy(update=found)
        if name not in space.parameters or own not in space.domains[name] or getattr(current, name) == own:
            continue
        here, there = rates.forecast([current, current.model_copy(update={name: own})]).log_rate
        if there >= here - WORTHWHILE:
            found[name] = own
    return found


def _ratios(name: str, sides: Sequence[ConfiguredPoint], baseline: TrainingConfig) -> Iterator[float]:
    """Of points that differ in a switch alone, the rate with another value over that with today's."""
    own = getattr(baseline, name)
    known = {(one.side, one.config): one.point.ceiling for one in sides if one.point.ceiling is not None}
    for (side, config), ceiling in known.items():
        usual = known.get((side, config.model_copy(update={name: own})))
        if getattr(config, name) != own and usual is not None:
            yield ceiling.samples_per_s / usual.samples_per_s
