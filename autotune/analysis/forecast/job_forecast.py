"""The rates to expect of other settings in a diagnosis, by the model that a search proposes by. Pure.

Comes in: an Evidence, and pairs of its curves' points. Goes out: the rates of runs with the changes of each pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from typing import TypeAlias

from autotune.analysis.forecast.expectation import apply_changes, copy_ceilings, device_ceiling, loader_ceiling
from autotune.analysis.forecast.observations import ConfiguredPoint, rate_observations, side_observation
from autotune.analysis.forecast.rate_model import RateModel
from autotune.records.ceilings import Side
from autotune.records.diagnosis import CurvePoint, Evidence
from autotune.records.trial import TrialRecord, TrialResult

__all__ = ["Pair", "expected_rates", "rate_model_of"]

_SINGLE = {"strategy": "single", "world_size": 1, "ddp": None}
Pair: TypeAlias = tuple[CurvePoint | None, CurvePoint | None]
"""A point of the loader's curve and one of the device's; None: as today."""


def expected_rates(evidence: Evidence, pairs: Sequence[Pair]) -> list[float]:
    """The rates of runs with the changes of pairs: what a search on this job would forecast after its first looks.

    What today's run falls short of both sides by is expected to stay in part, less so with other threads.
    """
    configs = [apply_changes(evidence, *pair) for pair in pairs]
    if not configs:
        return []
    return [exp(log_rate) for log_rate in rate_model_of(evidence).forecast(configs).log_rate]


def rate_model_of(evidence: Evidence) -> RateModel:
    """The model of the machine that the curves and today's run tell."""
    curves, kind = evidence.curves, evidence.environment.device_kind
    looks = [_look(evidence, "loader", point) for point in curves.loader]
    looks += [_look(evidence, "device", point) for point in curves.device]
    looks += [_look(evidence, "copy", point) for point in curves.copy]
    today = TrialRecord(
        number=0, config=evidence.config, results=(TrialResult(outcome="ok", measurement=evidence.measurement),)
    )
    seen = list(rate_observations(looks, [today], kind))
    sides: tuple[tuple[Side, float], ...]
    sides = (
        ("loader", loader_ceiling(evidence)),
        ("device", device_ceiling(evidence)),
        ("copy", copy_ceilings(evidence).get(evidence.config.pin_memory, inf)),
    )
    own = {evidence.config, evidence.config.model_copy(update=_SINGLE)}  # curves are measured on one device
    known = {observation.kind for observation in seen if observation.config in own}
    seen += [
        side_observation(side, evidence.config, rate, kind) for side, rate in sides if side not in known and rate < inf
    ]
    return RateModel(seen, evidence.environment, evidence.run_spread)


def _look(evidence: Evidence, side: Side, point: CurvePoint) -> ConfiguredPoint:
    """A point in its configuration: curves are measured in one process on one device."""
    return ConfiguredPoint(side=side, config=apply_changes(evidence, point).model_copy(update=_SINGLE), point=point)
