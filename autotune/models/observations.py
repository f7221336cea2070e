"""Choose the configurations whose ceilings to measure, and turn ceilings and trials into observations.

Comes in: the space, measured curves, trials. Goes out: variations of the baseline to measure,
observations for the throughput model, each with its uncertainty, and switches without an effect.
Pure functions.
"""

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
from autotune.models.statistics import NORMAL_95, mean_rate, with_latest
from autotune.models.throughput import Observation, RateModel
from autotune.note import Note
from autotune.policy import POLICY, Policy, Throughput
from autotune.records.ceilings import SIDES, Ceiling, CeilingBook, host_ceiling_of, loader_key
from autotune.records.result import CurvePoint, Curves
from autotune.records.trial import TrialRecord
from autotune.settings_table import BY_NAME, SETTINGS, Side
from autotune.space.constraints import SINGLE, normalised
from autotune.space.ranges import spread, whole_numbers
from autotune.space.scaling import samples_within
from autotune.space.space import ResolvedSpace

# Curves: the configurations that they measure, and the observations that curves and trials give.


AMONG_WORKERS = [name for name in NEUTRAL_WITHOUT_WORKERS if BY_NAME[name].is_kept]
"""Settings whose effect shows when several workers hold each other up."""
_WORKERS_ALONE = {"num_workers", *NEUTRAL_WITHOUT_WORKERS} - {*AMONG_WORKERS}
"""Settings that a point may change if it differs from the baseline in its number of workers; with
workers, torch sets its own prefetch factor."""
_LEAST_SCALING = 1.05
"""Ratio of a loader's throughput to that with fewer workers, below which a trial measures no more
workers: our own convention."""
_SEVERAL = 2
"""Number of workers from which several share the items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredPoint:
    """Point of a curve, with the configuration in which it was measured."""

    side: Side
    config: TrainingConfig
    point: CurvePoint


def changed(space: ResolvedSpace, changes: dict[str, object]) -> TrainingConfig:
    """Return the baseline on one device with some settings changed, as a curve measures it.

    Args:
        space: The space with its baseline.
        changes: Settings by name.
    """
    settings = {**space.baseline.model_dump(), **SINGLE, **changes}
    budget = changes.get("max_tokens")
    if isinstance(budget, int):
        settings["micro_batch_size"] = samples_within(budget, space.baseline)
    return TrainingConfig.model_validate(normalised(settings, space.facts, space.environment))


def loader_variations(space: ResolvedSpace, book: CeilingBook) -> list[TrainingConfig]:
    """Return the variations of the baseline's loader to measure; none if no device could keep up with it.

    With many workers the smallest and largest batch are measured too: they show the cost of
    collating.

    Time may run out before the last one, so the most decisive come first: as many workers as cores,
    then other numbers of several workers. Zero and one worker, and `persistent_workers`, come last.
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

    # Several workers
    ordered = by_promise(_worker_counts(counts, cores, space.policy.curves.most_values), cores)
    yield from (with_workers(count) for count in ordered if count >= _SEVERAL)
    most = max(counts)
    workers = own.num_workers or min(most, cores)

    # Other settings of the loader; some show their effect only with several workers
    last = {"num_workers", "persistent_workers", *AMONG_WORKERS}
    several = max(workers, min(most, max(2, min(cores, space.policy.curves.few_workers))))
    names = list[tuple[str, int]]()
    if workers:
        names += [(name, workers) for name in LOADER_SETTINGS if name not in last]
    if several > 1:
        names += [(name, several) for name in AMONG_WORKERS if len(list(domains[name])) > 1]
    for name, count in names:
        for value in domains[name]:
            yield with_workers(count, **{name: value})

    # The smallest and the largest batch
    setting = space.batch_setting
    batches = whole_numbers(domains[setting])
    if most:
        for batch in {min(batches), max(batches)} - {getattr(own, setting)}:
            yield with_workers(most, **{setting: batch})

    # What decides least
    yield from (with_workers(count) for count in ordered if count < _SEVERAL)
    if workers:
        for value in domains["persistent_workers"]:
            yield with_workers(workers, persistent_workers=value)


def _worker_counts(counts: Sequence[int], cores: int, most_values: int) -> list[int]:
    """Return the numbers of workers to measure, with the number of cores in place of the nearest to it."""
    tried = spread(counts, most_values)
    if cores not in counts:
        return tried
    nearest = min(tried, key=lambda count: abs(count - cores))
    kept = {tried[0], tried[-1]}
    tried = [count for count in tried if count != nearest or count in kept]
    return [*dict.fromkeys((cores, *tried))]


def by_promise(counts: Iterable[int], cores: int) -> list[int]:
    """Sort numbers of workers by promise: the nearest to the number of cores first, zero and one last."""
    return sorted(
        counts, key=lambda count: (count < _SEVERAL, abs(log2(max(count, 1) / cores)), count)
    )


