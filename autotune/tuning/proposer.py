"""Propose the next trial: by the throughput and memory models, or by one of Optuna's samplers.

Comes in: the study as it grows, and its space. Goes out: values to try next, or None where the
study's sampler is to draw; reasons to skip a sample, to stop a trial early, and to end the search.
The loop runs trials; nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from statistics import fmean, median
from typing import Literal, Protocol

import numpy as np

from autotune.config.training_config import TrainingConfig
from autotune.launch.launcher import shares_process
from autotune.launch.runner import TrialRunner
from autotune.messages.search import (
    little_gain_expected,
    near_ceiling,
    no_informative_candidate,
    sides_not_measured,
    would_add_nothing,
    would_not_fit,
)
from autotune.models.evidence import PruningThreshold, luck_of
from autotune.models.memory import MemoryModel, memory_of_trials
from autotune.models.observations import (
    ConfiguredPoint,
    changes_no_effect_setting,
    configured_points,
    device_variations,
    failed_side,
    loader_variations,
    mean_log_rates,
    most_telling,
    no_effect_settings,
    pin_to_baseline,
    rate_observations,
    unhelpful_switches,
)
from autotune.models.statistics import Floats
from autotune.models.throughput import (
    RateModel,
    chance_to_run,
    expected_gain,
    has_failed,
    most_gain,
    redundant_among,
)
from autotune.models.time_estimate import first_batches_s, measuring_s, steps_s
from autotune.note import Note
from autotune.policy import Trials
from autotune.records.ceilings import SIDES, CeilingBook
from autotune.records.result import CurvePoint, Curves
from autotune.records.trial import TrialRecord
from autotune.settings_table import SETTINGS
from autotune.space.ranges import whole_numbers
from autotune.space.space import ResolvedSpace
from autotune.tuning.proposals import Candidates, Params, params_of
from autotune.tuning.study import Study
from autotune.tuning.time_budget import TimeBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Values to try next."""

    params: Params
    is_promising: bool = False
    """A model expects the largest gain of them; a search stops after enough such trials without a
    gain."""


class Proposer(Protocol):
    """Proposes trials from those in a study. `best` is the feasible trial with the best score so far, if any."""

    @property
    def has_model(self) -> bool:
        """Return True if `prepare` measures loader and device alone, so that trials need not."""
        ...

    @property
    def is_informed(self) -> bool:
        """Return True once loader and device were measured; fewer trials without a gain end the search then."""
        ...

    def prepare(
        self, runner: TrialRunner, deadline_s: float, ceilings: CeilingBook, /
    ) -> Note | None:
        """Measure loader and device alone, once, after the baseline, and keep their ceilings.

        Args:
            runner: Runs the measurement.
            deadline_s: Seconds that it may take.
            ceilings: The book to enter ceilings into.

        Returns:
            A note of what failed, or None.
        """
        ...

    def recall(self, curves: Curves, ceilings: CeilingBook, /) -> None:
        """Restore what `prepare` measured before an interruption."""
        ...

    def propose(self, best: TrialRecord | None, /) -> Proposal | None:
        """Return the values to try next; None: the study's sampler draws."""
        ...

    def at_same_batch(self, best: TrialRecord | None, /) -> Params | None:
        """Return values to try at the baseline's global batch before the search ends; None if none are left."""
        ...

    def plainer(self, config: TrainingConfig, /) -> Params | None:
        """Return a configuration without the changes that are not believed to gain anything, to try at the end."""
        ...

    def skip(self, config: TrainingConfig, /) -> Note | None:
        """Return why a sample is not worth a run ("would_not_fit", "would_add_nothing"), or None."""
        ...

    def pruning_threshold(self, trial: TrialRecord, /) -> PruningThreshold | None:
        """Return the throughput below which a trial is stopped early; None: it runs to its end."""
        ...

    def why_enough(self, best: TrialRecord | None, /) -> Note | None:
        """Return why no further trial is worth its time, or None."""
        ...

    def believed(self) -> Mapping[int, float]:
        """Return the logarithm of the believed throughput of each feasible trial, by number, from all runs."""
        ...

    def can_win(self, best: TrialRecord | None, /) -> float | None:
        """Return the headroom above the best, as a share of its throughput; None if unknown."""
        ...


