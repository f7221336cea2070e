"""Judge several devices: do they help, what keeps them from n times one device, and what would help.

Takes the records of a search and its machine; returns a StrategyComparison. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import median_high
from typing import Literal, TypeVar

from pydantic import JsonValue

from autotune.config.environment import Environment
from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.advice import advise, worth_giving
from autotune.diagnosis.bottlenecks import WAITING_CPU_FRACTION
from autotune.frozen import FrozenModel
from autotune.messages import advice as advice_messages
from autotune.messages import diagnosis as messages
from autotune.messages.advice import AdviceText
from autotune.models.evidence import rate_of_runs, ratio_of_runs
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
from autotune.records.result import Advice, RunVariation, changed_settings
from autotune.records.trial import TrialRecord
from autotune.settings_table import SETTINGS
from autotune.space.constraints import SINGLE, hook_obstacle
from autotune.space.scaling import with_batch

# The best trial of each strategy with each number of devices.

_T = TypeVar("_T")
_ORDER = ("single", "dp", "ddp")


class StrategyBest(FrozenModel):
    """The fastest feasible trial of a strategy and number of devices. Throughput is the group's, in samples/s."""

    number: int
    """Number of the trial."""
    config: TrainingConfig
    runs: int
    """Number of runs behind the throughput."""
    samples_per_s: Interval
    speedup: Interval | None
    """Over the best on one device, with its 95 % interval; None for that one itself, and if there
    is none."""
    limit_share: float
    """Peak memory over the memory limit."""
    loader_ceiling: float | None
    """Ceiling of the loaders, each as slow as the slowest; None if not measured."""
    device_ceiling: float | None
    """Ceiling of the devices, likewise; under ddp without exchanging gradients."""
    ranks: tuple[RankFigures, ...]
    communication: Communication | None
    """Exchange of gradients in this trial, or in one with the same settings of the step. It can't be
    measured with `static_graph`: then from a trial that differs only in that and in
    `gradient_as_bucket_view`."""

    @property
    def efficiency(self) -> float | None:
        """Return the speed-up over one device, divided by the number of devices; None if unknown."""
        return None if self.speedup is None else self.speedup.value / self.config.world_size


class StrategyEntry(FrozenModel):
    """The trials of a strategy with a number of devices."""

    group: str
    """Name of the strategy and the devices."""
    is_group: bool
    """True for several devices."""
    tried: int
    """Number of trials."""
    best: StrategyBest | None
    """None if no trial is feasible."""


def _list_strategies(
    records: Sequence[TrialRecord], spread: RunVariation
) -> tuple[StrategyEntry, ...]:
    """List each strategy and number of devices tried: single, then dp, then ddp, fewest first.

    Trials are ranked by their first runs, which are comparable; the throughput of the fastest is
    that of all its runs.
    """
    groups = defaultdict[tuple[int, int], list[TrialRecord]](list)
    for record in records:
        groups[_ORDER.index(record.config.strategy), record.config.world_size].append(record)
    reference = _fastest([record for record in records if record.config.strategy == "single"])
    entries = []
    for group in sorted(groups):
        tried = groups[group]
        fastest = _fastest(tried)
        entry = StrategyEntry(
            group=tried[0].config.group_name,
            is_group=tried[0].config.is_group,
            tried=len(tried),
            best=None if fastest is None else _best(fastest, reference, records, spread),
        )
        entries.append(entry)
    return tuple(entries)


def most_measured_ranks(runs: Sequence[Measurement]) -> tuple[RankFigures, ...]:
    """Return the ranks of the run that measured most of their ceilings; () if no run had ranks."""

    def count(ranks: Sequence[RankFigures]) -> int:
        sides = [side for rank in ranks for side in (rank.loader_ceiling, rank.device_ceiling)]
        return len(ranks) + len(sides) - sides.count(None)  # any ranks are more than none

    return max((run.ranks for run in runs), key=count, default=())


