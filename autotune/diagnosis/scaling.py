"""Judge several devices: what keeps them from n times one device, and what would bring them closer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import median_high
from typing import Literal

from pydantic import Field, JsonValue

from autotune.config.environment import Environment
from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.advice import advise, worth_giving
from autotune.diagnosis.bottlenecks import WAITING_CPU_FRACTION
from autotune.frozen import FrozenModel
from autotune.messages import advice as advice_messages
from autotune.messages import diagnosis as messages
from autotune.messages.advice import AdviceText
from autotune.models.evidence import assumed_spread, rate_of_runs, ratio_of_runs
from autotune.models.forecast import loader_processes
from autotune.models.memory import memory_of_trials
from autotune.models.throughput_law import joint_s
from autotune.note import Note
from autotune.policy import POLICY
from autotune.records.ceilings import device_key, overlaps
from autotune.records.measurement import (
    Communication,
    Interval,
    Measurement,
    RankFigures,
    name_devices,
    uneven_ranks,
)
from autotune.records.result import Advice, RunSpread, changed_settings
from autotune.records.trial import TrialRecord
from autotune.settings_table import SETTINGS
from autotune.space.constraints import hook_obstacle
from autotune.space.scaling import with_batch

# The best trial of each strategy with each number of devices, and what it measured. Pure.
#
# Comes in: the records of a study. Goes out: a StrategyEntry for each strategy and number of
# devices, a single device first.


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
    """Over the best on one device, with its 95 % interval; None for that one, and where there is
    none."""
    limit_share: float
    """Peak memory over the memory limit."""
    loader_ceiling: float | None
    """The loaders alone, every rank as slow as the slowest; None where not measured."""
    device_ceiling: float | None
    """The devices alone, likewise; under ddp without exchanging gradients."""
    ranks: tuple[RankFigures, ...]
    communication: Communication | None
    """Of this trial, or of a trial with the same settings of the step; with `static_graph`, under
    which it can't be measured, of a trial that differs only in that and in how gradients are
    kept."""

    @property
    def efficiency(self) -> Interval | None:
        """Return the throughput over that of one device times their number; None without a comparison."""
        if self.speedup is None:
            return None
        ranks = self.config.world_size
        return Interval(
            value=self.speedup.value / ranks,
            low=self.speedup.low / ranks,
            high=self.speedup.high / ranks,
        )


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

    Trials are ranked by their first runs, all measured alike; the rate given for the fastest is
    that of all its runs.
    """
    of_strategy = {
        name: [record for record in records if record.config.strategy == name] for name in _ORDER
    }
    reference = _fastest(of_strategy["single"])
    return tuple(
        StrategyEntry(
            strategy=strategy,
            world_size=world_size,
            tried=len(tried),
            feasible=sum(record.is_feasible for record in tried),
            best=None
            if (fastest := _fastest(tried)) is None
            else _best(fastest, reference, records, spread),
        )
        for strategy in _ORDER
        for world_size in sorted({record.config.world_size for record in records})
        if (
            tried := [
                record for record in of_strategy[strategy] if record.config.world_size == world_size
            ]
        )
    )


def best_known_ranks(runs: Sequence[Measurement]) -> tuple[RankFigures, ...]:
    """The ranks of the run that measured most of their ceilings, the first of several; () where no run had ranks."""
    return max((run.ranks for run in runs), key=_count_ceilings, default=())


