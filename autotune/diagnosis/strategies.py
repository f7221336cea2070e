"""The best trial of each strategy with each number of devices, and what it measured. Pure.

Takes the records of a study, and what a confirmation has measured again; hands on StrategyEntries, one device first.
Why a group is no faster is judged in `core.brakes`, what follows from it in `core.scaling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, hypot
from typing import Literal

from pydantic import BaseModel, ConfigDict

from autotune.analysis.selection_rules import rate_of_runs, ratio_of
from autotune.records.ceilings import device_key
from autotune.records.measurement import Measurement, Rate
from autotune.records.ranks import Communication, RankFigures
from autotune.records.recommendation import Confirmation, Ratio
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import TrainingConfig

__all__ = ["Strategy", "StrategyBest", "StrategyEntry", "best_known_ranks", "list_strategies"]

Strategy = Literal["single", "dp", "ddp"]
_ORDER: tuple[Strategy, ...] = ("single", "dp", "ddp")


class StrategyBest(BaseModel):
    """The fastest feasible trial of a strategy with so many devices. Rates are the group's, in samples per second."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    number: int
    """The trial's number in the study."""
    config: TrainingConfig
    runs: int
    """Runs of a confirmation that the rate is made from; 0: the trial's own."""
    samples_per_s: Rate
    speedup: Ratio | None
    """Over the best on one device, with its 95 % interval; None for that one, and where there is none."""
    limit_share: float
    """Peak memory over the memory limit."""
    loader_ceiling: float | None
    """The loaders alone, every rank at the pace of the slowest; None where not measured."""
    device_ceiling: float | None
    """The devices alone, likewise; under ddp without exchanging gradients."""
    ranks: tuple[RankFigures, ...]
    communication: Communication | None
    """Of this trial, or of one with the same settings of the step; with `static_graph`, under which nothing can be
    measured, of one that differs in that and in how gradients are kept alone."""

    @property
    def efficiency(self) -> Ratio | None:
        """The rate over the number of devices times the best rate of one, with its 95 % interval."""
        if self.speedup is None:
            return None
        ratio, count = self.speedup, self.config.world_size
        return Ratio(value=ratio.value / count, low=ratio.low / count, high=ratio.high / count)


class StrategyEntry(BaseModel):
    """A strategy with a number of devices, as far as the study has tried it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    strategy: Strategy
    world_size: int
    tried: int
    """Trials that ran, well or not."""
    feasible: int
    """Trials that the best was chosen from."""
    best: StrategyBest | None
    """None where none is feasible."""


def list_strategies(
    records: Sequence[TrialRecord], confirmations: Sequence[Confirmation] = ()
) -> tuple[StrategyEntry, ...]:
    """An entry for each strategy and number of devices that was tried: single first, then dp and ddp, fewest first.

    Trials are ranked by their own rates, all measured alike; what is told of the fastest is its confirmation's rate
    where there is one.
    """
    confirmed = {one.number: one for one in confirmations if one.is_feasible and one.runs}
    groups: dict[tuple[int, int], list[TrialRecord]] = {}
    for record in records:
        groups.setdefault((_ORDER.index(record.config.strategy), record.config.world_size), []).append(record)
    reference = _fastest(groups.get((_ORDER.index("single"), 1), []))
    entries = []
    for place, world_size in sorted(groups):
        tried = groups[place, world_size]
        fastest = _fastest(tried)
        entries.append(
            StrategyEntry(
                strategy=_ORDER[place],
                world_size=world_size,
                tried=len(tried),
                feasible=sum(_is_usable(record) for record in tried),
                best=None if fastest is None else _best(fastest, reference, records, confirmed),
            )
        )
    return tuple(entries)


def best_known_ranks(runs: Sequence[Measurement]) -> tuple[RankFigures, ...]:
    """The ranks of the run that knows most of their ceilings, the first of several; () where no run had any."""
    return max((run.ranks for run in runs), key=_count_ceilings, default=())


def _count_ceilings(ranks: Sequence[RankFigures]) -> int:
    known = [one for rank in ranks for one in (rank.loader_ceiling, rank.device_ceiling) if one is not None]
    return len(ranks) + len(known)  # any ranks are more than none


def _is_usable(record: TrialRecord) -> bool:
    return record.is_feasible and record.measurement is not None


def _fastest(records: Sequence[TrialRecord]) -> TrialRecord | None:
    return max(filter(_is_usable, records), key=lambda one: _measured(one).samples_per_s, default=None)


def _measured(record: TrialRecord) -> Measurement:
    assert record.measurement is not None, "a usable trial has a measurement"  # noqa: S101 - our own bug
    return record.measurement


def _best(
    record: TrialRecord,
    reference: TrialRecord | None,
    records: Sequence[TrialRecord],
    confirmed: dict[int, Confirmation],
) -> StrategyBest:
    own, again = _measured(record), confirmed.get(record.number)
    runs = () if again is None else again.runs
    known = (*runs, own)
    alike = [one.measurement for one in _like(record, records) if one.measurement is not None]
    return StrategyBest(
        number=record.number,
        config=record.config,
        runs=len(runs),
        samples_per_s=rate_of_runs(runs or (own,)),
        speedup=_speedup(record, reference, confirmed),
        limit_share=1.0 + (0.0 if record.score is None else record.score.violation),
        loader_ceiling=next((run.loader_ceiling for run in known if run.loader_ceiling is not None), None),
        device_ceiling=next((run.device_ceiling for run in known if run.device_ceiling is not None), None),
        ranks=best_known_ranks(known),
        communication=next((run.communication for run in (*known, *alike) if run.communication is not None), None),
    )


def _like(record: TrialRecord, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Those whose exchange is the same: first of the same step, then of one without what changes no exchange."""
    key, alike = device_key(record.config), _exchange_key(record.config)
    same = [one for one in records if device_key(one.config) == key]
    return same + [one for one in records if _exchange_key(one.config) == alike]


def _exchange_key(config: TrainingConfig) -> tuple[object, ...]:
    if config.ddp is None:
        return device_key(config)
    plain = config.ddp.model_copy(update={"static_graph": False, "gradient_as_bucket_view": False})
    return device_key(config.model_copy(update={"ddp": plain}))


def _speedup(record: TrialRecord, reference: TrialRecord | None, confirmed: dict[int, Confirmation]) -> Ratio | None:
    """Round by round where both were measured in turns; else the ratio of their rates, half-widths in quadrature."""
    if reference is None or reference.number == record.number:
        return None
    one, other = confirmed.get(record.number), confirmed.get(reference.number)
    if one is not None and other is not None:
        in_turns = ratio_of(one, other)
        if in_turns is not None:
            return in_turns
    ours = rate_of_runs((_measured(record),) if one is None else one.runs)
    theirs = rate_of_runs((_measured(reference),) if other is None else other.runs)
    spread = hypot(ours.relative_half_width, theirs.relative_half_width)
    value = ours.value / theirs.value
    return Ratio(value=value, low=value * exp(-spread), high=value * exp(spread))