def adds_workers_in_vain(
    points: Sequence[CurvePoint],
    changes: Mapping[str, object],
) -> bool:
    """Return True if a loader's point would only add workers to a loader that has stopped to scale.

    Args:
        points: Points of the loader so far, including the baseline's.
        changes: Settings that the point would change in the baseline.
    """
    count = changes.get("num_workers")
    if not isinstance(count, int) or not set(changes) <= _WORKERS_ALONE:
        return False

    # Throughput with fewer workers, other settings unchanged
    rates = dict[int, float]()
    for point in points:
        workers = point.changes.get("num_workers", 0)
        if point.ceiling is None or not set(point.changes) <= _WORKERS_ALONE:
            continue
        if isinstance(workers, int) and 0 < workers < count:
            rates[workers] = max(point.ceiling.samples_per_s, rates.get(workers, 0.0))
    if len(rates) < 2:  # two numbers of workers show how a loader grows
        return False
    fewer, more = sorted(rates)[-2:]
    return rates[more] < _LEAST_SCALING * rates[fewer]


def device_variations(space: ResolvedSpace, book: CeilingBook) -> Iterator[TrainingConfig]:
    """Yield variations of the baseline in one of the step's settings.

    If no number of workers could keep the device busy, only the largest batch is measured: it shows
    how far the device is from becoming the bottleneck, and how much memory it takes.

    Time may run out before the last one, so first come the points that cost no more than the
    baseline's batch, then larger batches, then smaller ones. torch.compile is left out, since only
    a trial has the time for it, and cudnn_benchmark, since only a new process shows it (see
    settings_table).
    """
    domains = space.domains
    setting = space.batch_setting
    own = getattr(space.baseline, setting)
    names = [one.name for one in SETTINGS if one.is_in_curves and "loader" not in one.sides]
    for name in names:
        for value in domains[name]:
            yield changed(space, {name: value})
    batches = spread(whole_numbers(domains[setting]), space.policy.curves.most_values)
    if is_device_out_of_reach(space, book):
        batches = batches[-1:]
    for batch in sorted(batches, key=lambda size: (size < own, abs(size - own))):
        yield changed(space, {setting: batch})


def configured_points(curves: Curves, space: ResolvedSpace) -> list[ConfiguredPoint]:
    """Return the points of all curves with their configurations, including those without a ceiling."""
    found = list[ConfiguredPoint]()
    for side, points in points_by_side(curves):
        for point in points:
            config = changed(space, point.changes)
            found.append(ConfiguredPoint(side=side, config=config, point=point))
    return found


def points_by_side(curves: Curves) -> tuple[tuple[Side, Sequence[CurvePoint]], ...]:
    """Return the points of each side's curve."""
    return (("loader", curves.loader), ("device", curves.device), ("copy", curves.copy))


def rate_observations(
    curves: Sequence[ConfiguredPoint],
    records: Sequence[TrialRecord],
    device_kind: str,
    policy: Policy = POLICY,
) -> Iterator[Observation]:
    """Yield an observation for each measured run and each side that was measured alone.

    A trial may have measured its own sides too, as the baseline does. That was another process than
    the curves', so the two show the variation between processes, unless trials share one. Of more
    trials than a fit can take, the most informative count. A ceiling that runs exceed, or that
    other measurements of its side contradict, is as uncertain as its deviation.

    Args:
        curves: Points of the curves.
        records: Trials.
        device_kind: Kind of the device.
        policy: Standard deviations, and the most trials.
    """
    # Runs, which also show which ceilings were measured too low
    model = policy.throughput
    records = most_telling(records, model.most_trials)
    book = CeilingBook()
    for record in records:
        yield from _runs_of(record, policy)
        for run in record.runs:
            book.show(record.config, run.samples_per_s_ci[0])

    # Sides alone, each with the doubt that the others leave
    sides = _measured_alone(curves, records)
    for one, ceiling in sides:
        book.keep(one.side, one.config, ceiling)
    for one, ceiling in sides:
        doubt = book.doubt(one.side, one.config, ceiling)
        own_sd = hypot(ceiling.relative_sd or 0.0, doubt)
        seen = side_observation(
            one.side, one.config, ceiling.samples_per_s, device_kind, own_sd, model
        )
        yield replace(seen, cpu_s_per_sample=one.point.cpu_s_per_sample)
        launching = host_ceiling_of(ceiling, take_s=None)
        if launching is not None:
            yield _of_host("launch", one.config, launching, model)