def _count_ceilings(ranks: Sequence[RankFigures]) -> int:
    known = [
        rate
        for rank in ranks
        for rate in (rank.loader_ceiling, rank.device_ceiling)
        if rate is not None
    ]
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
    alike = [
        other.measurement
        for other in (record, *_like(record, records))
        if other.measurement is not None
    ]
    own = record.runs
    return StrategyBest(
        number=record.number,
        config=record.config,
        runs=len(own),
        samples_per_s=rate_of_runs(own, spread),
        speedup=None if reference is None else _speedup(record, reference, spread),
        limit_share=1.0 + (0.0 if record.score is None else record.score.violation),
        loader_ceiling=next(
            (run.loader_ceiling for run in own if run.loader_ceiling is not None), None
        ),
        device_ceiling=next(
            (run.device_ceiling for run in own if run.device_ceiling is not None), None
        ),
        ranks=best_known_ranks(own),
        communication=next(
            (run.communication for run in (*own, *alike) if run.communication is not None), None
        ),
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
    return (
        None
        if record.number == reference.number
        else ratio_of_runs(record.runs, reference.runs, spread)
    )


# Does another device help? One device, DataParallel and DistributedDataParallel compared. Pure.
#
# Comes in: the records of a study, and the machine. Goes out: a StrategyComparison with the best
# trial of each strategy, the answer, the bottlenecks of the fastest group, and advice.


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
    """Whether `fastest` beats `single`: "not_measurably" where the interval of their ratio includes
    1; None where one of them is missing."""
    other_changes: tuple[str, ...]
    """Settings beside strategy, devices and DDP's own in which the two differ: part of the
    difference may be theirs."""
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
        record.number: record.measurement.samples_per_s
        for record in records
        if record.measurement is not None
    }
    fastest = max(groups, key=lambda best: by_own_rate[best.number], default=None)
    bottlenecks = tuple[ScalingBottleneck, ...]()
    advice = tuple[Advice, ...]()
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
    return tuple(
        name
        for name in changed_settings(fastest.config, single.config)
        if name not in _GROUP_SETTINGS
    )


# What keeps several devices from as many times the rate of a single device, from figures alone.
# Pure.
#
# Comes in: a GroupCase, with the best trial of a group, the best on one device, the machine and the
# trials. Goes out: the group's bottlenecks, the largest share first. The times of a step, from the
# ceilings of loaders and devices and the exchange of gradients, say what a bottleneck costs, and to
# scaling_advice what a change saves.


Cause = Literal[
    "communication", "loader", "uneven_rank", "small_batch", "settings", "shared_machine"
]

LEAST_SHARE = 0.05
"""Of the group's time, below which nothing is a bottleneck: our own convention, over twice a
window's 2 % interval."""
_STEP_SETTINGS = [setting.name for setting in SETTINGS if setting.is_of_kernels]
"""Settings of the step that a search varies beside the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds that the group needs for a sample, by side; 0 for what was not measured."""

    loader_s: float
    device_s: float
    exchange_s: float
    is_overlapped: bool
    """Loading overlaps with training."""

    @property
    def computing_s(self) -> float:
        """The devices with their exchange."""
        return self.device_s + self.exchange_s

    @property
    def total_s(self) -> float:
        """Both sides together, by the law that a search forecasts by."""
        return joint_s(self.loader_s, self.computing_s, is_overlapped=self.is_overlapped)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCase:
    """A group to be judged, what it is compared with, and its time for a sample."""

    group: StrategyBest
    single: StrategyBest | None
    """The best on one device; None where there is none."""
    environment: Environment
    records: Sequence[TrialRecord]
    """All trials of the search."""

    @property
    def cores(self) -> int:
        """Those of all machines that the group was on."""
        return self.environment.cores * max(1, len({rank.host for rank in self.group.ranks}))

    @property
    def actual(self) -> StepTime:
        """Today: the slowest rank sets the group's time."""
        return self._step_time(min)

    @property
    def even(self) -> StepTime:
        """With equal ranks: all would be as fast as the better half is today."""
        return self._step_time(median_high)

    @property
    def ideal_device_s(self) -> float | None:
        """With each device as fast as a single one; None where the single device's ceiling was not measured."""
        alone = None if self.single is None else self.single.device_ceiling
        return 1.0 / (self.group.config.world_size * alone) if alone else None

    @property
    def step_changes(self) -> dict[str, JsonValue]:
        """Settings of the step in which the best on one device differs from the group, with its own values."""
        ours = self.group.config
        theirs = (self.single or self.group).config
        values = {name: getattr(theirs, name) for name in _STEP_SETTINGS}
        return {name: value for name, value in values.items() if value != getattr(ours, name)}

    def saved(self, before: StepTime, after: StepTime) -> float:
        """What a change saves of the group's time, in 0..1."""
        return min(1.0, max(0.0, (before.total_s - after.total_s) * self.group.samples_per_s.value))

    def _step_time(self, pick: Callable[[Iterable[float]], float]) -> StepTime:
        config = self.group.config
        exchange = self.group.communication

        def seconds(side: str) -> float:
            """Seconds that the group needs for a sample: by its ranks' rates where all are known, else by its own."""
            rates = [rate for rank in self.group.ranks if (rate := getattr(rank, side)) is not None]
            is_known = len(rates) == config.world_size
            rate = config.world_size * pick(rates) if is_known else getattr(self.group, side)
            return 1.0 / rate if rate else 0.0

        return StepTime(
            loader_s=seconds("loader_ceiling"),
            device_s=seconds("device_ceiling"),
            exchange_s=0.0 if exchange is None else exchange.exposed_s / config.global_batch_size,
            is_overlapped=overlaps(config, self.environment.device_kind),
        )