@dataclass(slots=True)
class SamplerProposer:
    """Proposer that leaves everything to the study's sampler; it measures, skips, prunes and ends nothing."""

    study: Study
    has_model: bool = field(default=False, init=False)
    is_informed: bool = field(default=False, init=False)
    _believed: dict[int, float] = field(default_factory=dict, init=False)
    _known: dict[int, TrialRecord] = field(default_factory=dict, init=False)
    """The records that `_believed` was computed from, by number; it is read several times a trial."""

    def prepare(self, _runner: TrialRunner, _deadline_s: float, _ceilings: CeilingBook) -> None:
        """Measure nothing."""

    def recall(self, _curves: Curves, _ceilings: CeilingBook) -> None:
        """Restore nothing."""

    def propose(self, _best: TrialRecord | None) -> None:
        """Propose nothing; the sampler draws."""

    def at_same_batch(self, _best: TrialRecord | None) -> None:
        """Propose nothing besides the loop's own variants of the best trial."""

    def plainer(self, _best: TrainingConfig) -> None:
        """Propose nothing; the effects of single settings are unknown."""

    def skip(self, _config: TrainingConfig) -> None:
        """Skip no sample."""

    def pruning_threshold(self, _trial: TrialRecord) -> None:
        """Stop no trial early."""

    def why_enough(self, _best: TrialRecord | None) -> None:
        """Return no reason; only trials without a gain end the search."""

    def believed(self) -> Mapping[int, float]:
        """Return the mean of each trial's runs."""
        new = [
            record for record in self.study.ended if self._known.get(record.number) is not record
        ]
        self._known.update((record.number, record) for record in new)
        self._believed |= mean_log_rates(new)
        return self._believed

    def can_win(self, _best: TrialRecord | None) -> None:
        """Return None; the headroom is unknown."""


# Upper bounds of the throughput that no open setting moves: the lowest ceiling of a side, and the
# cores once the job itself fills them. Near one of them the search is over.


_NOT_TRIED = frozenset({"left_to_smaller_batches", "no_time_left"})
"""Reasons of points that were never measured."""
_ONLY_IN_RUNS = [
    setting.name for setting in SETTINGS if setting.is_of_kernels and not setting.is_in_curves
]
"""Settings that change a step's work, but are not varied where the device is measured alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A throughput that no open setting can exceed."""

    side: Literal["loader", "device", "host", "copy", "cores"]
    samples_per_s: float
    near_from: float
    """Share of the bound at which the search is over."""


def bounds_of(
    outlook: Outlook, sides: Sequence[ConfiguredPoint], study: Study, believed: Mapping[int, float]
) -> list[Bound]:
    """Return the bounds that are known: the lowest ceiling, and the cores.

    Args:
        outlook: Forecast for another trial, with the ceilings.
        sides: Measurements of loader and device alone.
        study: The trials so far, and their space.
        believed: Logarithms of the trials' believed throughput, by number.
    """
    found = list[Bound]()
    policy = study.space.policy.trials
    if outlook.lower_ceiling < inf:
        ceiling = Bound(
            side=outlook.lower_side,
            samples_per_s=outlook.lower_ceiling,
            near_from=policy.near_ceiling,
        )
        found.append(ceiling)
    cores = cores_bound(sides, study, believed)
    if cores is not None:
        found.append(Bound(side="cores", samples_per_s=cores, near_from=policy.near_cores))
    return found


