"""Turn trials and ceilings into observations of the throughput model; choose the ceilings to measure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, inf, log, log2, sqrt
from statistics import fmean
from typing import Literal

from autotune.config.plan import Choices
from autotune.config.training_config import LOADER_SETTINGS, NEUTRAL_WITHOUT_WORKERS, TrainingConfig
from autotune.messages.search import one_side_not_measured
from autotune.models.evidence import run_of
from autotune.models.statistics import NORMAL_95, mean_rate
from autotune.models.throughput import AMPLE, Observation, RateModel
from autotune.note import Note
from autotune.records.ceilings import SIDES, Ceiling, CeilingBook, host_ceiling_of, loader_key
from autotune.records.result import CurvePoint, Curves
from autotune.records.trial import TrialRecord
from autotune.settings_table import SETTINGS, Side
from autotune.space.constraints import normalised
from autotune.space.ranges import spread, whole_numbers
from autotune.space.scaling import samples_within
from autotune.space.space import ResolvedSpace

# What the curves of loader and device should measure, and what they and the trials tell the models.
#
# Comes in: the space, the measured curves, the trials. Goes out: the variations of the baseline to
# measure, and observations of rates, each with its uncertainty. Pure.


_SIDE_SD = {"cpu": 0.08}
"""Relative standard deviation between a side alone and the same side in a run, by chance and, on a
CPU, by shared cores: our own convention."""
_OTHER_SIDE_SD = 0.02
"""The same on a device of its own: our own convention."""
_HOST_SD = 0.3
"""The same of a host's launching alone, and of its fetching of prefetched batches. Source:
docs/gpu.md, where an H100's host launched one step in 2.6, 4.1 and 4.5 ms within minutes."""
_LEAST_RUN_SD = 0.002
"""Of a run by its own window, however narrow that is: our own convention; the spread between runs
comes on top."""
_STOPPED_SD = 0.05
"""In addition, of a trial that was stopped early, before its restarts and its whole queue were
measured: our own convention."""
_MOST_VALUES = 6
"""Values of a number that a curve measures: our own convention."""
_WORKERS_ALONE = frozenset({"num_workers", "persistent_workers", "prefetch_factor"})
"""What a point changes that differs from the baseline in its number of workers; torch's own
prefetch factor is set where there are some."""
AMONG_WORKERS = [
    setting.name for setting in SETTINGS if setting.needs == "num_workers" and setting.is_kept
]
"""Settings that show where several workers hold each other up."""
_SEVERAL = 2
"""Workers from which on several share the items."""
_FEW_WORKERS = 4
"""As many as these are measured with, where the cores suffice: our own convention."""
_MOST_TRIALS = 60
"""Trials that a model of rates is made from: our own convention, more than a search makes by
itself. A fit takes time by the cube of their number, and each forecast time and memory in
proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredPoint:
    """A point of a curve, with the configuration that it was measured in."""

    side: Side
    config: TrainingConfig
    point: CurvePoint


def changed(space: ResolvedSpace, changes: dict[str, object]) -> TrainingConfig:
    """The baseline on one device with other values of some settings, as a curve measures it."""
    single = {"strategy": "single", "world_size": 1, "ddp": None}
    settings = {**space.baseline.model_dump(), **single, **changes}
    budget = changes.get("max_tokens")
    if isinstance(budget, int):
        settings["micro_batch_size"] = samples_within(budget, space.baseline)
    return TrainingConfig.model_validate(normalised(settings, space.facts, space.environment))


def loader_variations(space: ResolvedSpace, book: CeilingBook) -> list[TrainingConfig]:
    """Return the baseline with other values of the loader's settings; none where no device could keep up with it.

    With many workers the ends of the batch are measured too: there the cost of collating a batch
    shows.

    Time may run out before the last one. So what decides most comes first: as many workers as there
    are cores, then other numbers of several workers. None and one come last, and whether workers
    persist.
    """
    if is_loader_out_of_reach(space, book):
        return []
    seen = {loader_key(changed(space, {}))}
    found = list[TrainingConfig]()
    for config in _loader_candidates(space):
        if loader_key(config) not in seen:
            seen.add(loader_key(config))
            found.append(config)
    return found


def _loader_candidates(space: ResolvedSpace) -> Iterator[TrainingConfig]:
    """Yield loader settings to measure, in order; some repeat others or the baseline."""
    domains = space.domains
    own = space.baseline
    cores = space.environment.cores
    counts = whole_numbers(domains["num_workers"])
    may_persist = True in domains["persistent_workers"]

    def with_workers(count: int, **changes: object) -> TrainingConfig:
        return changed(
            space,
            {"num_workers": count, "persistent_workers": count > 0 and may_persist, **changes},
        )

    tried = spread(counts, _MOST_VALUES)
    if cores in counts:  # in place of the nearest, unless that is one of the ends
        nearest = min(tried, key=lambda count: abs(count - cores))
        tried = [count for count in tried if count != nearest or count in {tried[0], tried[-1]}]
        tried = [*dict.fromkeys((cores, *tried))]
    ordered = by_promise(tried, cores)
    yield from (with_workers(count) for count in ordered if count >= _SEVERAL)
    workers = own.num_workers or min(max(counts), cores)
    most = max(counts)
    last = {"num_workers", "persistent_workers", *AMONG_WORKERS}
    for name in [name for name in LOADER_SETTINGS if name not in last] if workers else ():
        for value in domains[name]:
            yield with_workers(workers, **{name: value})
    several = max(workers, min(most, max(2, min(cores, _FEW_WORKERS))))
    for name in (
        [name for name in AMONG_WORKERS if len(list(domains[name])) > 1] if several > 1 else ()
    ):
        for value in domains[name]:
            yield with_workers(several, **{name: value})
    setting = space.batch_setting
    batches = whole_numbers(domains[setting])
    for batch in {min(batches), max(batches)} - {getattr(own, setting)} if most else ():
        yield with_workers(most, **{setting: batch})
    yield from (with_workers(count) for count in ordered if count < _SEVERAL)
    for value in domains["persistent_workers"] if workers else ():
        yield with_workers(workers, persistent_workers=value)


def by_promise(counts: Iterable[int], cores: int) -> list[int]:
    """Return numbers of workers by what they may decide: the cores, then the nearest, and none and one last."""
    return sorted(
        counts, key=lambda count: (count < _SEVERAL, abs(log2(max(count, 1) / cores)), count)
    )


def adds_workers_in_vain(points: Sequence[CurvePoint], changes: Mapping[str, object]) -> bool:
    """Return True where a loader's point would only add workers to a loader that has stopped to grow.

    Args:
        points: What was measured of the loader so far, the baseline's point among them.
        changes: What the point would change of the baseline.
    """
    count = changes.get("num_workers")
    if not isinstance(count, int) or not set(changes) <= _WORKERS_ALONE:
        return False
    rates = dict[int, float]()
    for point in points:
        workers = point.changes.get("num_workers", 0)
        if (
            point.ceiling is None
            or not isinstance(workers, int)
            or not set(point.changes) <= _WORKERS_ALONE
        ):
            continue
        if 0 < workers < count:
            rates[workers] = max(point.ceiling.samples_per_s, rates.get(workers, 0.0))
    if len(rates) < 2:  # two numbers of workers show how a loader grows
        return False
    fewer, more = sorted(rates)[-2:]
    return rates[more] < 1.05 * rates[fewer]


def device_variations(space: ResolvedSpace, book: CeilingBook) -> Iterator[TrainingConfig]:
    """The baseline with another value of one of the step's settings.

    Of a device that no number of workers could keep busy, the largest batch alone is measured: it
    shows how far the device is from becoming the bottleneck, and what it takes of the memory.

    Time may run out before the last one. So what costs no more than the baseline's own batch comes
    first, then larger batches and last smaller ones. torch.compile is left out: only a trial has
    the time for it. So is cudnn_benchmark: only a process of its own shows it (see settings_table).
    """
    domains = space.domains
    setting = space.batch_setting
    own = getattr(space.baseline, setting)
    for name in (one.name for one in SETTINGS if one.is_in_curves and "loader" not in one.sides):
        for value in domains[name]:
            yield changed(space, {name: value})
    batches = spread(whole_numbers(domains[setting]), _MOST_VALUES)
    if is_device_out_of_reach(space, book):
        batches = batches[-1:]
    for batch in sorted(batches, key=lambda size: (size < own, abs(size - own))):
        yield changed(space, {setting: batch})


def configured_points(curves: Curves, space: ResolvedSpace) -> list[ConfiguredPoint]:
    """The points of all curves, those without a rate among them."""
    points: list[tuple[Side, CurvePoint]] = [("loader", point) for point in curves.loader]
    points += [("device", point) for point in curves.device]
    points += [("copy", point) for point in curves.copy]
    return [
        ConfiguredPoint(side=side, config=changed(space, point.changes), point=point)
        for side, point in points
    ]


def rate_observations(
    looks: Sequence[ConfiguredPoint], records: Sequence[TrialRecord], device_kind: str
) -> Iterator[Observation]:
    """Every trial that measured something, and every side that was measured alone.

    A trial may have measured its own sides too, as the baseline does. That was another process than
    the curves', so that the two show how far processes differ, unless trials share one. Of more
    trials than a fit can take, those that tell most. A side that runs exceed, or that its other
    measurements contradict, is as uncertain as it is far off.
    """
    records = most_telling(records)
    book = CeilingBook()
    for record in records:
        yield from _runs_of(record)
        for run in record.runs:
            book.show(record.config, run.samples_per_s_ci[0])
    sides = _measured_alone(looks, records)
    for side, config, ceiling, _ in sides:
        book.keep(side, config, ceiling)
    for side, config, ceiling, cpu_s in sides:
        own_sd = hypot(ceiling.relative_sd or 0.0, book.doubt(side, config, ceiling))
        seen = side_observation(side, config, ceiling.samples_per_s, device_kind, own_sd)
        yield replace(seen, cpu_s_per_sample=cpu_s)
        launching = host_ceiling_of(ceiling, take_s=None)
        if launching is not None:
            yield _of_host("launch", config, launching)


def _measured_alone(
    looks: Sequence[ConfiguredPoint], records: Sequence[TrialRecord]
) -> list[tuple[Side, TrainingConfig, Ceiling, float | None]]:
    """Every measurement of a side alone, with its CPU seconds for a sample; one that curves took over counts once."""
    found = list[tuple[Side, TrainingConfig, Ceiling, float | None]]()
    for look in looks:
        if look.point.ceiling is not None:
            found.append((look.side, look.config, look.point.ceiling, look.point.cpu_s_per_sample))
    taken_over = [look.point.ceiling for look in looks if not look.point.changes]
    for record in records:
        for own in [run.ceilings for run in record.runs if run.ceilings is not None]:
            for side in SIDES:
                ceiling: Ceiling | None = getattr(own, side)
                if ceiling is not None and ceiling not in taken_over:
                    found.append((side, record.config, ceiling, None))
    return found


def most_telling(records: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
    """Return the trials that a model is made from, in their order: all, or of many those that tell most.

    These are the first, the fastest, since what is sought is near them, the fastest of each number
    of workers, and the latest.
    """
    if len(records) <= _MOST_TRIALS:
        return records
    rates = {
        place: rate
        for place, record in enumerate(records)
        if (rate := observed_rate(record)) is not None
    }
    ranked = sorted(rates, key=rates.__getitem__, reverse=True)
    of_workers = dict[int, int]()
    for place in ranked:
        of_workers.setdefault(records[place].config.num_workers, place)
    kept = {0, *ranked[: _MOST_TRIALS // 2], *list(of_workers.values())[: _MOST_TRIALS // 4]}
    latest = [place for place in reversed(range(len(records))) if place not in kept]
    kept.update(latest[: _MOST_TRIALS - len(kept)])
    return [records[place] for place in sorted(kept)]


def side_observation(
    side: Side, config: TrainingConfig, samples_per_s: float, device_kind: str, own_sd: float = 0.0
) -> Observation:
    """What a side reaches by itself; `own_sd` is what its own stretch leaves open, as a share of the rate."""
    sd = hypot(_SIDE_SD.get(device_kind, _OTHER_SIDE_SD), own_sd)
    return Observation(
        kind=side, config=config, samples_per_s=samples_per_s, relative_sd=sd, is_steady=True
    )


def observed_rate(record: TrialRecord) -> float | None:
    """The rate that a trial measured, stopped early or not, in samples per second; None without one."""
    if record.measurement is not None:
        return record.measurement.samples_per_s
    return mean_rate(record.result.blocks)[0] if record.result.blocks else None


def mean_log_rates(records: Sequence[TrialRecord]) -> dict[int, float]:
    """Of feasible trials, by number, the mean logarithm of the rates of all their runs."""
    return {
        record.number: fmean(log(run.samples_per_s) for run in record.runs)
        for record in records
        if record.is_feasible
    }


def _runs_of(record: TrialRecord) -> Iterator[Observation]:
    """What a trial and its repeats measured; less certain where it was stopped early."""
    config = record.config
    if record.measurement is None and record.result.blocks:
        rate, half_width = mean_rate(record.result.blocks)
        sd = _STOPPED_SD + half_width / rate / NORMAL_95
        yield Observation(kind="run", config=config, samples_per_s=rate, relative_sd=sd)
    for run in record.runs:
        yield Observation(
            kind="run",
            config=config,
            samples_per_s=run.samples_per_s,
            relative_sd=max(_LEAST_RUN_SD, sqrt(run_of(run).variance)),
            is_steady=run.window.is_held_by_device,
        )
        if run.window.take_s:
            taking = run.window.raw_samples_per_s * run.window.batch_s / run.window.take_s
            yield _of_host("take", config, taking)


def _of_host(
    kind: Literal["launch", "take"], config: TrainingConfig, samples_per_s: float
) -> Observation:
    """Return what a host's launching or taking reaches by itself."""
    return Observation(kind=kind, config=config, samples_per_s=samples_per_s, relative_sd=_HOST_SD)