class ScalingBottleneck(FrozenModel):
    """Something that the group's time goes into."""

    cause: Cause
    share: float
    """Of the group's time: what would be saved without it. The shares of two bottlenecks may
    overlap."""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    """The figures that show it, by name."""
    evidence: str
    """The same in a sentence."""


def find_scaling_bottlenecks(case: GroupCase) -> tuple[ScalingBottleneck, ...]:
    """What takes at least 5 % of the group's time, the largest share first; () where no figure shows anything."""
    found = filter(None, [_uneven(case), _loading(case), _exchanging(case), _computing(case)])
    heavy = [bottleneck for bottleneck in found if bottleneck.share >= LEAST_SHARE]
    return tuple(sorted(heavy, key=lambda bottleneck: -bottleneck.share))


def _uneven(case: GroupCase) -> ScalingBottleneck | None:
    devices = name_devices(case.group.ranks)
    uneven = [
        messages.UnevenRank(rank=rank, device=devices[rank], side=slow.side, fraction=slow.fraction)
        for rank, slow in uneven_ranks(case.group.ranks).items()
    ]
    if not uneven:
        return None
    return _saved(
        case, "uneven_rank", case.actual, case.even, messages.uneven_rank_evidence(ranks=uneven)
    )


def _loading(case: GroupCase) -> ScalingBottleneck | None:
    even = case.even
    if even.loader_s <= 0:
        return None
    rates = messages.loader_evidence(
        ranks=case.group.config.process_count,
        is_overlapped=even.is_overlapped,
        loader_samples_per_s=1 / even.loader_s,
        device_samples_per_s=1 / even.computing_s if even.computing_s > 0 else None,
    )
    return _saved(case, "loader", even, replace(even, loader_s=0.0), rates)


def _exchanging(case: GroupCase) -> ScalingBottleneck | None:
    exchange = case.group.communication
    if exchange is None:
        return None
    exposed = messages.communication_evidence(
        bytes_exchanged=exchange.bytes_exchanged,
        exposed_s=exchange.exposed_s,
        exposed_fraction=exchange.exposed_fraction,
        hidden_fraction=exchange.hidden_fraction,
    )
    return _saved(case, "communication", case.actual, replace(case.actual, exchange_s=0.0), exposed)


def _computing(case: GroupCase) -> ScalingBottleneck | None:
    """Devices that are slower in the group than a single device is.

    Source of what DataParallel does: pytorch.org, torch.nn.DataParallel.
    """
    even = case.even
    ideal_s = case.ideal_device_s
    single = case.single
    config = case.group.config
    if single is None or ideal_s is None or even.device_s <= ideal_s:
        return None
    is_cpu = case.environment.device_kind == "cpu"
    batch = config.micro_batch_size
    single_batch = single.config.micro_batch_size
    reached = ideal_s / even.device_s
    cause: Cause
    if config.strategy == "dp":
        cause = "communication"
        evidence = messages.data_parallel_evidence(
            world_size=config.world_size, reached_fraction=reached
        )
    elif case.step_changes:
        cause = "settings"
        evidence = messages.settings_evidence(settings=case.step_changes, reached_fraction=reached)
    elif single_batch > batch and not is_cpu:
        cause = "small_batch"
        evidence = messages.small_batch_evidence(
            micro_batch_size=batch, single_batch_size=single_batch, reached_fraction=reached
        )
    else:
        cause = "shared_machine"
        cores = case.cores if is_cpu else None
        evidence = messages.shared_machine_evidence(
            ranks=config.world_size, cores=cores, reached_fraction=reached
        )
    return _saved(case, cause, even, replace(even, device_s=ideal_s), evidence)