def cores_bound(
    sides: Sequence[ConfiguredPoint], study: Study, believed: Mapping[int, float]
) -> float | None:
    """Return the throughput at which the job itself would fill every core, at the least CPU time per sample.

    The least CPU time is the smaller of two figures: that of the cheapest trial so far, and that of
    the cheapest loader and the cheapest step alone, over all open settings. So a setting that
    wastes CPU time, such as threads that wait for each other, lowers no bound. Trials with and
    without workers have bounds of their own: a loader without workers need not pass batches on, and
    fills one core at most.

    Args:
        sides: Measurements of loader and device alone.
        study: The trials so far, and their space.
        believed: Logarithms of the trials' believed throughput, by number.

    Returns:
        Samples per second. None if the kernel does not count CPU time, if workers are open and no
        trial had any, if no side was measured alone, and on several hosts.
    """
    space = study.space
    # CPU seconds per sample of each trial that other processes did not slow
    used_cpu_s = dict[TrainingConfig, float]()
    cores = 0
    for record in study.ended:
        known = [run.host_load for run in record.runs if run.host_load is not None]
        loads = [load for load in known if not load.is_loaded]
        if loads and record.number in believed:
            cores = max(cores, *(load.cores for load in loads))
            busy_cores = fmean(load.own_s / load.seconds for load in loads)
            used_cpu_s[record.config] = max(busy_cores, 1e-6) / exp(believed[record.number])
    if not used_cpu_s or space.environment.hosts > 1:
        return None
    counts = {space.baseline.num_workers, *whole_numbers(space.domains["num_workers"])}
    step_cpu_s = _least_step_cpu_s(sides, study, used_cpu_s)
    most = 0.0
    for has_workers in {count > 0 for count in counts}:
        in_trials_cpu_s = [
            cpu_s for config, cpu_s in used_cpu_s.items() if (config.num_workers > 0) == has_workers
        ]
        if not in_trials_cpu_s:
            return None
        loaders = [side for side in sides if side.side == "loader"]
        loaders = [side for side in loaders if (side.config.num_workers > 0) == has_workers]
        alone_cpu_s = _least_loader_cpu_s(loaders) + step_cpu_s
        if alone_cpu_s == 0:
            return None
        bound = cores / min(*in_trials_cpu_s, alone_cpu_s)
        if not has_workers:
            # one process loads: it is no faster than the fastest that was measured
            ceilings = [side.point.ceiling for side in loaders]
            fastest = max((one.samples_per_s for one in ceilings if one is not None), default=inf)
            bound = min(bound, fastest)
        most = max(most, bound)
    return most


def _least_loader_cpu_s(loaders: Sequence[ConfiguredPoint]) -> float:
    """Return the CPU seconds per sample of the cheapest loader; 0 if none was measured.

    Only threads and batch change a loader's work. Take the median of all points that agree in
    these, since a stretch of 0.2 s counts CPU time in steps of 5 %.
    """
    groups = dict[tuple[int, int], list[float]]()
    for side in loaders:
        cpu_s = side.point.cpu_s_per_sample
        if side.point.ceiling is not None and cpu_s is not None:
            key = side.config.worker_threads or 0, side.config.micro_batch_size
            groups.setdefault(key, []).append(cpu_s)
    return min(map(median, groups.values()), default=0.0)


def _least_step_cpu_s(
    sides: Sequence[ConfiguredPoint], study: Study, ran: Collection[TrainingConfig]
) -> float:
    """Return the CPU seconds per sample of the cheapest step; 0 while an open setting is not measured.

    Return 0 on an accelerator too: a host that waits for it keeps a core busy without working.
    """
    space = study.space
    if space.environment.device_kind != "cpu":
        return 0.0
    for name in _ONLY_IN_RUNS:
        if not set(space.domains[name]) <= {getattr(config, name) for config in ran}:
            return 0.0
    steps = [side for side in sides if side.side == "device" and not study.is_left_out(side.config)]
    reasons = [side.point.reason for side in steps if side.point.ceiling is None]
    if any(isinstance(reason, Note) and reason.code in _NOT_TRIED for reason in reasons):
        return 0.0
    known = [side.point.cpu_s_per_sample for side in steps if side.point.ceiling is not None]
    # not counted where a trial measured the point
    return min((cpu_s for cpu_s in known if cpu_s is not None), default=0.0)


# The outlook of a search: the candidates' forecasts against the best trial so far.


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Forecast for another trial: the most promising candidate, its gain, and the ceilings."""

    params: Params | None
    """The candidate with the largest expected gain; None if no candidate is informative."""
    gain: float
    """The largest expected gain over the best so far, as a share, whatever the trial takes."""
    same_batch: Params | None
    """The settings that should be the fastest at the baseline's global batch."""
    best_rate: float
    """Believed throughput of the best trial so far, in samples/s."""
    lower_ceiling: float
    """Throughput that no fitting candidate should exceed, in samples/s: the lowest ceiling of
    loader, device, copy and host, each with a standard deviation on top."""
    lower_side: Literal["loader", "device", "copy", "host"]
    """The side of that ceiling."""
    scatter_sd: float
    """Relative standard deviation of repeated measurements of the same settings on this machine."""