def first_known(figures: Iterable[_T | None]) -> _T | None:
    """Return the first figure that is not None; None if all are."""
    return next((figure for figure in figures if figure is not None), None)


def _fastest(records: Sequence[TrialRecord]) -> TrialRecord | None:
    feasible = [record for record in records if record.is_feasible]
    return max(feasible, key=lambda record: record.runs[0].samples_per_s, default=None)


def _best(
    record: TrialRecord,
    reference: TrialRecord | None,
    records: Sequence[TrialRecord],
    spread: RunVariation,
) -> StrategyBest:
    own = record.runs
    speedup = None
    if reference is not None and record.number != reference.number:
        speedup = ratio_of_runs(own, reference.runs, spread)
    alike = [other.measurement for other in _like(record, records) if other.measurement is not None]
    return StrategyBest(
        number=record.number,
        config=record.config,
        runs=len(own),
        samples_per_s=rate_of_runs(own, spread),
        speedup=speedup,
        limit_share=1.0 + (0.0 if record.score is None else record.score.violation),
        loader_ceiling=first_known(run.loader_ceiling for run in own),
        device_ceiling=first_known(run.device_ceiling for run in own),
        ranks=most_measured_ranks(own),
        communication=first_known(run.communication for run in (*own, *alike)),
    )