def _saved(
    case: GroupCase, cause: Cause, before: StepTime, after: StepTime, evidence: Note
) -> ScalingBottleneck:
    """Return a bottleneck whose share is what the group would save without it."""
    share = case.saved(before, after)
    return ScalingBottleneck(
        cause=cause, share=share, figures=evidence.figures, evidence=evidence.text
    )


# What brings several devices closer to as many times the rate of a single device: a table from
# cause to advice. Pure.
#
# Comes in: a GroupCase and its bottlenecks. Goes out: advice, the largest gain first. Gains are
# what the ceilings leave room for: expectations, not measurements.


_FACTORS = (2, 4, 8)
"""Times as many samples for an exchange: our own convention, so that the global batch stays in
reach."""
_MOST_SAVED = 0.95
"""Of the group's time, beyond which ceilings are not believed: our own convention."""


def list_scaling_advice(
    case: GroupCase, bottlenecks: Sequence[ScalingBottleneck]
) -> tuple[Advice, ...]:
    """What helps against each bottleneck; the largest gain first, what has no figure last, below 3 % not at all.

    A setting is advised only once, with the value of the larger gain.
    """
    advice: list[Advice] = []
    against = [piece for bottleneck in bottlenecks for piece in _AGAINST[bottleneck.cause](case)]
    for piece in worth_giving(against):
        if not piece.settings or all(
            piece.settings.keys() != other.settings.keys() for other in advice
        ):
            advice.append(piece)
    return tuple(advice)


def _communication(case: GroupCase) -> Iterator[Advice]:
    """Source: pytorch.org, torch.nn.DataParallel, which recommends DistributedDataParallel instead."""
    exchange = case.group.communication
    tried = [record.config for record in case.records]
    if exchange is not None:
        yield _fewer_exchanges(case, exchange)
        if not any(config.ddp is not None and config.ddp.comm_hook for config in tried):
            yield _smaller_exchanges(case, exchange)
    elif all(config.strategy != "ddp" for config in tried):
        yield _advise(case, advice_messages.try_ddp())


def _fewer_exchanges(case: GroupCase, exchange: Communication) -> Advice:
    """More samples for each exchange: by a larger batch where memory has room, else by accumulation.

    A batch of k times the samples takes at most k times the time, and the exchange takes what it
    took.
    """
    exposed_s = exchange.exposed_s
    step_s = exchange.step_alone_s
    used = case.group.limit_share
    enough = [
        factor for factor in _FACTORS if exposed_s / (factor * step_s + exposed_s) < LEAST_SHARE
    ]
    wanted = min(enough, default=_FACTORS[-1])
    fitting = [factor for factor in _FACTORS if factor <= wanted and _fits(case, factor)]
    factor = max(fitting, default=wanted)
    setting = "micro_batch_size" if fitting else "grad_accum_steps"
    change = case.actual, replace(case.actual, exchange_s=case.actual.exchange_s / factor)
    words = advice_messages.more_samples_per_exchange(
        settings={setting: factor * getattr(case.group.config, setting)},
        factor=factor,
        exposed_s=exposed_s,
        step_s=step_s,
        limit_fraction=used,
    )
    return _advise(case, words, change)


def _fits(case: GroupCase, factor: int) -> bool:
    """Whether the group's memory is sure to stay within the limit with so many times its micro batch."""
    config = case.group.config
    run = next(record.measurement for record in case.records if record.number == case.group.number)
    limit_bytes = 0 if run is None else round(run.peak_memory_bytes / case.group.limit_share)
    memory = memory_of_trials(
        (), case.records, limit_bytes, limit_is_ram=case.environment.has_only_ram
    )
    larger = with_batch(config, factor * config.micro_batch_size)
    return bool(memory.chance_to_fit([larger], limit_bytes)[0] >= POLICY.trials.sure_to_fit)


