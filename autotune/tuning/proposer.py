"""Propose the next trial by the throughput and memory models, or leave it to the study's sampler.

Comes in: the study as it grows, and its space. Goes out: values to try next; reasons to skip a
sample, to stop a trial early, and to end the search. The loop runs trials; nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from statistics import fmean, median
from typing import Generic, TypeVar

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
from autotune.models.memory import MemoryModel, memory_within
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
from autotune.records.result import Curves
from autotune.records.trial import TrialRecord
from autotune.settings_table import SETTINGS
from autotune.tuning.probe import points_of_baseline
from autotune.tuning.proposals import Candidates, Params, params_of
from autotune.tuning.study import Study
from autotune.tuning.time_budget import TimeBudget

_NOT_TRIED = frozenset({"left_to_smaller_batches", "no_time_left"})
"""Reasons of points that were never measured."""
_ONLY_IN_RUNS = [
    setting.name for setting in SETTINGS if setting.is_of_kernels and not setting.is_in_curves
]
"""Settings that change a step's work, but are not varied where the device is measured alone."""
_T = TypeVar("_T")


@dataclass(slots=True)
class Latest(Generic[_T]):
    """A value that takes long to compute, kept until what it is computed from changes."""

    stamp: object = None
    """The data, or a key of it."""
    value: _T | None = None

    def of(self, stamp: object, make: Callable[[_T | None], _T]) -> _T:
        """Return the value for a stamp; `make` computes it from the one before."""
        if self.value is None or self.stamp != stamp:
            self.value = make(self.value)
            self.stamp = stamp
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Forecast for another trial: the most promising candidate, its gain, and the lowest ceiling."""

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
    lower_side: str
    """The side of that ceiling."""


@dataclass(slots=True)
class Proposer:
    """Propose trials, with a model of loader and device alone, measured once, and of every trial.

    It proposes the trial with the largest expected gain, also after a trial that was far from its
    forecast: left to the sampler, the next one found no more (benchmarks/regret.py).

    Without a model, because the study's method has none or because loader and device can't be
    measured alone, it leaves everything to the sampler: it proposes, skips, stops and ends nothing.
    """

    time: TimeBudget
    seed: int = 0
    """Seed of the random candidates."""
    keep: Callable[[Curves], None] = lambda _: None
    """Called with the curves of the sides, so that a search that is continued need not repeat them."""
    study: Study = field(init=False)
    has_model: bool = field(init=False)
    """False after measuring loader and device alone has failed."""
    sides: list[ConfiguredPoint] = field(default_factory=list)
    """Points of loader and device alone."""
    _is_prepared: bool = False
    _model: Latest[RateModel] = field(default_factory=Latest)
    _peaks: Latest[MemoryModel] = field(default_factory=Latest)
    _believed: Latest[Mapping[int, float]] = field(default_factory=Latest)
    _candidates: Latest[Candidates] = field(default_factory=Latest)
    _outlook: Latest[Outlook] = field(default_factory=Latest)
    _same_batch_trials: int = 0
    _has_settled: bool = False
    """True once sides in doubt were measured again."""

    def __post_init__(self) -> None:
        """Begin with a model if the search method has one."""
        self.study = self.time.study
        self.has_model = self.study.method.has_model

    @property
    def _trials(self) -> Trials:
        return self.time.policy.trials

    @property
    def is_informed(self) -> bool:
        """True once loader and device were measured; fewer trials without a gain end the search then."""
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
        if self._is_prepared:
            self._settle_doubts(runner, deadline_s, ceilings)
            return None
        space = self.study.space
        variations = [*loader_variations(space, ceilings), *device_variations(space, ceilings)]
        known = points_of_baseline(space, ceilings)
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
        reasons = (report.result.reason, *(point.reason for point in points))
        reason = next((reason for reason in reasons if reason), report.result.outcome)
        return sides_not_measured(reason)

    def recall(self, curves: Curves, ceilings: CeilingBook) -> None:
        """Store the curves of the sides, measured now or before an interruption."""
        if not self.has_model:
            return
        self._is_prepared = True
        self.sides = configured_points(curves, self.study.space)
        for side in self.sides:
            ceilings.keep(side.side, side.config, side.point.ceiling)

    def _settle_doubts(self, runner: TrialRunner, deadline_s: float, ceilings: CeilingBook) -> None:
        """Measure again, once, the sides whose ceilings a run exceeds or whose measurements differ.

        Other processes may have slowed them.
        """
        doubted = [one.config for one in self.sides if ceilings.is_in_doubt(one.side, one.config)]
        if not doubted or self._has_settled:
            return
        self._has_settled = True
        credible = [one for one in self.sides if one.config not in doubted]
        report = runner.curves(
            self.study.space.baseline,
            doubted,
            deadline_s=deadline_s,
            stretch_s=self.time.limits.settling_side_s,
            known=Curves.model_validate(
                {side: tuple(one.point for one in credible if one.side == side) for side in SIDES}
            ),
        )
        if report.curves is not None:
            again = configured_points(report.curves, self.study.space)
            self.sides = [*self.sides, *(one for one in again if one not in self.sides)]
            for one in again:
                ceilings.keep(one.side, one.config, one.point.ceiling)

    def propose(self, best: TrialRecord | None) -> None:
        """Enqueue the trial with the largest expected gain; nothing without a model or a candidate.

        While no trial is feasible, enqueue the fastest settings with which the device was measured
        alone.

        Args:
            best: The feasible trial with the best score so far, if any.
        """
        if best is None:
            alone = dict[TrainingConfig, float]()
            for side in self.sides:
                if side.side == "device" and side.point.ceiling is not None:
                    alone[side.config] = side.point.ceiling.samples_per_s
            for config in sorted(alone, key=alone.__getitem__, reverse=True):
                if self.study.propose(params_of(config, self.study.space)):
                    return
            return
        outlook = self.outlook(best)
        if outlook is None or outlook.params is None:
            return
        if outlook.gain >= self._least_gain(best) or not self.propose_same_batch(best):
            self.study.propose(outlook.params, is_promising=True)

    def propose_same_batch(self, best: TrialRecord) -> bool:
        """Enqueue what should be the fastest at the baseline's global batch; False if it was tried, or after two."""
        outlook = self.outlook(best)
        if outlook is None or outlook.same_batch is None:
            return False
        if self._same_batch_trials == self._trials.same_batch:
            return False
        if not self.study.propose(outlook.same_batch):
            return False
        self._same_batch_trials += 1
        return True

    def plainer(self, config: TrainingConfig) -> Params | None:
        """Return a configuration without the switches that are not believed to gain anything, if there are any."""
        if not self.is_informed:
            return None
        space = self.study.space
        unhelpful = unhelpful_switches(config, space, self._rates())
        return params_of(config.model_copy(update=unhelpful), space) if unhelpful else None

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
        if self._model.value is None:
            return None
        tried = tried_in(self.study)
        # its twin may be as informative
        twin = config.model_copy(update={"pin_memory": not config.pin_memory})
        configs = list(dict.fromkeys([config, twin, *tried]))
        is_redundant = redundant_among(
            configs, self._model.value.forecast(configs), tried, self._trials
        )[0]
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
        has_same_batch = trial.config.global_batch_ratio(baseline) == 1
        lows = dict[int, float]()
        for record in self.study.records:
            if record.number not in believed:
                continue
            if has_same_batch and record.config.global_batch_ratio(baseline) != 1:
                continue
            own = spread.of(run.window.is_held_by_device for run in record.runs)
            luck = luck_of(own, spread, self.time.policy.stopping)
            lows[record.number] = exp(believed[record.number] - luck)
        number = max(lows, key=lows.__getitem__, default=None)
        if number is None:
            return None
        return PruningThreshold(number=number, low_samples_per_s=lows[number])

    def _is_first_group(self, config: TrainingConfig) -> bool:
        """Return True for several devices of which no trial with this strategy was measured."""
        measured = {
            (record.config.strategy, record.config.world_size)
            for record in self.study.ended
            if record.measurement
        }
        return config.is_group and (config.strategy, config.world_size) not in measured

    def why_enough(self, best: TrialRecord | None) -> Note | None:
        """Return a note if the best is near a bound, or no candidate promises a gain worth its time; else None."""
        if len(self.study.ended) < self._trials.fewest:
            return None
        outlook = self.outlook(best)
        if best is None or outlook is None:
            return None
        for side, bound in self._bounds(outlook).items():
            share = outlook.best_rate / bound
            near = self._trials.near_cores if side == "cores" else self._trials.near_ceiling
            if share >= near:
                return near_ceiling(bound=side, ceiling_fraction=min(share, 1.0))
        if outlook.params is None:
            return no_informative_candidate()
        if outlook.gain < self._least_gain(best):
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
        lowest = min(self._bounds(outlook).values(), default=None)
        return None if lowest is None else max(0.0, lowest / best.measurement.samples_per_s - 1)

    # Upper bounds of the throughput that no open setting moves: the lowest ceiling of a side, and
    # the cores once the job itself fills them. Near one of them the search is over.

    def _bounds(self, outlook: Outlook) -> dict[str, float]:
        """Return the bounds that are known, in samples/s, by what sets them."""
        found = dict[str, float]()
        if outlook.lower_ceiling < inf:
            found[outlook.lower_side] = outlook.lower_ceiling
        cores = self.cores_bound()
        if cores is not None:
            found["cores"] = cores
        return found

    def cores_bound(self) -> float | None:
        """Return the throughput at which the job itself would fill every core, at the least CPU time per sample.

        The least CPU time is the smaller of two figures: that of the cheapest trial so far, and
        that of the cheapest loader and the cheapest step alone, over all open settings. So a
        setting that wastes CPU time, such as threads that wait for each other, lowers no bound.
        Trials with and without workers have bounds of their own: a loader without workers need not
        pass batches on, and fills one core at most.

        Returns:
            Samples per second. None if the kernel does not count CPU time, if workers are open and
            no trial had any, if no side was measured alone, and on several hosts.
        """
        space = self.study.space
        believed = self.believed()
        # CPU seconds per sample of each trial that other processes did not slow
        used_cpu_s = dict[TrainingConfig, float]()
        cores = 0
        for record in self.study.ended:
            known = [run.host_load for run in record.runs if run.host_load is not None]
            loads = [load for load in known if not load.is_loaded]
            if loads and record.number in believed:
                cores = max(cores, *(load.cores for load in loads))
                busy_cores = fmean(load.own_s / load.seconds for load in loads)
                used_cpu_s[record.config] = max(busy_cores, 1e-6) / exp(believed[record.number])
        if not used_cpu_s or space.environment.hosts > 1:
            return None
        step_cpu_s = self._least_step_cpu_s(used_cpu_s)
        most = 0.0
        for has_workers in {space.baseline.has_workers, *map(bool, space.domains["num_workers"])}:
            in_trials_cpu_s = [
                cpu_s for config, cpu_s in used_cpu_s.items() if config.has_workers == has_workers
            ]
            if not in_trials_cpu_s:
                return None
            loaders = [side for side in self.sides if side.side == "loader"]
            loaders = [side for side in loaders if side.config.has_workers == has_workers]
            alone_cpu_s = _least_loader_cpu_s(loaders) + step_cpu_s
            if alone_cpu_s == 0:
                return None
            bound = cores / min(*in_trials_cpu_s, alone_cpu_s)
            if not has_workers:
                # one process loads: it is no faster than the fastest that was measured
                ceilings = [side.point.ceiling for side in loaders]
                fastest = max((one.samples_per_s for one in ceilings if one), default=inf)
                bound = min(bound, fastest)
            most = max(most, bound)
        return most

    def _least_step_cpu_s(self, ran: Collection[TrainingConfig]) -> float:
        """Return the CPU seconds per sample of the cheapest step; 0 while an open setting is not measured.

        Return 0 on an accelerator too: a host that waits for it keeps a core busy without working.
        """
        space = self.study.space
        if space.environment.device_kind != "cpu":
            return 0.0
        for name in _ONLY_IN_RUNS:
            if not set(space.domains[name]) <= {getattr(config, name) for config in ran}:
                return 0.0
        known = list[float]()
        for one in self.sides:
            if one.side != "device" or self.study.is_left_out(one.config):
                continue
            reason = one.point.reason
            if one.point.ceiling is not None:
                if one.point.cpu_s_per_sample is not None:  # not counted where a trial measured it
                    known.append(one.point.cpu_s_per_sample)
            elif isinstance(reason, Note) and reason.code in _NOT_TRIED:
                return 0.0
        return min(known, default=0.0)

    # The forecasts, computed again once another trial has ended

    def outlook(self, best: TrialRecord | None) -> Outlook | None:
        """Return the forecast for another trial; None before the sides were measured, and if nothing is feasible."""
        if not self.is_informed or best is None or best.measurement is None:
            return None
        stamp = self.study.ended, len(self.study.running)
        return self._outlook.of(stamp, lambda _: self._foresee(best))

    def believed(self) -> Mapping[int, float]:
        """Return the logarithm of each feasible trial's throughput, by number, from all of its runs.

        A model that leads the search forecasts it; else it is the mean of the runs.
        """
        ended = self.study.ended

        def forecast(known: Mapping[int, float] | None) -> Mapping[int, float]:
            if not self.is_informed:
                return mean_log_rates(ended)
            # forecast the trials that the model is fitted to; others keep their last forecast,
            # since of thousands of trials few can be forecast each time
            fitted = {
                record.number
                for record in most_telling(ended, self.time.policy.throughput.most_trials)
            }
            feasible = [record for record in ended if record.is_feasible]
            asked = [
                record
                for record in feasible
                if record.number in fitted or record.repeats or record.number not in (known or {})
            ]
            believed = dict(known or {})
            if asked:
                log_rates = self._rates().forecast([record.config for record in asked]).log_rate
                for record, log_rate in zip(asked, log_rates, strict=True):
                    believed[record.number] = float(log_rate)
            return {record.number: believed[record.number] for record in feasible}

        return self._believed.of((ended, self.is_informed), forecast)

    @property
    def _no_effect(self) -> frozenset[str]:
        """Settings without effect, by the measurements of the sides."""
        return no_effect_settings(self.sides, self.study.space)

    def _rates(self) -> RateModel:
        """Return the throughput model of everything measured so far."""
        ended = self.study.ended

        def fit(before: RateModel | None) -> RateModel:
            environment = self.study.space.environment
            policy = self.time.policy
            observed = list(rate_observations(self.sides, ended, environment.device_kind, policy))
            if before is None:
                return RateModel(observed, environment, self.study.spread, policy.throughput)
            return before.with_observations(observed, self.study.spread)

        return self._model.of(ended, fit)

    def _memory(self) -> MemoryModel:
        """Return the memory model of everything measured so far."""
        ended = self.study.ended
        return self._peaks.of(
            (ended, len(self.sides)),
            lambda _: memory_within(self.study.space, ended, self.sides),
        )

    def _near(self, best: TrainingConfig) -> list[tuple[Params, TrainingConfig]]:
        """Return the candidates near the best and the fastest trials, without settings that have no effect."""
        space = self.study.space
        candidates = self._candidates.of(
            space, lambda _: Candidates(pin_to_baseline(space, self._no_effect), self.seed)
        )
        believed = self.believed()
        ended = [record for record in self.study.ended if record.number in believed]
        rates = {record.config: believed[record.number] for record in ended}
        fastest = sorted(rates, key=rates.__getitem__, reverse=True)[: self._trials.fastest]
        unchanged = {name: getattr(space.baseline, name) for name in self._no_effect}
        found = candidates.near(list(dict.fromkeys([best, *fastest])))
        return [({**params, **unchanged}, config) for params, config in found]

    def _foresee(self, best: TrialRecord) -> Outlook:
        """Forecast the candidates, and pick the most promising of those that fit, are open and informative.

        Weigh each gain by the seconds of its trial. A trial that takes too long for the time left
        is picked only if no other is left. Gains are over the highest believed throughput, since a
        measured one may be lucky. Source of this plug-in: Picheny, Wagner, Ginsbourger 2013, "A
        benchmark of kriging-based infill criteria for noisy optimization".
        """
        study = self.study
        space = study.space
        trials = self._trials
        rates = self._rates()
        best_rate = exp(max(self.believed().values()))
        candidates = self._near(best.config)
        configs = [config for _, config in candidates]
        tried = tried_in(study)
        running = [trial.config for trial in study.running]
        forecast = rates.forecast(configs, running)
        fits = self._memory().chance_to_fit(configs, space.limit_bytes)
        failed = [record.config for record in study.ended if has_failed(record)]
        feasible = [record.config for record in study.ended if record.is_feasible]

        # the gain over the best so far, and over what is running
        bar = best_rate
        if running:
            bar = max([best_rate, *np.exp(rates.forecast(running).log_rate)])
        most = most_gain(forecast, bar, trials.side_sds)
        gains = np.minimum(expected_gain(forecast, bar), most)
        gains = gains * fits * chance_to_run(configs, failed, feasible, trials.blamed)
        is_open = np.array([study.is_open(config) for config in configs])
        may_try = is_open & (fits >= trials.sure_to_fit)
        is_informative = may_try & ~redundant_among(configs, forecast, tried, trials)

        # the lowest ceiling among those that are likely to fit
        left_out = np.array([study.is_left_out(config) for config in configs])
        inside = (fits >= trials.likely_to_fit) & ~left_out
        ceilings = dict[str, float]()
        for side in (*SIDES, "host"):
            highest: Floats = getattr(forecast, side) * np.exp(
                trials.ceiling_sds * getattr(forecast, f"{side}_sd")
            )
            ceilings[side] = float(highest[inside].max(initial=0.0))
        lower_side = min(ceilings, key=ceilings.__getitem__)

        # the fastest at the baseline's global batch, tried or not
        has_run = set(tried)
        keeps = np.array([config.global_batch_ratio(space.baseline) == 1 for config in configs])
        keeps &= is_informative | np.array([config in has_run for config in configs])
        same = int(np.argmax(np.where(keeps, forecast.log_rate, -inf)))

        # the largest gain for each second of its trial, if possible within the time left
        trials_s = self._trial_seconds(configs, np.exp(forecast.log_rate))
        soon = is_informative & (trials_s <= self.time.longest_s)
        eligible = soon if soon.any() else is_informative
        first = int(np.argmax(np.where(eligible, gains / trials_s, -1.0)))
        return Outlook(
            params=candidates[first][0] if is_informative.any() else None,
            gain=float(gains[is_informative].max(initial=0.0)),
            same_batch=candidates[same][0] if keeps.any() else None,
            best_rate=best_rate,
            lower_ceiling=ceilings[lower_side] or inf,
            lower_side=lower_side,
        )

    def _trial_seconds(self, configs: Sequence[TrainingConfig], expected: Floats) -> Floats:
        """Return the seconds that a trial of each configuration should take, from its expected samples/s."""
        time = self.time
        estimates = time.policy.estimates
        pairs = list(zip(configs, expected, strict=True))
        epoch_samples = self.study.space.facts.dataset_length
        if time.is_short_search:
            trials_s = [
                measuring_s(config, rate, epoch_samples, estimates) for config, rate in pairs
            ]
            rebuild_s = self._trials.rebuilds * time.build_s
            alone_s = [0.0 if shares_process(config) else rebuild_s for config in configs]
            return np.add(trials_s, alone_s)
        # a slow start, or slow steps, must promise more
        waits_s = np.array(
            [first_batches_s(config, rate, epoch_samples, estimates) for config, rate in pairs]
        )
        slow_s = np.array([steps_s(config, rate, estimates) for config, rate in pairs])
        beyond_s = np.maximum(waits_s - self._trials.short_wait_s, 0.0)
        beyond_s += np.maximum(slow_s - time.limits.shortest_window_s, 0.0)
        return time.shortest_trial_s + beyond_s


def tried_in(study: Study) -> list[TrainingConfig]:
    """Return the configurations with a measured throughput, also of trials that were stopped early."""
    return [
        record.config
        for record in study.ended
        if record.measurement is not None or record.result.blocks
    ]


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