def _like(record: TrialRecord, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return trials with the same exchange of gradients: first those of the same step, then others."""
    keys = (device_key, _exchange_key)
    return [other for key in keys for other in records if key(other.config) == key(record.config)]


def _exchange_key(config: TrainingConfig) -> tuple[object, ...]:
    plain = {"static_graph": False, "gradient_as_bucket_view": False}
    return device_key(
        config.model_copy(update={"ddp": config.ddp_settings.model_copy(update=plain)})
    )


# The comparison: one device, DataParallel and DistributedDataParallel.

Helps = Literal["yes", "no", "not_measurably"]


class StrategyComparison(FrozenModel):
    """Strategies compared, and whether more than one device helps."""

    entries: tuple[StrategyEntry, ...]
    """One device first, then DataParallel and DDP, fewest devices first."""
    single: StrategyBest | None
    """The best on one device; None if none ran well."""
    fastest: StrategyBest | None = None
    """The fastest with several devices; None if none ran well."""
    helps: Helps | None = None
    """Answer whether `fastest` beats `single`: "not_measurably" if the interval of their ratio
    includes 1; None if one of them is missing."""
    other_changes: tuple[str, ...] = ()
    """Further settings in which the two differ, apart from strategy, devices and DDP's settings:
    part of the difference may be their effect."""
    bottlenecks: tuple[ScalingBottleneck, ...] = ()
    """Bottlenecks of `fastest`, the largest share first; () if no figure shows any."""
    advice: tuple[Advice, ...] = ()
    """Advice for `fastest`, the largest gain first."""


def compare_strategies(
    records: Sequence[TrialRecord], environment: Environment, spread: RunVariation
) -> StrategyComparison | None:
    """Compare the strategies of a search.

    Args:
        records: Its trials.
        environment: The machine.
        spread: Run-to-run variation.

    Returns:
        The comparison; None if no trial had more than one device.
    """
    if not any(record.config.is_group for record in records):
        return None
    entries = _list_strategies(records, spread)
    bests = [entry.best for entry in entries if entry.best is not None]
    single = next((best for best in bests if best.config.strategy == "single"), None)
    by_own_rate = {
        record.number: record.measurement.samples_per_s
        for record in records
        if record.measurement is not None
    }
    fastest = max(
        (best for best in bests if best.config.is_group),
        key=lambda best: by_own_rate[best.number],
        default=None,
    )
    if fastest is None:
        return StrategyComparison(entries=entries, single=single)
    case = GroupCase(group=fastest, single=single, environment=environment, records=records)
    bottlenecks = find_scaling_bottlenecks(case)
    changes = {} if single is None else changed_settings(fastest.config, single.config)
    return StrategyComparison(
        entries=entries,
        single=single,
        fastest=fastest,
        helps=_judge(fastest.speedup),
        other_changes=tuple(name for name in changes if name not in SINGLE),
        bottlenecks=bottlenecks,
        advice=list_scaling_advice(case, bottlenecks),
    )


def _judge(ratio: Interval | None) -> Helps | None:
    """Return whether a ratio is a gain or a loss beyond noise, as for a recommendation."""
    if ratio is None:
        return None
    if ratio.low > 1:
        return "yes"
    return "no" if ratio.high < 1 else "not_measurably"


# Bottlenecks of several devices. The times of a step, from the ceilings of loaders and devices and
# the exchange of gradients, give the cost of a bottleneck and what a change saves.

Cause = Literal[
    "communication", "loader", "uneven_rank", "small_batch", "settings", "shared_machine"
]

LEAST_SHARE = 0.05
"""Share of the group's time below which nothing is a bottleneck: over twice a window's 2 %
interval. Source: our convention."""
_STEP_SETTINGS = [setting.name for setting in SETTINGS if setting.is_of_kernels]
"""Settings of the step that a search varies, apart from the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds that a group needs for a sample, by side; 0 if not measured."""

    loader_s: float
    device_s: float
    exchange_s: float
    is_overlapped: bool
    """Loading overlaps with training."""

    @property
    def computing_s(self) -> float:
        """Seconds of the devices with their exchange."""
        return self.device_s + self.exchange_s

    @property
    def total_s(self) -> float:
        """Seconds of both sides together, by the model of a search."""
        return joint_s(self.loader_s, self.computing_s, is_overlapped=self.is_overlapped)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCase:
    """A group of devices to judge, and the best on one device."""

    group: StrategyBest
    single: StrategyBest | None
    """The best on one device; None if there is none."""
    environment: Environment
    records: Sequence[TrialRecord]
    """All trials of the search."""

    @property
    def cores(self) -> int:
        """Number of cores of all the group's hosts."""
        return self.environment.cores * max(1, len({rank.host for rank in self.group.ranks}))

    @property
    def actual(self) -> StepTime:
        """Present time: the slowest rank sets the group's pace."""
        return self._step_time(min)

    @property
    def even(self) -> StepTime:
        """Time with equal ranks, all as fast as the median."""
        return self._step_time(median_high)

    @property
    def ideal(self) -> StepTime | None:
        """Time with equal ranks, each device as fast as a single one; None if that was not measured."""
        alone = None if self.single is None else self.single.device_ceiling
        if not alone:
            return None
        return replace(self.even, device_s=1.0 / (self.group.config.world_size * alone))

    @property
    def step_changes(self) -> dict[str, JsonValue]:
        """Settings of the step in which the best on one device differs, with its values."""
        ours = self.group.config
        theirs = (self.single or self.group).config
        values = {name: getattr(theirs, name) for name in _STEP_SETTINGS}
        return {name: value for name, value in values.items() if value != getattr(ours, name)}

    def saved(self, before: StepTime, after: StepTime) -> float:
        """Return the share of the group's time that a change saves, in 0..1."""
        return min(1.0, max(0.0, (before.total_s - after.total_s) * self.group.samples_per_s.value))

    def _step_time(self, pick: Callable[[Iterable[float]], float]) -> StepTime:
        config = self.group.config
        exchange = self.group.communication

        def seconds(side: str) -> float:
            """Return the seconds for a sample, from the ranks' ceilings if all are known, else the group's."""
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
    """A bottleneck of several devices."""

    cause: Cause
    share: float
    """Share of the group's time that would be saved without it. Shares may overlap."""
    evidence: Note
    """The evidence, with its figures."""


def find_scaling_bottlenecks(case: GroupCase) -> tuple[ScalingBottleneck, ...]:
    """Return the bottlenecks of at least 5 % of the group's time, the largest share first."""
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
    words = messages.uneven_rank_evidence(ranks=uneven)
    return _saved(case, "uneven_rank", case.actual, case.even, words)


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
    """Return why devices are slower in the group than a single device; None if they are not.

    Source of what DataParallel does: pytorch.org, torch.nn.DataParallel.
    """
    even = case.even
    ideal = case.ideal
    single = case.single
    if single is None or ideal is None or even.device_s <= ideal.device_s:
        return None
    config = case.group.config
    is_cpu = case.environment.device_kind == "cpu"
    reached = ideal.device_s / even.device_s
    cause: Cause = "shared_machine"
    evidence = messages.shared_machine_evidence(
        ranks=config.world_size, cores=case.cores if is_cpu else None, reached_fraction=reached
    )
    if config.is_dp:
        cause = "communication"
        evidence = messages.data_parallel_evidence(
            world_size=config.world_size, reached_fraction=reached
        )
    elif case.step_changes:
        cause = "settings"
        evidence = messages.settings_evidence(settings=case.step_changes, reached_fraction=reached)
    elif single.config.micro_batch_size > config.micro_batch_size and not is_cpu:
        cause = "small_batch"
        evidence = messages.small_batch_evidence(
            micro_batch_size=config.micro_batch_size,
            single_batch_size=single.config.micro_batch_size,
            reached_fraction=reached,
        )
    return _saved(case, cause, even, ideal, evidence)


def _saved(
    case: GroupCase, cause: Cause, before: StepTime, after: StepTime, evidence: Note
) -> ScalingBottleneck:
    """Return a bottleneck whose share is what the group would save without it."""
    return ScalingBottleneck(cause=cause, share=case.saved(before, after), evidence=evidence)


# Advice for several devices: a table from cause to advice. Gains follow from ceilings; they are
# expectations, not measurements.

_FACTORS = (2, 4, 8)
"""Factors for the samples of an exchange, so that the global batch stays usable. Source: our
convention."""
_MOST_SAVED = 0.95
"""Largest credible saving, as a share of the group's time. Source: our convention."""


def list_scaling_advice(
    case: GroupCase, bottlenecks: Sequence[ScalingBottleneck]
) -> tuple[Advice, ...]:
    """Return advice against each bottleneck, the largest gain first, without gains below 3 %.

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
    """Advise fewer or smaller exchanges, or DistributedDataParallel instead of DataParallel.

    Source: pytorch.org, torch.nn.DataParallel.
    """
    exchange = case.group.communication
    tried = [record.config for record in case.records]
    if exchange is not None:
        yield _fewer_exchanges(case, exchange)
        if not any(config.ddp_settings.comm_hook for config in tried):
            yield _smaller_exchanges(case, exchange)
    elif not any(config.is_ddp for config in tried):
        yield _advise(case, advice_messages.try_ddp())


def _fewer_exchanges(case: GroupCase, exchange: Communication) -> Advice:
    """Advise more samples for each exchange: a larger batch if memory allows, else accumulation.

    A batch of k times the samples takes at most k times the time; the exchange takes the same.
    """
    exposed_s = exchange.exposed_s
    step_s = exchange.step_alone_s
    enough = [
        factor for factor in _FACTORS if exposed_s / (factor * step_s + exposed_s) < LEAST_SHARE
    ]
    wanted = min(enough, default=_FACTORS[-1])
    fitting = [factor for factor in _FACTORS if factor <= wanted and _fits(case, factor)]
    factor = max(fitting, default=wanted)
    setting = "micro_batch_size" if fitting else "grad_accum_steps"
    words = advice_messages.more_samples_per_exchange(
        settings={setting: factor * getattr(case.group.config, setting)},
        factor=factor,
        exposed_s=exposed_s,
        step_s=step_s,
        limit_fraction=case.group.limit_share,
    )
    after = replace(case.actual, exchange_s=case.actual.exchange_s / factor)
    return _advise(case, words, case.actual, after)


def _fits(case: GroupCase, factor: int) -> bool:
    """Return whether `factor` times the micro batch is sure to fit the memory limit."""
    config = case.group.config
    run = next(record.measurement for record in case.records if record.number == case.group.number)
    limit_bytes = 0 if run is None else round(run.peak_memory_bytes / case.group.limit_share)
    memory = memory_of_trials(
        (), case.records, limit_bytes, limit_is_ram=case.environment.has_only_ram
    )
    larger = with_batch(config, factor * config.micro_batch_size)
    return bool(memory.chance_to_fit([larger], limit_bytes)[0] >= POLICY.trials.sure_to_fit)


def _smaller_exchanges(case: GroupCase, exchange: Communication) -> Advice:
    """Advise to exchange gradients in 16 bits: half the bytes save at most half of the exchange.

    Source: pytorch.org, DDP communication hooks.
    """
    config = case.group.config
    is_bfloat16 = config.amp_dtype == "bfloat16" and hook_obstacle("bf16", case.environment) is None
    words = advice_messages.compress_gradients(
        settings={"ddp.comm_hook": "bf16" if is_bfloat16 else "fp16"},
        exchange_s=exchange.exchange_s,
        exposed_s=exchange.exposed_s,
    )
    left_s = max(0.0, exchange.exposed_s - exchange.exchange_s / 2)
    after = replace(case.actual, exchange_s=left_s / config.global_batch_size)
    return _advise(case, words, case.actual, after)


def _loader(case: GroupCase) -> Iterator[Advice]:
    """Advise more workers if cores are free or items wait, else more cores."""
    config = case.group.config
    even = case.even
    cores = case.cores
    if even.computing_s <= 0:
        return
    loaders = config.process_count
    factor = even.loader_s / even.computing_s
    running = loader_processes(config)
    reached = 1 / even.loader_s
    cost = first_known(
        record.measurement.loader_costs for record in case.records if record.measurement is not None
    )
    waits = cost is not None and cost.cpu_fraction < WAITING_CPU_FRACTION
    if waits or running < cores:
        workers = _whole(running * factor / loaders)
        if not waits:
            workers = min(workers, max(config.num_workers + 1, cores // loaders))
        words = advice_messages.more_workers(
            settings={"num_workers": workers},
            ranks=loaders,
            loader_processes=running,
            cores=cores,
            loader_samples_per_s=reached,
        )
        loader_s = even.loader_s * running / (workers * loaders)
        after = replace(even, loader_s=loader_s, is_overlapped=True)
        yield _advise(case, words, even, after)
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
        yield _advise(case, words, even, replace(even, loader_s=even.computing_s))


def _uneven_rank(case: GroupCase) -> Iterator[Advice]:
    words = advice_messages.find_slow_rank(ranks=[*uneven_ranks(case.group.ranks)])
    yield _advise(case, words, case.actual, case.even)


def _small_batch(case: GroupCase) -> Iterator[Advice]:
    if case.single is not None:
        words = advice_messages.batch_of_single_device(
            settings={"micro_batch_size": case.single.config.micro_batch_size},
            limit_fraction=case.single.limit_share,
        )
        yield _advise(case, words, case.even, case.ideal)


def _settings(case: GroupCase) -> Iterator[Advice]:
    words = advice_messages.settings_of_single_device(settings=case.step_changes)
    yield _advise(case, words, case.even, case.ideal)


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


def _advise(
    case: GroupCase,
    words: AdviceText,
    before: StepTime | None = None,
    after: StepTime | None = None,
) -> Advice:
    """Return advice with the gain of a change of step times, if given."""
    present = case.group.samples_per_s.value
    expected = None
    if before is not None and after is not None:
        expected = present / (1.0 - min(case.saved(before, after), _MOST_SAVED))
    return advise(words, present, expected)


def _whole(number: float) -> int:
    """Round up, ignoring errors of floating point."""
    return ceil(number - 1e-6)
