"""Switches that are not known to win anything: settings that stay as they are today unless something speaks for them.

Comes in: the points of the look at both sides, or a rate model. Goes out: which switches the look has shown to win
nothing, and a configuration without those that are not believed to. Of what was not tried yet little is known, so that
the largest expected gain would often be that of a switch which does nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from autotune.analysis.forecast.observations import ConfiguredPoint
from autotune.analysis.forecast.rate_model import RateModel
from autotune.settings.contradictions import NEUTRAL_WITHOUT_WORKERS
from autotune.settings.search_space import Choices
from autotune.settings.training_config import TrainingConfig
from autotune.space.constraints import normalised
from autotune.space.resolved_space import ResolvedSpace

__all__ = ["as_today", "has_idle_switch", "idle_switches", "without_idle_switches"]

_LOOKED_AT = ("in_order", "worker_threads", "fused")
"""Switches whose effect on a side the look measures, others unchanged; of pinning the copies tell."""
_SWITCHES = (*_LOOKED_AT, "cudnn_benchmark", "pin_memory", "compile_mode", "numa_binding")
"""With those that trials show."""


def idle_switches(sides: Sequence[ConfiguredPoint], space: ResolvedSpace) -> frozenset[str]:
    """Switches that the look has measured and none of whose values has won 2 % on its side.

    So much counts as equal when a winner is chosen. A switch that can't be as it is today is none of them, nor are the
    threads of workers beside training on the CPU: alone, a loader has the cores that the two would share.
    """
    is_shared = space.environment.device_kind == "cpu"
    left = [name for name in _LOOKED_AT if getattr(space.baseline, name) in space.parameters.get(name, ())]
    left = [name for name in left if not (is_shared and name == "worker_threads")]
    ratios = {name: list(_ratios(name, sides, space.baseline)) for name in left}
    return frozenset(name for name, found in ratios.items() if found and max(found) < 1 + space.policy.proof.worthwhile)


def has_idle_switch(config: TrainingConfig, baseline: TrainingConfig, idle: Collection[str]) -> bool:
    """Whether a configuration has one of these switches otherwise than today, though it could have it as today."""
    bound = set[str]() if config.num_workers else NEUTRAL_WITHOUT_WORKERS.keys()  # there is one value, whatever today's
    return any(getattr(config, name) != getattr(baseline, name) for name in idle if name not in bound)


def as_today(space: ResolvedSpace, idle: Collection[str]) -> ResolvedSpace:
    """The space with these switches as they are today."""
    fixed = {name: Choices(values=(getattr(space.baseline, name),)) for name in idle}
    return replace(space, domains={**space.domains, **fixed})


def without_idle_switches(config: TrainingConfig, space: ResolvedSpace, rates: RateModel) -> dict[str, object]:
    """The switches to put back to the baseline's values: they are believed to win less than 2 %."""
    found: dict[str, object] = {}
    for name in _SWITCHES:
        own, current = getattr(space.baseline, name), config.model_copy(update=found)
        if name not in space.parameters or own not in space.domains[name] or getattr(current, name) == own:
            continue
        settings = {**current.model_dump(), name: own}
        twin = TrainingConfig.model_validate(normalised(settings, space.facts, space.environment))
        if twin == current:
            continue
        here, there = rates.forecast([current, twin]).log_rate
        if there >= here - space.policy.proof.worthwhile:
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