def _smaller_exchanges(case: GroupCase, exchange: Communication) -> Advice:
    """Gradients in 16 bits during the exchange: half the bytes save at most half of it.

    Source: pytorch.org, DDP communication hooks.
    """
    config = case.group.config
    is_bfloat16 = config.amp_dtype == "bfloat16" and hook_obstacle("bf16", case.environment) is None
    left_s = max(0.0, exchange.exposed_s - exchange.exchange_s / 2)
    change = case.actual, replace(case.actual, exchange_s=left_s / config.global_batch_size)
    words = advice_messages.compress_gradients(
        settings={"ddp.comm_hook": "bf16" if is_bfloat16 else "fp16"},
        exchange_s=exchange.exchange_s,
        exposed_s=exchange.exposed_s,
    )
    return _advise(case, words, change)


def _loader(case: GroupCase) -> Iterator[Advice]:
    """More workers where cores are free or items wait, else more cores."""
    config = case.group.config
    even = case.even
    cores = case.cores
    if even.computing_s <= 0:
        return
    loaders = config.process_count
    factor = even.loader_s / even.computing_s
    running = loader_processes(config)
    reached = 1 / even.loader_s
    costs = (
        record.measurement.loader_costs for record in case.records if record.measurement is not None
    )
    cost = next(filter(None, costs), None)
    waits = cost is not None and cost.cpu_fraction < WAITING_CPU_FRACTION
    if waits or running < cores:
        workers = _whole(running * factor / loaders)
        if not waits:
            workers = min(workers, max(config.num_workers + 1, cores // loaders))
        after = replace(
            even, loader_s=even.loader_s * running / (workers * loaders), is_overlapped=True
        )
        words = advice_messages.more_workers(
            settings={"num_workers": workers},
            ranks=loaders,
            loader_processes=running,
            cores=cores,
            loader_samples_per_s=reached,
        )
        yield _advise(case, words, (even, after))
    elif case.environment.device_kind == "cpu":
        words = advice_messages.more_cores_for_loaders(
            loader_processes=running, cores=cores, loader_samples_per_s=reached
        )
        yield _advise(case, words)
    else:
        words = advice_messages.more_cores_or_cheaper_items(
            cores_needed=_whole(cores * factor),
            loader_processes=running,
            cores=cores,
            loader_samples_per_s=reached,
            device_samples_per_s=1 / even.computing_s,
        )
        yield _advise(case, words, (even, replace(even, loader_s=even.computing_s)))


def _uneven_rank(case: GroupCase) -> Iterator[Advice]:
    words = advice_messages.find_slow_rank(ranks=[*uneven_ranks(case.group.ranks)])
    yield _advise(case, words, (case.actual, case.even))


def _small_batch(case: GroupCase) -> Iterator[Advice]:
    if case.single is not None:
        words = advice_messages.batch_of_single_device(
            settings={"micro_batch_size": case.single.config.micro_batch_size},
            limit_fraction=case.single.limit_share,
        )
        yield _advise(case, words, _as_single(case))


def _settings(case: GroupCase) -> Iterator[Advice]:
    yield _advise(
        case,
        advice_messages.settings_of_single_device(settings=case.step_changes),
        _as_single(case),
    )


def _shared_machine(case: GroupCase) -> Iterator[Advice]:
    if case.environment.device_kind == "cpu":
        yield _advise(case, advice_messages.more_cores_for_ranks(cores=case.cores))


_AGAINST: dict[Cause, Callable[[GroupCase], Iterator[Advice]]] = {
    "communication": _communication,
    "loader": _loader,
    "uneven_rank": _uneven_rank,
    "small_batch": _small_batch,
    "settings": _settings,
    "shared_machine": _shared_machine,
}


def _as_single(case: GroupCase) -> tuple[StepTime, StepTime] | None:
    """Before and after: each device as fast as a single device; None where that was not measured."""
    return (
        None
        if case.ideal_device_s is None
        else (case.even, replace(case.even, device_s=case.ideal_device_s))
    )


def _advise(
    case: GroupCase, words: AdviceText, change: tuple[StepTime, StepTime] | None = None
) -> Advice:
    """Return advice from the step times before and after a change; None: without a figure."""
    present = case.group.samples_per_s.value
    expected = None if change is None else present / (1.0 - min(case.saved(*change), _MOST_SAVED))
    return advise(words, present, expected)


def _whole(number: float) -> int:
    """Rounded up, without what floating point has added."""
    return ceil(number - 1e-6)
