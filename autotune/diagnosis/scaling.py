"""Does another device help? One device, DataParallel and DistributedDataParallel compared. Pure.

Comes in: the records of a study, and the machine. Goes out: a StrategyComparison with the best trial of each strategy,
the answer, the bottlenecks of the fastest group, and advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autotune.analysis.decisions.run_spread import assumed_spread
from autotune.diagnosis.scaling_advice import list_scaling_advice
from autotune.diagnosis.scaling_bottlenecks import GroupCase, ScalingBottleneck, find_scaling_bottlenecks
from autotune.diagnosis.strategies import StrategyBest, StrategyEntry, list_strategies
from autotune.frozen import FrozenModel
from autotune.records.diagnosis import Advice
from autotune.records.measurement import Interval
from autotune.records.run_spread import RunSpread
from autotune.records.run_summary import changed_settings
from autotune.records.trial import TrialRecord
from autotune.settings.environment import Environment

__all__ = ["Helps", "StrategyComparison", "compare_strategies"]

Helps = Literal["yes", "no", "not_measurably"]

_GROUP_SETTINGS = frozenset({"strategy", "world_size", "ddp"})


class StrategyComparison(FrozenModel):
    """Strategies side by side, and whether more than one device helps."""

    entries: tuple[StrategyEntry, ...]
    """One device first, then DataParallel and DDP, fewest devices first."""
    single: StrategyBest | None
    """The best on one device; None where none ran well."""
    fastest: StrategyBest | None
    """The fastest with more than one device; None where none ran well."""
    helps: Helps | None
    """Whether `fastest` beats `single`: "not_measurably" where the interval of their ratio includes 1; None where
    one of them is missing."""
    other_changes: tuple[str, ...]
    """Settings beside strategy, devices and DDP's own in which the two differ: part of the difference may be theirs."""
    bottlenecks: tuple[ScalingBottleneck, ...]
    """The bottlenecks of `fastest`, the largest share first; () where no figure shows any."""
    advice: tuple[Advice, ...]
    """What should help it, the largest gain first."""


def compare_strategies(
    records: Sequence[TrialRecord],
    environment: Environment,
    spread: RunSpread | None = None,
) -> StrategyComparison | None:
    """Compare the strategies of a study; None where no trial had more than one device.

    Without a learned run-to-run variation the usual one of such devices is assumed.
    """
    if all(record.config.world_size == 1 for record in records):
        return None
    entries = list_strategies(records, spread or assumed_spread(environment.device_kind))
    single = next((entry.best for entry in entries if entry.strategy == "single"), None)
    groups = [entry.best for entry in entries if entry.best is not None and entry.world_size > 1]
    by_own_rate = {
        record.number: record.measurement.samples_per_s for record in records if record.measurement is not None
    }
    fastest = max(groups, key=lambda best: by_own_rate[best.number], default=None)
    bottlenecks, advice = tuple[ScalingBottleneck, ...](), tuple[Advice, ...]()
    if fastest is not None:
        case = GroupCase(group=fastest, single=single, environment=environment, records=records)
        bottlenecks = find_scaling_bottlenecks(case)
        advice = list_scaling_advice(case, bottlenecks)
    return StrategyComparison(
        entries=entries,
        single=single,
        fastest=fastest,
        helps=None if fastest is None else _judge(fastest.speedup),
        other_changes=_other_changes(single, fastest),
        bottlenecks=bottlenecks,
        advice=advice,
    )


def _judge(ratio: Interval | None) -> Helps | None:
    """Only what lies beyond noise is a gain, or a loss, as for a recommendation."""
    if ratio is None:
        return None
    if ratio.low > 1:
        return "yes"
    return "no" if ratio.high < 1 else "not_measurably"


def _other_changes(single: StrategyBest | None, fastest: StrategyBest | None) -> tuple[str, ...]:
    if single is None or fastest is None:
        return ()
    return tuple(name for name in changed_settings(fastest.config, single.config) if name not in _GROUP_SETTINGS)