def tried_in(study: Study) -> list[TrainingConfig]:
    """Return the configurations with a measured throughput, also of trials that were stopped early."""
    return [
        record.config
        for record in study.ended
        if record.measurement is not None or record.result.blocks
    ]


def measured_to_fit(sides: Sequence[ConfiguredPoint], study: Study) -> Params | None:
    """Return the fastest settings with which the device was measured alone and that may be proposed."""
    alone = dict[TrainingConfig, float]()
    for side in sides:
        if side.side == "device" and side.point.ceiling is not None:
            alone[side.config] = side.point.ceiling.samples_per_s
    for config in sorted(alone, key=alone.__getitem__, reverse=True):
        params = params_of(config, study.space)
        if study.may_propose(params):
            return params
    return None


def foresee(
    candidates: Sequence[tuple[Params, TrainingConfig]],
    time: TimeBudget,
    rates: RateModel,
    memory: MemoryModel,
    best_rate: float,
) -> Outlook:
    """Forecast the candidates, and pick the most promising of those that fit, are open and informative.

    Weigh each gain by the seconds of its trial. A trial that takes too long for the time left is
    picked only if no other is left.

    Args:
        candidates: Values with their configurations.
        time: The time left, and the study.
        rates: The throughput model.
        memory: The memory model.
        best_rate: The highest believed throughput of a feasible trial, in samples/s; a measured
            one may be lucky. Source of the plug-in: Picheny, Wagner, Ginsbourger 2013, "A benchmark
            of kriging-based infill criteria for noisy optimization".
    """
    configs = [config for _, config in candidates]
    study = time.study
    space = study.space
    tried = tried_in(study)
    trials = time.policy.trials
    running = [trial.config for trial in study.running]
    forecast = rates.forecast(configs, running)
    fits = memory.chance_to_fit(configs, space.limit_bytes)
    failed = [record.config for record in study.ended if has_failed(record)]
    feasible = [record.config for record in study.ended if record.is_feasible]

    # the gain over the best so far, and over what is running
    bar = best_rate
    if running:
        bar = max([best_rate, *np.exp(rates.forecast(running).log_rate)])
    gains = np.minimum(expected_gain(forecast, bar), most_gain(forecast, bar))
    gains = gains * fits * chance_to_run(configs, failed, feasible)
    is_open = np.array([study.is_open(config) for config in configs])
    may_try = is_open & (fits >= trials.sure_to_fit)
    is_informative = may_try & ~redundant_among(configs, forecast, tried)

    # the lowest ceiling among those that are likely to fit
    left_out = np.array([study.is_left_out(config) for config in configs])
    inside = (fits >= trials.likely_to_fit) & ~left_out
    sides: dict[Literal["loader", "device", "copy", "host"], tuple[Floats, Floats]] = {
        "loader": (forecast.loader, forecast.loader_sd),
        "device": (forecast.device, forecast.device_sd),
        "copy": (forecast.copy, forecast.copy_sd),
        "host": (forecast.host, forecast.host_sd),
    }
    ceilings = {
        name: float((side * np.exp(trials.ceiling_sds * sd))[inside].max(initial=0.0))
        for name, (side, sd) in sides.items()
    }
    lower_side = min(ceilings, key=ceilings.__getitem__)

    # the fastest at the baseline's global batch, tried or not
    has_run = set(tried)
    keeps = np.array([config.global_batch_ratio(space.baseline) == 1 for config in configs])
    keeps &= is_informative | np.array([config in has_run for config in configs])
    same = int(np.argmax(np.where(keeps, forecast.log_rate, -inf)))

    # the largest gain for each second of its trial, if possible within the time left
    trials_s = _trial_seconds(configs, np.exp(forecast.log_rate), time)
    soon = is_informative & (trials_s <= time.longest_s())
    eligible = soon if soon.any() else is_informative
    chosen = int(np.argmax(np.where(eligible, gains / trials_s, -1.0)))
    return Outlook(
        params=candidates[chosen][0] if is_informative.any() else None,
        gain=float(gains[is_informative].max(initial=0.0)),
        same_batch=candidates[same][0] if keeps.any() else None,
        best_rate=best_rate,
        lower_ceiling=ceilings[lower_side] or inf,
        lower_side=lower_side,
        scatter_sd=forecast.scatter_sd,
    )