def _measured_alone(
    curves: Sequence[ConfiguredPoint], records: Sequence[TrialRecord]
) -> list[tuple[ConfiguredPoint, Ceiling]]:
    """Return every point that has a ceiling, with it; those that curves took over count once."""
    found = [*curves]
    taken_over = [one.point.ceiling for one in curves if not one.point.changes]
    for record in records:
        for run in record.runs:
            if run.ceilings is None:
                continue
            for side in SIDES:
                ceiling: Ceiling | None = getattr(run.ceilings, side)
                if ceiling not in taken_over:
                    own = CurvePoint(changes={}, ceiling=ceiling)
                    found.append(ConfiguredPoint(side=side, config=record.config, point=own))
    return [(one, one.point.ceiling) for one in found if one.point.ceiling is not None]


def most_telling(records: Sequence[TrialRecord], most: int) -> Sequence[TrialRecord]:
    """Return the trials that a model is fitted to, in their order: all, or of many the most informative.

    These are the first, the fastest, the fastest of each number of workers, and the latest.

    Args:
        records: All trials.
        most: Most trials to return.
    """
    rates = dict[int, float]()
    for place, record in enumerate(records):
        rate = observed_rate(record)
        if rate is not None:
            rates[place] = rate
    ranked = sorted(rates, key=rates.__getitem__, reverse=True)
    of_workers = dict[int, int]()
    for place in ranked:
        of_workers.setdefault(records[place].config.num_workers, place)
    first = range(len(records))[:1]
    kept = [*first, *ranked[: most // 2], *list(of_workers.values())[: most // 4]]
    return with_latest(records, kept, most=most)


def side_observation(
    side: Side,
    config: TrainingConfig,
    samples_per_s: float,
    device_kind: str,
    own_sd: float = 0.0,
    model: Throughput = POLICY.throughput,
) -> Observation:
    """Return the observation of a side alone.

    Args:
        side: The side.
        config: Configuration in which it was measured.
        samples_per_s: Its throughput.
        device_kind: Kind of the device.
        own_sd: Relative standard error of its own stretch.
        model: Standard deviations between a side alone and in a run.
    """
    side_sd = model.cpu_side_sd if device_kind == "cpu" else model.device_side_sd
    return Observation(
        kind=side,
        config=config,
        samples_per_s=samples_per_s,
        relative_sd=hypot(side_sd, own_sd),
        is_steady=True,
    )


def observed_rate(record: TrialRecord) -> float | None:
    """Return the measured throughput of a trial, stopped early or not, in samples/s; None without one."""
    if record.measurement is not None:
        return record.measurement.samples_per_s
    if not record.result.blocks:
        return None
    return mean_rate(record.result.blocks)[0]


def mean_log_rates(records: Sequence[TrialRecord]) -> dict[int, float]:
    """Return the mean log throughput of all runs of each feasible trial, by number."""
    return {
        record.number: fmean(log(run.samples_per_s) for run in record.runs)
        for record in records
        if record.is_feasible
    }


def _runs_of(record: TrialRecord, policy: Policy) -> Iterator[Observation]:
    """Yield the observations of a trial and its repeats; less certain if it was stopped early."""
    config = record.config
    if record.measurement is None and record.result.blocks:
        rate, half_width = mean_rate(record.result.blocks)
        sd = policy.throughput.stopped_sd + half_width / rate / NORMAL_95
        yield Observation(kind="run", config=config, samples_per_s=rate, relative_sd=sd)
    for run in record.runs:
        yield Observation(
            kind="run",
            config=config,
            samples_per_s=run.samples_per_s,
            relative_sd=max(policy.spread.least_sd, sqrt(run_of(run, policy).variance)),
            is_steady=run.window.is_held_by_device,
        )
        if run.window.take_s:
            taking = run.window.raw_samples_per_s * run.window.batch_s / run.window.take_s
            yield _of_host("take", config, taking, policy.throughput)


def _of_host(
    kind: Literal["launch", "take"],
    config: TrainingConfig,
    samples_per_s: float,
    model: Throughput,
) -> Observation:
    """Return the observation of a host's launching or taking alone."""
    return Observation(
        kind=kind,
        config=config,
        samples_per_s=samples_per_s,
        relative_sd=model.host_alone_sd,
    )


def is_loader_out_of_reach(space: ResolvedSpace, book: CeilingBook) -> bool:
    """Return True if the device stays slower even with the largest batch and the fastest precision."""
    own = space.baseline
    batches = whole_numbers(space.domains["micro_batch_size"])
    loader = book.ceiling_of("loader", own)
    device = book.ceiling_of("device", own)
    if loader is None or device is None:
        return False
    policy = space.policy
    growth = max(1.0, max(batches) / own.micro_batch_size) * policy.curves.fastest_precision
    return loader.samples_per_s > policy.trials.ample * growth * device.samples_per_s


def is_device_out_of_reach(
    space: ResolvedSpace, book: CeilingBook, *, by_cores: float = inf
) -> bool:
    """Return True if the loader stays slower even if each worker adds as much as the first.

    Args:
        space: Space with the numbers of workers.
        book: Ceilings of both sides at the baseline.
        by_cores: Upper bound of the loader's throughput in samples/s, since items keep a core busy.
    """
    own = space.baseline
    counts = whole_numbers(space.domains["num_workers"])
    loader = book.ceiling_of("loader", own)
    device = book.ceiling_of("device", own)
    if loader is None or device is None or not counts:
        return False
    growth = max(1, *counts) / max(1, own.num_workers)
    fastest = max(loader.samples_per_s, min(growth * loader.samples_per_s, by_cores))
    return device.samples_per_s > space.policy.trials.ample * fastest


def failed_side(curves: Curves, ended: str) -> Note | None:
    """Return a note on a side that no setting could measure, or on why the curves ended early; else None.

    Args:
        curves: Measured curves.
        ended: Reason why the last measuring process did not end well; "" if it did.
    """
    for side, points in (("loader", curves.loader), ("device", curves.device)):
        if (points or ended) and all(point.ceiling is None for point in points):
            reasons = [ended, *(point.reason for point in points)]
            return one_side_not_measured(
                side, reason=next((reason for reason in reasons if reason), "no figures came")
            )
    return next((note for note in curves.notes if note.code == "curves_ended"), None)


# Switches without a known gain: they stay at the baseline unless some evidence favors them.
#
# Little is known of untried settings, so the largest expected gain would often be that of a switch
# without any effect.


_SWITCHES = [setting for setting in SETTINGS if setting.is_kept]
_MEASURED_ALONE = [
    one.name
    for one in _SWITCHES
    if (one.is_of_loader or one.is_in_curves) and "copy" not in one.sides
]
"""Switches whose effect on a side is measured alone, others unchanged; for pinning, the copies are
evidence."""


def no_effect_settings(sides: Sequence[ConfiguredPoint], space: ResolvedSpace) -> frozenset[str]:
    """Return the switches that were measured alone without any value gaining 2 % on its side.

    Smaller gains count as equal in the choice of a winner. Switches that can't have the baseline's
    value are not among them, nor are workers' threads when training on the CPU: a loader alone has
    the cores that the two would share.

    Args:
        sides: Points of both sides.
        space: The space with its baseline.
    """
    found = set[str]()
    for name in _MEASURED_ALONE:
        if getattr(space.baseline, name) not in space.parameters.get(name, ()):
            continue
        if name == "worker_threads" and space.environment.device_kind == "cpu":
            continue
        ratios = list(_ratios(name, sides, space.baseline))
        if ratios and max(ratios) < 1 + space.policy.proof.worthwhile:
            found.add(name)
    return frozenset(found)


def changes_no_effect_setting(
    config: TrainingConfig, baseline: TrainingConfig, idle: Collection[str]
) -> bool:
    """Return True for a configuration that changes a switch that the probe found to make no difference."""
    for name in idle:
        if not config.num_workers and name in NEUTRAL_WITHOUT_WORKERS:
            continue  # without workers it has one value, whatever the baseline's
        if getattr(config, name) != getattr(baseline, name):
            return True
    return False


def pin_to_baseline(space: ResolvedSpace, idle: Collection[str]) -> ResolvedSpace:
    """Return the space with these switches fixed at the baseline's values."""
    fixed = {name: Choices(values=(getattr(space.baseline, name),)) for name in idle}
    return replace(space, domains={**space.domains, **fixed})


def unhelpful_switches(
    config: TrainingConfig, space: ResolvedSpace, rates: RateModel
) -> dict[str, object]:
    """Return the switches to reset to the baseline's values, since they are expected to gain less than 2 %.

    Args:
        config: Configuration to simplify.
        space: The space with its baseline.
        rates: The throughput model.

    Returns:
        The baseline's values by name.
    """
    found: dict[str, object] = {}
    for name in [switch.name for switch in _SWITCHES]:
        # Switches that can be reset
        own = getattr(space.baseline, name)
        if name not in space.parameters or own not in space.domains[name]:
            continue
        current = config.model_copy(update=found)
        if getattr(current, name) == own:
            continue

        # Reset those whose twin with the baseline's value is hardly slower
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
    """Yield throughput ratios of another value of a switch to the baseline's, from points that differ in it alone."""
    own = getattr(baseline, name)
    known = {
        (one.side, one.config): one.point.ceiling for one in sides if one.point.ceiling is not None
    }
    for (side, config), ceiling in known.items():
        usual = known.get((side, config.model_copy(update={name: own})))
        if getattr(config, name) != own and usual is not None:
            yield ceiling.samples_per_s / usual.samples_per_s