def is_loader_out_of_reach(space: ResolvedSpace, book: CeilingBook) -> bool:
    """Return True where the device stays the slower side even with the largest batch and the fastest precision."""
    own = space.baseline
    batches = whole_numbers(space.domains["micro_batch_size"])
    loader = book.ceiling_of("loader", own)
    device = book.ceiling_of("device", own)
    if loader is None or device is None:
        return False
    # half precision on tensor cores computes up to eight times as fast as float32
    growth = max(1.0, max(batches) / own.micro_batch_size) * 8.0
    return loader.samples_per_s > AMPLE * growth * device.samples_per_s


def is_device_out_of_reach(
    space: ResolvedSpace, book: CeilingBook, *, by_cores: float = inf
) -> bool:
    """Return True where the loader stays the slower side even where each worker brings as much as the first.

    Args:
        space: With the numbers of workers.
        book: What both sides reach today.
        by_cores: What the loader reaches at most, in samples per second, since items keep a core
            busy.
    """
    own = space.baseline
    counts = whole_numbers(space.domains["num_workers"])
    loader = book.ceiling_of("loader", own)
    device = book.ceiling_of("device", own)
    if loader is None or device is None or not counts:
        return False
    growth = max(1, *counts) / max(1, own.num_workers)
    fastest = max(loader.samples_per_s, min(growth * loader.samples_per_s, by_cores))
    return device.samples_per_s > AMPLE * fastest