def _trial_seconds(configs: Sequence[TrainingConfig], expected: Floats, time: TimeBudget) -> Floats:
    """Return the seconds that a trial of each configuration should take.

    Args:
        configs: The configurations.
        expected: The expected throughput of each, in samples/s.
        time: The time left, and the study.
    """
    trials = time.policy.trials
    pairs = list(zip(configs, expected, strict=True))
    epoch_samples = time.study.space.facts.dataset_length
    if time.is_short_search:
        trials_s = np.array([measuring_s(config, rate, epoch_samples) for config, rate in pairs])
        for place, config in enumerate(configs):
            if not shares_process(config):
                trials_s[place] += trials.rebuilds * time.build_s
        return trials_s
    # a slow start, or slow steps, must promise more
    waits_s = np.array([first_batches_s(config, rate, epoch_samples) for config, rate in pairs])
    slow_s = np.array([steps_s(config, rate) for config, rate in pairs])
    beyond_s = np.maximum(waits_s - trials.short_wait_s, 0.0)
    beyond_s += np.maximum(slow_s - time.limits.shortest_window_s, 0.0)
    return time.shortest_trial_s + beyond_s


# Proposals of a model of the machine: of loader and device alone, measured once, and of every
# trial. It proposes the trial with the largest expected gain, also after a trial that was far from
# its forecast: left to the sampler, the next one found no more (benchmarks/regret.py).


_Stamp = tuple[int, int]
"""Number of runs, and of feasible trials; models are fitted again when either changes."""


