"""The best trial of each strategy with each number of devices, and what it measured. Pure.

Comes in: the records of a study. Goes out: a StrategyEntry for each strategy and number of devices, a single device
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autotune.analysis.decisions.run_spread import rate_of_runs, ratio_of_runs
from autotune.frozen import FrozenModel
from autotune.records.ceilings import device_key
from autotune.records.measurement import Interval, Measurement
from autotune.records.ranks import Communication, RankFigures
from autotune.records.run_spread import RunSpread
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import TrainingConfig

__all__ = ["Strategy", "StrategyBest", "StrategyEntry", "best_known_ranks", "list_strategies"]

Strategy = Literal["single", "dp", "ddp"]
_ORDER: tuple[Strategy, ...] = ("single", "dp", "ddp")


class StrategyBest(FrozenModel):
    """The fastest feasible trial of a strategy with so many devices. Rates are the group's, in samples per second."""

    number: int
    """The trial's number in the study."""
    config: TrainingConfig
    runs: int
    """Runs that the rate comes from."""
    samples_per_s: Interval
    speedup: Interval | None
    """Over the best on one device, with its 95 % interval; None for that one, and where there is none."""
    limit_share: float
    """Peak memory over the memory limit."""
    loader_ceiling: float | None
    """The loaders alone, every rank as slow as the slowest; None where not measured."""
    device_ceiling: float | None
    """The devices alone, likewise; under ddp without exchanging gradients."""
    ranks: tuple[RankFigures, ...]
    communication: Communication | None
    """Of this trial, or of a trial with the same settings of the step; with `static_graph`, under which it can't be
    measured, of a trial that differs only in that and in how gradients are kept."""

    @property
    def efficiency(self) -> Interval | None:
        """Return the throughput over that of one device times their number; None without a comparison."""
        if self.speedup is None:
            return None
        ranks = self.config.world_size
        return Interval(value=self.speedup.value / ranks, low=self.speedup.low / ranks, high=self.speedup.high / ranks)


class StrategyEntry(FrozenModel):
    """A strategy with a number of devices, and the study's trials of it."""

    strategy: Strategy
    world_size: int
    tried: int
    """Trials that ran, well or not."""
    feasible: int
    """Trials that the best was chosen from."""
    best: StrategyBest | None
    """None where none is feasible."""


def list_strategies(records: Sequence[TrialRecord], spread: RunSpread) -> tuple[StrategyEntry, ...]:
    """An entry for each strategy and number of devices that was tried: single first, then dp and ddp, fewest first.

    Trials are ranked by their first runs, all measured alike; the rate given for the fastest is that of all its runs.
    """
    of_strategy = {name: [record for record in records if record.config.strategy == name] for name in _ORDER}
    reference = _fastest(of_strategy["single"])
    return tuple(
        StrategyEntry(
            strategy=strategy,
            world_size=world_size,
            tried=len(tried),
            feasible=sum(record.is_feasible for record in tried),
            best=None if (fastest := _fastest(tried)) is None else _best(fastest, reference, records, spread),
        )
        for strategy in _ORDER
        for world_size in sorted({record.config.world_size for record in records})
        if (tried := [record for record in of_strategy[strategy] if record.config.world_size == world_size])
    )


def best_known_ranks(runs: Sequence[Measurement]) -> tuple[RankFigures, ...]:
    """The ranks of the run that measured most of their ceilings, the first of several; () where no run had ranks."""
    return max((run.ranks for run in runs), key=_count_ceilings, default=())


def _count_ceilings(ranks: Sequence[RankFigures]) -> int:
    known = [rate for rank in ranks for rate in (rank.loader_ceiling, rank.device_ceiling) if rate is not None]
    return len(ranks) + len(known)  # any ranks are more than none


def _fastest(records: Sequence[TrialRecord]) -> TrialRecord | None:
    feasible = [record for record in records if record.is_feasible]
    return max(feasible, key=lambda record: record.runs[0].samples_per_s, default=None)


def _best(
    record: TrialRecord,
    reference: TrialRecord | None,
    records: Sequence[TrialRecord],
    spread: RunSpread,
) -> StrategyBest:
    alike = [other.measurement for other in (record, *_like(record, records)) if other.measurement is not None]
    own = record.runs
    return StrategyBest(
        number=record.number,
        config=record.config,
        runs=len(own),
        samples_per_s=rate_of_runs(own, spread),
        speedup=None if reference is None else _speedup(record, reference, spread),
        limit_share=1.0 + (0.0 if record.score is None else record.score.violation),
        loader_ceiling=next((run.loader_ceiling for run in own if run.loader_ceiling is not None), None),
        device_ceiling=next((run.device_ceiling for run in own if run.device_ceiling is not None), None),
        ranks=best_known_ranks(own),
        communication=next((run.communication for run in (*own, *alike) if run.communication is not None), None),
    )


def _like(record: TrialRecord, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Trials with the same exchange: first those of the same step, then those that differ in other settings."""
    keys = (device_key, _exchange_key)
    return [other for key in keys for other in records if key(other.config) == key(record.config)]


def _exchange_key(config: TrainingConfig) -> tuple[object, ...]:
    if config.ddp is None:
        return device_key(config)
    plain = config.ddp.model_copy(update={"static_graph": False, "gradient_as_bucket_view": False})
    return device_key(config.model_copy(update={"ddp": plain}))


def _speedup(record: TrialRecord, reference: TrialRecord, spread: RunSpread) -> Interval | None:
    return None if record.number == reference.number else ratio_of_runs(record.runs, reference.runs, spread)