def failed_side(curves: Curves, ended: str) -> Note | None:
    """That one side was measured in no setting, though it was tried or the process ended before; else why it ended.

    Args:
        curves: What was measured.
        ended: Why the last process that measured them did not end well; "" where it did.
    """
    for side, points in (("loader", curves.loader), ("device", curves.device)):
        if (points or ended) and all(point.ceiling is None for point in points):
            reasons = [ended, *(point.reason for point in points)]
            return one_side_not_measured(
                side, reason=next((reason for reason in reasons if reason), "no figures came")
            )
    return next((remark for remark in curves.remarks if remark.code == "curves_ended"), None)


# Find switches that are not known to win anything: they stay at the baseline unless something
# speaks for them.
#
# Comes in: the points of both sides measured alone, or a rate model. Goes out: which switches these
# have shown to win nothing, and a configuration without those that are not believed to. Of what was
# not tried yet little is known, so that the largest expected gain would often be that of a switch
# which does nothing. Pure.


_SWITCHES = [setting for setting in SETTINGS if setting.is_kept]
_LOOKED_AT = [
    one.name
    for one in _SWITCHES
    if (one.is_of_loader or one.is_in_curves) and "copy" not in one.sides
]
"""Switches whose effect on a side is measured alone, others unchanged; of pinning the copies tell."""