@dataclass(slots=True)
class ModelProposer:
    """Proposer with a throughput and a memory model.

    If loader and device can't be measured alone, it leaves everything to the sampler.
    """

    time: TimeBudget
    seed: int
    keep: Callable[[Curves], None]
    """Called with the curves of the sides, so that a search that is continued need not repeat them."""
    study: Study = field(init=False)
    has_model: bool = True
    """False after measuring loader and device alone has failed."""
    sides: list[ConfiguredPoint] | None = None
    """Points of loader and device alone; None until they were measured."""
    _model: tuple[_Stamp, RateModel] | None = None
    """The latest throughput model, after the stamp of its data."""
    _peaks: tuple[tuple[_Stamp, int], MemoryModel] | None = None
    """The latest memory model, after the stamp of its data and the number of sides."""
    _believed: tuple[_Stamp, Mapping[int, float]] | None = None
    _candidates: tuple[ResolvedSpace, Candidates] | None = None
    """The candidates, after their space."""
    _outlook: tuple[tuple[_Stamp, int], Outlook] | None = None
    """The latest outlook, after the stamp of its data and the number of running trials."""
    _same_batch_trials: int = 0
    _has_settled: bool = False
    """True once sides in doubt were measured again."""

    def __post_init__(self) -> None:
        """Set the study."""
        self.study = self.time.study

    @property
    def _trials(self) -> Trials:
        return self.time.policy.trials

    @property
    def is_informed(self) -> bool:
        """Return True once loader and device were measured, so that the model leads the search."""
        return self.has_model and bool(self.sides)

    def prepare(self, runner: TrialRunner, deadline_s: float, ceilings: CeilingBook) -> Note | None:
        """Measure loader and device alone, in one process, once, after the baseline.

        Nothing else runs meanwhile, on a cluster either: every proposal rests on these figures, and
        a trial on the same host would change them. If it fails, the sampler alone proposes.

        Args:
            runner: Runs the measurement.
            deadline_s: Seconds that it may take.
            ceilings: The book to enter ceilings into.

        Returns:
            A note of what failed, or None.
        """
        if not self.has_model:
            return None
        if self.sides is not None:
            self._settle_doubts(runner, deadline_s, ceilings)
            return None
        space = self.study.space
        variations = [*loader_variations(space, ceilings), *device_variations(space, ceilings)]
        known = _baseline_points(space, ceilings)
        report = runner.curves(
            space.baseline,
            variations,
            deadline_s=deadline_s,
            stretch_s=self.time.limits.side_s,
            known=known,
        )
        curves = report.curves or Curves()
        self.recall(curves, ceilings)
        # judge success by the new points alone: others come from the baseline's trial
        new = Curves(
            loader=tuple(point for point in curves.loader if point not in known.loader),
            device=tuple(point for point in curves.device if point not in known.device),
            notes=curves.notes,
        )
        points = (*new.loader, *new.device)
        has_nothing_to_measure = report.curves is not None and not points
        if has_nothing_to_measure or any(point.ceiling is not None for point in points):
            self.keep(curves)
            return failed_side(new, report.result.reason)
        self.has_model = False
        for reason in (report.result.reason, *(point.reason for point in points)):
            if reason:
                return sides_not_measured(reason)
        return sides_not_measured(report.result.outcome)

    def recall(self, curves: Curves, ceilings: CeilingBook) -> None:
        """Store the curves of the sides, measured now or before an interruption."""
        if not self.has_model:
            return
        self.sides = configured_points(curves, self.study.space)
        for side in self.sides:
            ceilings.keep(side.side, side.config, side.point.ceiling)

    def _settle_doubts(self, runner: TrialRunner, deadline_s: float, ceilings: CeilingBook) -> None:
        """Measure again, once, the sides whose ceilings a run exceeds or whose measurements differ.

        Other processes may have slowed them.
        """
        sides = self.sides or ()
        doubted = [side.config for side in sides if ceilings.is_in_doubt(side.side, side.config)]
        if not doubted or self._has_settled:
            return
        self._has_settled = True
        own = self.study.space.baseline
        sound = [one for one in sides if one.config not in doubted]
        credible = {side: tuple(one.point for one in sound if one.side == side) for side in SIDES}
        report = runner.curves(
            own,
            doubted,
            deadline_s=deadline_s,
            stretch_s=self.time.limits.settling_side_s,
            known=Curves.model_validate(credible),
        )
        if report.curves is not None:
            again = configured_points(report.curves, self.study.space)
            self.sides = [*sides, *(one for one in again if one not in sides)]
            for one in again:
                ceilings.keep(one.side, one.config, one.point.ceiling)

    def propose(self, best: TrialRecord | None) -> Proposal | None:
        """Return the trial with the largest expected gain; None, for the sampler, without a model or a candidate.

        While no trial is feasible, return settings with which the device was measured alone.
        """
        if best is None:
            params = measured_to_fit(self.sides or (), self.study)
            return None if params is None else Proposal(params=params)
        outlook = self.outlook(best)
        if outlook is None or outlook.params is None:
            return None
        if outlook.gain < self._least_gain(best):
            same = self.at_same_batch(best)
            if same is not None:
                return Proposal(params=same)
        return Proposal(params=outlook.params, is_promising=True)

    def at_same_batch(self, best: TrialRecord | None) -> Params | None:
        """Return what should be the fastest at the baseline's global batch, unless it was tried; twice at most."""
        outlook = self.outlook(best)
        if outlook is None or outlook.same_batch is None:
            return None
        if self._same_batch_trials == self._trials.same_batch:
            return None
        if not self.study.may_propose(outlook.same_batch):
            return None
        self._same_batch_trials += 1
        return outlook.same_batch

    def plainer(self, config: TrainingConfig) -> Params | None:
        """Return a configuration without the switches that are not believed to gain anything, unless tried."""
        if not self.is_informed:
            return None
        space = self.study.space
        unhelpful = unhelpful_switches(config, space, self._rates())
        if not unhelpful:
            return None
        params = params_of(config.model_copy(update=unhelpful), space)
        return params if self.study.may_propose(params) else None

    def skip(self, config: TrainingConfig) -> Note | None:
        """Return why a sample is not run: it is unlikely to fit, or to be informative; None: it is run."""
        if not self.has_model:
            return None
        memory = self._memory()
        if memory.observed:
            chance = float(memory.chance_to_fit([config], self.study.space.limit_bytes)[0])
            if chance < self._trials.likely_to_fit:
                return would_not_fit(round(chance, 3))
        if changes_no_effect_setting(config, self.study.space.baseline, self._no_effect):
            return would_add_nothing()
        if self._model is None:
            return None
        tried = tried_in(self.study)
        # its twin may be as informative
        twin = config.model_copy(update={"pin_memory": not config.pin_memory})
        configs = list(dict.fromkeys([config, twin, *tried]))
        is_redundant = redundant_among(configs, self._model[1].forecast(configs), tried)[0]
        return would_add_nothing() if is_redundant else None

    def pruning_threshold(self, trial: TrialRecord) -> PruningThreshold | None:
        """Return the low end of the best throughput so far; None: the trial runs to its end.

        At the baseline's global batch, only trials at that batch count. The larger the run-to-run
        variation, the lower the threshold: either trial may have been lucky. Whether host or device
        limits the new trial is unknown before its end, so it counts as limited by the host. The
        first group of its kind runs to its end, to show what limits it.
        """
        if not self.has_model or self._is_first_group(trial.config):
            return None
        baseline = self.study.space.baseline
        believed = self.believed()
        spread = self.study.spread
        compared = [record for record in self.study.records if record.number in believed]
        if trial.config.global_batch_ratio(baseline) == 1:
            compared = [one for one in compared if one.config.global_batch_ratio(baseline) == 1]
        lows = dict[int, float]()
        for record in compared:
            own = spread.of(run.window.is_held_by_device for run in record.runs)
            luck = luck_of(own, spread, self.time.policy.stopping)
            lows[record.number] = exp(believed[record.number] - luck)
        number = max(lows, key=lows.__getitem__, default=None)
        if number is None:
            return None
        return PruningThreshold(number=number, low_samples_per_s=lows[number])

    def why_enough(self, best: TrialRecord | None) -> Note | None:
        """Return a note if the best is near a bound, or no candidate promises a gain worth its time; else None."""
        if len(self.study.ended) < self._trials.fewest:
            return None
        outlook = self.outlook(best)
        if outlook is None:
            return None
        for bound in bounds_of(outlook, self.sides or (), self.study, self.believed()):
            share = outlook.best_rate / bound.samples_per_s
            if share >= bound.near_from:
                return near_ceiling(bound=bound.side, ceiling_fraction=min(share, 1.0))
        if outlook.params is None:
            return no_informative_candidate()
        if best is not None and outlook.gain < self._least_gain(best):
            return little_gain_expected(outlook.gain)
        return self.time.why_too_dear(outlook.gain)

    def _least_gain(self, best: TrialRecord) -> float:
        """Return the gain for which another trial is worth its time: more if the runs vary more."""
        spread = self.study.spread.of(run.window.is_held_by_device for run in best.runs)
        return max(self._trials.least_expected, self._trials.least_expected_sds * spread.sd)

    def can_win(self, best: TrialRecord | None) -> float | None:
        """Return the headroom below the lowest bound, as a share of the best's throughput; None if unknown."""
        outlook = self.outlook(best)
        if outlook is None or best is None or best.measurement is None:
            return None
        bounds = bounds_of(outlook, self.sides or (), self.study, self.believed())
        lowest = min((bound.samples_per_s for bound in bounds), default=None)
        return None if lowest is None else max(0.0, lowest / best.measurement.samples_per_s - 1)

    def outlook(self, best: TrialRecord | None) -> Outlook | None:
        """Return the forecast for another trial; None before the sides were measured, and if nothing is feasible."""
        if not self.is_informed or best is None or best.measurement is None:
            return None
        step = self._runs_so_far, len(self.study.running)
        if self._outlook is None or self._outlook[0] != step:
            best_rate = exp(max(self.believed().values()))
            candidates = self._near(best.config)
            outlook = foresee(candidates, self.time, self._rates(), self._memory(), best_rate)
            self._outlook = step, outlook
        return self._outlook[1]

    def believed(self) -> Mapping[int, float]:
        """Return the logarithm of each feasible trial's throughput, by number, as the model fits all runs."""
        if not self.is_informed:
            return mean_log_rates(self.study.ended)
        stamp = self._runs_so_far
        if self._believed is not None and self._believed[0] == stamp:
            return self._believed[1]
        # forecast the trials that the model is fitted to; others keep their last forecast, since
        # of thousands of trials few can be forecast each time
        known = {} if self._believed is None else self._believed[1]
        fitted = {record.number for record in most_telling(self.study.ended)}
        feasible = [record for record in self.study.ended if record.is_feasible]
        asked = [
            record
            for record in feasible
            if record.number in fitted or record.repeats or record.number not in known
        ]
        believed = dict(known)
        if asked:
            log_rates = self._rates().forecast([record.config for record in asked]).log_rate
            for record, log_rate in zip(asked, log_rates, strict=True):
                believed[record.number] = float(log_rate)
        numbers = {record.number for record in feasible}
        believed = {number: rate for number, rate in believed.items() if number in numbers}
        self._believed = stamp, believed
        return believed

    @property
    def _no_effect(self) -> frozenset[str]:
        """Settings without effect, by the measurements of the sides."""
        return no_effect_settings(self.sides or (), self.study.space)

    @property
    def _runs_so_far(self) -> _Stamp:
        """The stamp of the data so far; a comparison or a repeat may make a trial infeasible later."""
        runs = 0
        feasible = 0
        for record in self.study.ended:
            runs += len(record.results)
            feasible += record.is_feasible
        return runs, feasible

    def _rates(self) -> RateModel:
        """Return the throughput model of everything measured so far."""
        stamp = self._runs_so_far
        before = self._model
        if before is not None and before[0] == stamp:
            return before[1]
        environment = self.study.space.environment
        spread = self.study.spread
        observed = list(
            rate_observations(self.sides or [], self.study.ended, environment.device_kind)
        )
        if before is None:
            model = RateModel(observed, environment, spread, self.study.space.policy.costs)
        else:
            model = before[1].with_observations(observed, spread)
        self._model = stamp, model
        return model

    def _memory(self) -> MemoryModel:
        """Return the memory model of everything measured so far."""
        sides = self.sides or []
        space = self.study.space
        stamp = self._runs_so_far, len(sides)
        if self._peaks is None or self._peaks[0] != stamp:
            only_ram = space.environment.has_only_ram
            model = memory_of_trials(
                sides, self.study.ended, space.limit_bytes, limit_is_ram=only_ram
            )
            self._peaks = stamp, model
        return self._peaks[1]

    def _is_first_group(self, config: TrainingConfig) -> bool:
        """Return True for several devices of which no trial with this strategy was measured."""
        measured = [record.config for record in self.study.ended if record.measurement]
        kinds = {(one.strategy, one.world_size) for one in measured}
        return config.world_size > 1 and (config.strategy, config.world_size) not in kinds

    def _near(self, best: TrainingConfig) -> list[tuple[Params, TrainingConfig]]:
        """Return the candidates near the best and the fastest trials, without settings that have no effect."""
        space = self.study.space
        if self._candidates is None or self._candidates[0] is not space:
            self._candidates = space, Candidates(pin_to_baseline(space, self._no_effect), self.seed)
        believed = self.believed()
        ended = [record for record in self.study.ended if record.number in believed]
        rates = {record.config: believed[record.number] for record in ended}
        fastest = sorted(rates, key=rates.__getitem__, reverse=True)[: self._trials.fastest]
        unchanged = {name: getattr(space.baseline, name) for name in self._no_effect}
        found = self._candidates[1].near(list(dict.fromkeys([best, *fastest])))
        return [({**params, **unchanged}, config) for params, config in found]


def _baseline_points(space: ResolvedSpace, ceilings: CeilingBook) -> Curves:
    """Return the points that the baseline's trial has measured; none if it ran on several devices."""
    own = space.baseline
    if own.world_size > 1:
        return Curves()
    known = dict[str, tuple[CurvePoint, ...]]()
    for side in SIDES:
        ceiling = ceilings.ceiling_of(side, own)
        if ceiling is not None and not ceilings.is_in_doubt(side, own):
            known[side] = (CurvePoint(changes={}, ceiling=ceiling),)
    return Curves.model_validate(known)


def make_proposer(
    time: TimeBudget, *, seed: int, keep: Callable[[Curves], None] = lambda _: None
) -> Proposer:
    """Return the proposer of the study's search method.

    Args:
        time: The time budget, with the study.
        seed: Seed of the model's random candidates.
        keep: Called with the curves of loader and device once these were measured.
    """
    if time.study.method.has_model:
        return ModelProposer(time, seed, keep)
    return SamplerProposer(time.study)
