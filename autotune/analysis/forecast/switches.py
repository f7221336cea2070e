"""Find switches that are not known to win anything: they stay at the baseline unless something speaks for them.

Comes in: the points of both sides measured alone, or a rate model. Goes out: which switches these have shown to win
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
from autotune.settings_table import SETTINGS
from autotune.space.constraints import normalised
from autotune.space.resolved_space import ResolvedSpace

__all__ = ["changes_no_effect_setting", "no_effect_settings", "pin_to_baseline", "unhelpful_switches"]

_SWITCHES = [setting for setting in SETTINGS if setting.is_kept]
_LOOKED_AT = [one.name for one in _SWITCHES if (one.is_of_loader or one.is_in_curves) and "copy" not in one.sides]
"""Switches whose effect on a side is measured alone, others unchanged; of pinning the copies tell."""


def no_effect_settings(sides: Sequence[ConfiguredPoint], space: ResolvedSpace) -> frozenset[str]:
    """Return the switches that were measured alone, and none of whose values gained 2 % on its side.

    Less counts as equal when a winner is chosen. A switch that can't have the baseline's value is none of them, nor are
    the threads of workers next to training on the CPU: alone, a loader has the cores that the two would share.
    """
    is_shared = space.environment.device_kind == "cpu"
    left = [name for name in _LOOKED_AT if getattr(space.baseline, name) in space.parameters.get(name, ())]
    left = [name for name in left if not (is_shared and name == "worker_threads")]
    ratios = {name: list(_ratios(name, sides, space.baseline)) for name in left}
    return frozenset(name for name, found in ratios.items() if found and max(found) < 1 + space.policy.proof.worthwhile)


def changes_no_effect_setting(config: TrainingConfig, baseline: TrainingConfig, idle: Collection[str]) -> bool:
    """Return True for a configuration that changes a switch that the probe found to make no difference."""
    bound = (
        set[str]() if config.num_workers else NEUTRAL_WITHOUT_WORKERS.keys()
    )  # there is one value, whatever the baseline's
    return any(getattr(config, name) != getattr(baseline, name) for name in idle if name not in bound)


def pin_to_baseline(space: ResolvedSpace, idle: Collection[str]) -> ResolvedSpace:
    """Return the space with these switches fixed at the baseline's values."""
    fixed = {name: Choices(values=(getattr(space.baseline, name),)) for name in idle}
    return replace(space, domains={**space.domains, **fixed})


def unhelpful_switches(config: TrainingConfig, space: ResolvedSpace, rates: RateModel) -> dict[str, object]:
    """Return the switches to put back to the baseline's values: they are believed to gain less than 2 %."""
    found: dict[str, object] = {}
    for name in (switch.name for switch in _SWITCHES):
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
    """Yield, of points that differ in a switch alone, the throughput of another value over that of the baseline's."""
    own = getattr(baseline, name)
    known = {(one.side, one.config): one.point.ceiling for one in sides if one.point.ceiling is not None}
    for (side, config), ceiling in known.items():
        usual = known.get((side, config.model_copy(update={name: own})))
        if getattr(config, name) != own and usual is not None:
            yield ceiling.samples_per_s / usual.samples_per_s