def no_effect_settings(sides: Sequence[ConfiguredPoint], space: ResolvedSpace) -> frozenset[str]:
    """Return the switches that were measured alone, and none of whose values gained 2 % on its side.

    Less counts as equal when a winner is chosen. A switch that can't have the baseline's value is
    none of them, nor are the threads of workers next to training on the CPU: alone, a loader has
    the cores that the two would share.
    """
    is_shared = space.environment.device_kind == "cpu"
    left = [
        name
        for name in _LOOKED_AT
        if getattr(space.baseline, name) in space.parameters.get(name, ())
    ]
    left = [name for name in left if not (is_shared and name == "worker_threads")]
    ratios = {name: list(_ratios(name, sides, space.baseline)) for name in left}
    return frozenset(
        name
        for name, found in ratios.items()
        if found and max(found) < 1 + space.policy.proof.worthwhile
    )


def changes_no_effect_setting(
    config: TrainingConfig, baseline: TrainingConfig, idle: Collection[str]
) -> bool:
    """Return True for a configuration that changes a switch that the probe found to make no difference."""
    bound = (
        set[str]() if config.num_workers else NEUTRAL_WITHOUT_WORKERS.keys()
    )  # there is one value, whatever the baseline's
    return any(
        getattr(config, name) != getattr(baseline, name) for name in idle if name not in bound
    )


def pin_to_baseline(space: ResolvedSpace, idle: Collection[str]) -> ResolvedSpace:
    """Return the space with these switches fixed at the baseline's values."""
    fixed = {name: Choices(values=(getattr(space.baseline, name),)) for name in idle}
    return replace(space, domains={**space.domains, **fixed})


def unhelpful_switches(
    config: TrainingConfig, space: ResolvedSpace, rates: RateModel
) -> dict[str, object]:
    """Return the switches to put back to the baseline's values: they are believed to gain less than 2 %."""
    found: dict[str, object] = {}
    for name in (switch.name for switch in _SWITCHES):
        own = getattr(space.baseline, name)
        current = config.model_copy(update=found)
        if (
            name not in space.parameters
            or own not in space.domains[name]
            or getattr(current, name) == own
        ):
            continue
        settings = {**current.model_dump(), name: own}
        twin = TrainingConfig.model_validate(normalised(settings, space.facts, space.environment))
        if twin == current:
            continue
        here, there = rates.forecast([current, twin]).log_rate
        if there >= here - space.policy.proof.worthwhile:
            found[name] = own
    return found


def _ratios(
    name: str, sides: Sequence[ConfiguredPoint], baseline: TrainingConfig
) -> Iterator[float]:
    """Yield, of points that differ in a switch alone, the throughput of another value over that of the baseline's."""
    own = getattr(baseline, name)
    known = {
        (one.side, one.config): one.point.ceiling for one in sides if one.point.ceiling is not None
    }
    for (side, config), ceiling in known.items():
        usual = known.get((side, config.model_copy(update={name: own})))
        if getattr(config, name) != own and usual is not None:
            yield ceiling.samples_per_s / usual.samples_per_s
