"""Propose the next trial: by the throughput and memory models, or by one of Optuna's samplers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
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
    would_not_fit,
    would_tell_nothing,
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

# The seam between the loop of a search and what proposes its trials, and its plain side: Optuna's
# samplers alone.


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Values to try next."""

    params: Params
    is_promising: bool = False
    """They are expected to win most: a search that may stop counts how often such a trial brought
    nothing."""


class Proposer(Protocol):
    """Proposes trials from what a study holds. `best` is the feasible trial with the best score so far, if any."""

    @property
    def has_model(self) -> bool:
        """Whether it measures loader and device alone before it proposes; trials need not repeat that."""
        ...

    @property
    def is_informed(self) -> bool:
        """Whether it has measured what its proposals rest on: then it leads, and fewer vain trials end the search."""
        ...

    def prepare(
        self, runner: TrialRunner, deadline_s: float, ceilings: CeilingBook, /
    ) -> Note | None:
        """Measure what proposals rest on, once, after the baseline; what of it failed, or None. Keeps ceilings."""
        ...

    def recall(self, curves: Curves, ceilings: CeilingBook, /) -> None:
        """Take up what `prepare` measured before an interruption."""
        ...

    def propose(self, best: TrialRecord | None, /) -> Proposal | None:
        """What to try next; None: the study's sampler draws."""
        ...

    def at_same_batch(self, best: TrialRecord | None, /) -> Params | None:
        """What to try at the baseline's global batch before the search ends; None where nothing is left to try."""
        ...

    def plainer(self, config: TrainingConfig, /) -> Params | None:
        """What to try before the search ends: what would be recommended, without what is not believed to win."""
        ...

    def skip(self, config: TrainingConfig, /) -> Note | None:
        """Why a sample is not worth a run ("would_not_fit", "would_tell_nothing"), or None."""
        ...

    def pruning_threshold(self, trial: TrialRecord, /) -> PruningThreshold | None:
        """The rate below which a trial is stopped early; None: it runs to its end."""
        ...

    def why_enough(self, best: TrialRecord | None, /) -> Note | None:
        """Why no further trial is worth its time, or None."""
        ...

    def believed(self) -> Mapping[int, float]:
        """Of feasible trials, by number, the logarithm of the rate that is believed from all runs so far."""
        ...

    def can_win(self, best: TrialRecord | None, /) -> float | None:
        """What other settings can win at most over the best, as a share of its rate; None where nothing tells."""
        ...


@dataclass(slots=True)
class SamplerProposer:
    """Leaves every proposal to the study's sampler; it measures, skips, prunes and ends nothing."""

    study: Study
    has_model: bool = field(default=False, init=False)
    is_informed: bool = field(default=False, init=False)
    _believed: dict[int, float] = field(default_factory=dict, init=False)
    _known: dict[int, TrialRecord] = field(default_factory=dict, init=False)
    """What `_believed` was made from, by number: it is asked for several times a trial."""

    def prepare(self, _runner: TrialRunner, _deadline_s: float, _ceilings: CeilingBook) -> None:
        """Nothing to measure."""

    def recall(self, _curves: Curves, _ceilings: CeilingBook) -> None:
        """Nothing to take up."""

    def propose(self, _best: TrialRecord | None) -> None:
        """The sampler draws."""

    def at_same_batch(self, _best: TrialRecord | None) -> None:
        """Nothing beyond what the loop itself derives from the best trial."""

    def plainer(self, _best: TrainingConfig) -> None:
        """Nothing is believed of single settings."""

    def skip(self, _config: TrainingConfig) -> None:
        """Every sample is run."""

    def pruning_threshold(self, _trial: TrialRecord) -> None:
        """Every trial runs to its end."""

    def why_enough(self, _best: TrialRecord | None) -> None:
        """Patience alone ends the search."""

    def believed(self) -> Mapping[int, float]:
        """The mean of a trial's runs."""
        new = [
            record for record in self.study.ended if self._known.get(record.number) is not record
        ]
        self._known.update((record.number, record) for record in new)
        self._believed |= mean_log_rates(new)
        return self._believed

    def can_win(self, _best: TrialRecord | None) -> None:
        """Not known."""


# Bounds that no open setting moves: the lowest ceiling of a side, and the cores once the job itself
# fills them.
#
# Reads the study and what was measured of both sides alone, and changes nothing. Near one of them a
# search is over.


_NOT_TRIED = frozenset({"left_to_smaller_batches", "no_time_left"})
"""Reasons of points that nothing has tried to measure."""
_ONLY_IN_RUNS = [
    setting.name for setting in SETTINGS if setting.is_of_kernels and not setting.is_in_curves
]
"""Settings that change a step's work and that no side alone has shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A rate that no open setting can exceed."""

    side: Literal["loader", "device", "host", "copy", "cores"]
    samples_per_s: float
    near_from: float
    """Share of it from which a search is over."""


def bounds_of(
    outlook: Outlook, sides: Sequence[ConfiguredPoint], study: Study, believed: Mapping[int, float]
) -> list[Bound]:
    """Return the bounds that are known: the lowest ceiling, and the cores.

    Args:
        outlook: What a further trial can win; it knows the ceilings.
        sides: What was measured of loader and device alone.
        study: The trials so far, and their space.
        believed: Logarithms of the trials' rates, by number.
    """
    found = list[Bound]()
    policy = study.space.policy.trials
    if outlook.lower_ceiling < inf:
        found.append(
            Bound(
                side=outlook.lower_side,
                samples_per_s=outlook.lower_ceiling,
                near_from=policy.near_ceiling,
            )
        )
    cores = cores_bound(sides, study, believed)
    if cores is not None:
        found.append(Bound(side="cores", samples_per_s=cores, near_from=policy.near_cores))
    return found


def cores_bound(
    sides: Sequence[ConfiguredPoint], study: Study, believed: Mapping[int, float]
) -> float | None:
    """Return the rate at which the job by itself would fill every core, at the least work that a sample may take.

    That least work is the smaller of two figures, so that a setting that wastes cores, as threads
    that wait for each other do, bounds nothing: the CPU seconds of a sample in the cheapest trial
    so far, and what the cheapest loader and the cheapest step take alone, over all open settings.
    Trials with and without workers are bounded by themselves: a loader without workers spares the
    work of passing batches on, and fills one core at most.

    Returns:
        Samples per second. None where the kernel does not count the cores, before a trial with
        workers where these are open, where no side was measured alone, and on several hosts.
    """
    space = study.space
    worked = dict[TrainingConfig, float]()
    cores = 0
    for record in study.ended:
        loads = [
            run.host_load
            for run in record.runs
            if run.host_load is not None and not run.host_load.is_loaded
        ]
        if loads and record.number in believed:
            cores = max(cores, *(load.cores for load in loads))
            busy_cores = fmean(load.own_s / load.seconds for load in loads)
            worked[record.config] = max(busy_cores, 1e-6) / exp(believed[record.number])
    if not worked or space.environment.hosts > 1:
        return None
    counts = {space.baseline.num_workers, *whole_numbers(space.domains["num_workers"])}
    step_cpu_s = _least_step_cpu_s(sides, study, worked)
    most = 0.0
    for has_workers in {count > 0 for count in counts}:
        alike = [
            cpu_s for config, cpu_s in worked.items() if (config.num_workers > 0) == has_workers
        ]
        if not alike:
            return None
        loaders = [
            side
            for side in sides
            if side.side == "loader" and (side.config.num_workers > 0) == has_workers
        ]
        alone_cpu_s = _least_loader_cpu_s(loaders) + step_cpu_s
        if alone_cpu_s == 0:
            return None
        bound = cores / min(*alike, alone_cpu_s)
        if not has_workers:
            rates = [
                side.point.ceiling.samples_per_s
                for side in loaders
                if side.point.ceiling is not None
            ]
            bound = min(bound, max(rates, default=inf))
        most = max(most, bound)
    return most


def _least_loader_cpu_s(loaders: Sequence[ConfiguredPoint]) -> float:
    """CPU seconds of a sample in the cheapest loader; 0 where that was not measured.

    Only threads and batch change a loader's work; of all points that agree in these the median is
    taken, since a stretch of 0.2 s counts CPU time in steps of 5 %.
    """
    known = [
        (
            (side.config.worker_threads or 0, side.config.micro_batch_size),
            side.point.cpu_s_per_sample,
        )
        for side in loaders
        if side.point.ceiling is not None and side.point.cpu_s_per_sample is not None
    ]
    groups = groupby(sorted(known), key=lambda pair: pair[0])
    return min((median(cpu_s for _, cpu_s in group) for _, group in groups), default=0.0)


def _least_step_cpu_s(
    sides: Sequence[ConfiguredPoint], study: Study, ran: Collection[TrainingConfig]
) -> float:
    """CPU seconds of a sample in the cheapest step, over all open settings; 0 where a setting is yet to be measured.

    0 on an accelerator too: a host that waits for it keeps a core busy, which is no work.
    """
    space = study.space
    if space.environment.device_kind != "cpu":
        return 0.0
    for name in _ONLY_IN_RUNS:
        if not set(space.domains[name]) <= {getattr(config, name) for config in ran}:
            return 0.0
    steps = [side for side in sides if side.side == "device" and not study.is_left_out(side.config)]
    reasons = (side.point.reason for side in steps if side.point.ceiling is None)
    if any(isinstance(reason, Note) and reason.code in _NOT_TRIED for reason in reasons):
        return 0.0
    known = (side.point.cpu_s_per_sample for side in steps if side.point.ceiling is not None)
    return min(
        (cpu_s for cpu_s in known if cpu_s is not None), default=0.0
    )  # not counted where a trial measured it


# Estimate what a further trial can win: the candidates' forecasts against the best trial so far.
#
# Reads the study, and changes nothing.


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What can still be expected of a search."""

    params: Params | None
    """The trial with the largest expected gain; None where nothing is left that could tell more."""
    gain: float
    """What a trial is expected to win at most over the best so far, as a share of it, however long
    it takes."""
    same_batch: Params | None
    """The settings that should be the fastest at the baseline's global batch."""
    best_rate: float
    """Throughput that the best trial so far is believed to reach."""
    lower_ceiling: float
    """Throughput that nothing that fits should pass: the lowest of what the fastest loader, device,
    copies and host reach, each with a standard deviation on top."""
    lower_side: Literal["loader", "device", "copy", "host"]
    """The side of that ceiling."""
    scatter_sd: float
    """What measuring the same settings anew may differ by on this machine, relatively."""


def tried_in(study: Study) -> list[TrainingConfig]:
    """The configurations that have shown a rate."""
    return [
        record.config
        for record in study.ended
        if record.measurement is not None or record.result.blocks
    ]


def measured_to_fit(sides: Sequence[ConfiguredPoint], study: Study) -> Params | None:
    """Of what the device was measured alone with, and which may be tried, the fastest."""
    rates = {
        side.config: side.point.ceiling.samples_per_s
        for side in sides
        if side.side == "device" and side.point.ceiling is not None
    }
    ranked = (
        params_of(config, study.space)
        for config in sorted(rates, key=rates.__getitem__, reverse=True)
    )
    return next((params for params in ranked if study.may_propose(params)), None)


def foresee(
    candidates: Sequence[tuple[Params, TrainingConfig]],
    time: TimeBudget,
    rates: RateModel,
    memory: MemoryModel,
    best_rate: float,
) -> Outlook:
    """Weigh candidates: the largest expected gain among those that fit, are open and could tell something.

    The largest gain for each second of its trial counts, and what takes too long to measure for the
    time left is chosen only where nothing else is left.

    Args:
        candidates: What may be tried.
        time: What is left of it, and the study.
        rates: What each should reach.
        memory: What each should take.
        best_rate: The highest that is believed of a feasible trial, since a lucky window is no
            yardstick. Source of the plug-in: Picheny, Wagner, Ginsbourger 2013, "A benchmark of
            kriging-based infill criteria for noisy optimization".
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
    # a further trial is to win over what runs as well
    bar = max([best_rate, *np.exp(rates.forecast(running).log_rate)]) if running else best_rate
    gains = np.minimum(expected_gain(forecast, bar), most_gain(forecast, bar))
    gains = gains * fits * chance_to_run(configs, failed, feasible)
    may_try = np.array([study.is_open(config) for config in configs]) & (fits >= trials.sure_to_fit)
    tells = may_try & ~redundant_among(configs, forecast, tried)
    inside = (fits >= trials.likely_to_fit) & ~np.array(
        [study.is_left_out(config) for config in configs]
    )
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
    has_run = set(tried)
    keeps = np.array([config.global_batch_ratio(space.baseline) == 1 for config in configs])
    keeps &= tells | np.array([config in has_run for config in configs])
    same = int(np.argmax(np.where(keeps, forecast.log_rate, -inf)))
    epoch_samples = space.facts.dataset_length
    expected = np.exp(forecast.log_rate)
    waits_s, trials_s = (
        np.array(
            [
                seconds(config, rate, epoch_samples)
                for config, rate in zip(configs, expected, strict=True)
            ]
        )
        for seconds in (first_batches_s, measuring_s)
    )
    if time.is_brief:
        trials_s += [
            0.0 if shares_process(config) else trials.rebuilds * time.build_s for config in configs
        ]
    else:  # what takes long to begin with, or has long steps, must promise more
        slow_s = np.array(
            [steps_s(config, rate) for config, rate in zip(configs, expected, strict=True)]
        )
        beyond_s = np.maximum(waits_s - trials.short_wait_s, 0.0) + np.maximum(
            slow_s - time.limits.shortest_window_s, 0.0
        )
        trials_s = time.shortest_trial_s + beyond_s
    soon = tells & (trials_s <= time.longest_s())
    chosen = int(np.argmax(np.where(soon if soon.any() else tells, gains / trials_s, -1.0)))
    return Outlook(
        params=candidates[chosen][0] if tells.any() else None,
        gain=float(gains[tells].max(initial=0.0)),
        same_batch=candidates[same][0] if keeps.any() else None,
        best_rate=best_rate,
        lower_ceiling=ceilings[lower_side] or inf,
        lower_side=lower_side,
        scatter_sd=forecast.scatter_sd,
    )


# Proposals of a model of the machine, of loader and device alone, measured once, and of every
# trial.
#
# Comes in: the study as it grows, and its space. Goes out: values to try next, or None where the
# study's sampler is to draw; reasons to skip a sample, to stop a trial early, and to end the
# search. The loop tries them; nothing here does.
#
# The model proposes the trial with the largest expected gain, also after a trial that was far from
# what it expected: left to the sampler, the next one found no more (benchmarks/regret.py).


_Stamp = tuple[int, int]
"""Runs so far, and trials that may win: where either changes, models are fitted again."""


@dataclass(slots=True)
class ModelProposer:
    """A Proposer. Where loader and device could not be measured alone, all is left to the sampler."""

    time: TimeBudget
    seed: int
    keep: Callable[[Curves], None]
    """Given what measuring the sides has shown, so that a search that goes on need not repeat it."""
    study: Study = field(init=False)
    has_model: bool = True
    """False once loader and device could not be measured alone."""
    sides: list[ConfiguredPoint] | None = None
    """What loader and device reach alone; None until that was measured."""
    _model: tuple[_Stamp, RateModel] | None = None
    """The latest, and the number of runs that it was made from."""
    _peaks: tuple[tuple[_Stamp, int], MemoryModel] | None = None
    """The latest model of memory, and the numbers of runs and of looks that it was made from."""
    _believed: tuple[_Stamp, Mapping[int, float]] | None = None
    _candidates: tuple[ResolvedSpace, Candidates] | None = None
    """Of the space that was searched when they were made."""
    _outlook: tuple[tuple[_Stamp, int], Outlook] | None = None
    """The latest, and the numbers of ended and running trials that it was made at."""
    _same_batch_trials: int = 0
    _has_settled: bool = False
    """Sides in doubt were measured again."""

    def __post_init__(self) -> None:
        """Take the study of the time's."""
        self.study = self.time.study

    @property
    def _trials(self) -> Trials:
        return self.time.policy.trials

    @property
    def is_informed(self) -> bool:
        """Whether loader and device were measured: then the model leads, and fewer vain trials end the search."""
        return self.has_model and bool(self.sides)

    def prepare(self, runner: TrialRunner, deadline_s: float, ceilings: CeilingBook) -> Note | None:
        """Measure loader and device alone, in one process, once, after the baseline; what of it failed, or None.

        Nothing else runs meanwhile, on a cluster either: every proposal rests on this, and a trial
        beside it would share its host and change what it measures. Where it failed, the sampler
        alone goes on.
        """
        if not self.has_model:
            return None
        if self.sides is not None:
            self._settle_doubts(runner, deadline_s, ceilings)
            return None
        space = self.study.space
        variations = [*loader_variations(space, ceilings), *device_variations(space, ceilings)]
        known = _known(space, ceilings)
        report = runner.curves(
            space.baseline,
            variations,
            deadline_s=deadline_s,
            stretch_s=self.time.limits.side_s,
            known=known,
        )
        curves = report.curves or Curves()
        self.recall(curves, ceilings)
        # what the baseline's trial has measured does not show whether this could measure anything
        new = Curves(
            loader=tuple(point for point in curves.loader if point not in known.loader),
            device=tuple(point for point in curves.device if point not in known.device),
            remarks=curves.remarks,
        )
        points = (*new.loader, *new.device)
        has_nothing_to_measure = report.curves is not None and not points
        if has_nothing_to_measure or any(point.ceiling is not None for point in points):
            self.keep(curves)
            return failed_side(new, report.result.reason)
        self.has_model = False
        reasons = (report.result.reason, *(point.reason for point in points))
        return sides_not_measured(
            next((reason for reason in reasons if reason), report.result.outcome)
        )

    def recall(self, curves: Curves, ceilings: CeilingBook) -> None:
        """Take up what measuring the sides has shown, now or before an interruption."""
        if not self.has_model:
            return
        self.sides = configured_points(curves, self.study.space)
        for side in self.sides:
            _keep_point(ceilings, side)

    def _settle_doubts(self, runner: TrialRunner, deadline_s: float, ceilings: CeilingBook) -> None:
        """Measure again, once, the sides that runs exceed or that two measurements differ in: others slowed them."""
        sides = self.sides or ()
        doubted = [side.config for side in sides if ceilings.is_in_doubt(side.side, side.config)]
        if not doubted or self._has_settled:
            return
        self._has_settled = True
        own = self.study.space.baseline
        credible = {
            side: tuple(
                one.point for one in sides if one.side == side and one.config not in doubted
            )
            for side in SIDES
        }
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
                _keep_point(ceilings, one)

    def propose(self, best: TrialRecord | None) -> Proposal | None:
        """Return the trial with the largest expected gain; None, for the sampler, without a model or a candidate.

        Where nothing has run within the limit yet, it is what was measured to fit as a side alone.
        """
        if best is None:
            params = measured_to_fit(self.sides or (), self.study)
            return None if params is None else Proposal(params=params)
        outlook = self.outlook(best)
        if outlook is None or outlook.params is None:
            return None
        if (
            outlook.gain < self._least_gain(best)
            and (params := self.at_same_batch(best)) is not None
        ):
            return Proposal(params=params)
        return Proposal(params=outlook.params, is_promising=True)

    def at_same_batch(self, best: TrialRecord | None) -> Params | None:
        """What should be the fastest at the baseline's global batch, unless it was tried; twice at most."""
        outlook = self.outlook(best)
        if (
            outlook is None
            or outlook.same_batch is None
            or self._same_batch_trials == self._trials.same_batch
        ):
            return None
        if not self.study.may_propose(outlook.same_batch):
            return None
        self._same_batch_trials += 1
        return outlook.same_batch

    def plainer(self, config: TrainingConfig) -> Params | None:
        """A configuration without the switches that are not believed to win anything, unless that was tried."""
        space = self.study.space
        idle = unhelpful_switches(config, space, self._rates()) if self.is_informed else {}
        params = params_of(config.model_copy(update=idle), space)
        return params if idle and self.study.may_propose(params) else None

    def skip(self, config: TrainingConfig) -> Note | None:
        """Why a sample is not run: it is not likely to fit, or to tell anything new."""
        if not self.has_model:
            return None
        memory = self._memory()
        if memory.observed:
            chance = float(memory.chance_to_fit([config], self.study.space.limit_bytes)[0])
            if chance < self._trials.likely_to_fit:
                return would_not_fit(round(chance, 3))
        if changes_no_effect_setting(config, self.study.space.baseline, self._idle):
            return would_tell_nothing()
        if self._model is None:
            return None
        tried = tried_in(self.study)
        otherwise = config.model_copy(
            update={"pin_memory": not config.pin_memory}
        )  # may tell as much
        configs = list(dict.fromkeys([config, otherwise, *tried]))
        is_redundant = redundant_among(configs, self._model[1].forecast(configs), tried)[0]
        return would_tell_nothing() if is_redundant else None

    def pruning_threshold(self, trial: TrialRecord) -> PruningThreshold | None:
        """The rate of the best so far, at the baseline's batch of the best of those at that.

        The more runs of the same settings differ, the lower: either may have been lucky. Who holds
        the trial that runs is known at its end alone, so it counts as held by the host. None for
        the first group of its kind, which runs to its end to show what limits it, and without a
        model.
        """
        if not self.has_model or self._is_first_group(trial.config):
            return None
        space = self.study.space
        believed = self.believed()
        spread = self.study.spread
        keeps_batch = trial.config.global_batch_ratio(space.baseline) == 1
        lows = {
            record.number: exp(
                believed[record.number]
                - luck_of(
                    spread.of(run.window.is_held_by_device for run in record.runs),
                    spread,
                    self.time.policy.stopping,
                )
            )
            for record in self.study.records
            if record.number in believed
            and (not keeps_batch or record.config.global_batch_ratio(space.baseline) == 1)
        }
        number = max(lows, key=lows.__getitem__, default=None)
        return (
            None
            if number is None
            else PruningThreshold(number=number, low_samples_per_s=lows[number])
        )

    def why_enough(self, best: TrialRecord | None) -> Note | None:
        """The best is near a bound, or no candidate is left that is expected to win more, or enough of it."""
        outlook = self.outlook(best) if len(self.study.ended) >= self._trials.fewest else None
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
        """The gain for which another trial is worth its seconds; more where runs differ so that less hardly shows."""
        spread = self.study.spread.of(run.window.is_held_by_device for run in best.runs)
        return max(self._trials.least_expected, self._trials.least_expected_sds * spread.sd)

    def can_win(self, best: TrialRecord | None) -> float | None:
        """What the bounds leave."""
        outlook = self.outlook(best)
        if outlook is None or best is None or best.measurement is None:
            return None
        bounds = bounds_of(outlook, self.sides or (), self.study, self.believed())
        lowest = min((bound.samples_per_s for bound in bounds), default=None)
        return None if lowest is None else max(0.0, lowest / best.measurement.samples_per_s - 1)

    def outlook(self, best: TrialRecord | None) -> Outlook | None:
        """What a further trial can win; None before the sides were measured, and where nothing is feasible."""
        if not self.is_informed or best is None or best.measurement is None:
            return None
        step = self._runs_so_far, len(self.study.running)
        if self._outlook is None or self._outlook[0] != step:
            self._outlook = step, self._foresee(best.config)
        return self._outlook[1]

    def believed(self) -> Mapping[int, float]:
        """Of feasible trials, the logarithms of their rates as the model has them from all runs together."""
        if not self.is_informed:
            return mean_log_rates(self.study.ended)
        if self._believed is None or self._believed[0] != self._runs_so_far:
            known = {} if self._believed is None else self._believed[1]
            told = {record.number for record in most_telling(self.study.ended)}
            # of what the model is no longer made from, what was believed last stays: of thousands,
            # few are forecast
            asked = [
                record
                for record in self.study.ended
                if record.is_feasible
                and (record.number in told or record.repeats or record.number not in known)
            ]
            log_rates = (
                self._rates().forecast([record.config for record in asked]).log_rate
                if asked
                else ()
            )
            new = {
                record.number: float(rate) for record, rate in zip(asked, log_rates, strict=True)
            }
            feasible = {record.number for record in self.study.ended if record.is_feasible}
            believed = {
                number: rate for number, rate in {**known, **new}.items() if number in feasible
            }
            self._believed = self._runs_so_far, believed
        return self._believed[1]

    @property
    def _idle(self) -> frozenset[str]:
        """Switches that the look has shown to win nothing."""
        return no_effect_settings(self.sides or (), self.study.space)

    @property
    def _runs_so_far(self) -> _Stamp:
        """Runs, and trials that may still win: a comparison or a further run may refute one that had ended."""
        ended = self.study.ended
        return sum(len(record.results) for record in ended), sum(
            record.is_feasible for record in ended
        )

    def _rates(self) -> RateModel:
        """The model of all that was measured so far."""
        if self._model is None or self._model[0] != self._runs_so_far:
            environment = self.study.space.environment
            observed = list(
                rate_observations(self.sides or [], self.study.ended, environment.device_kind)
            )
            before = self._model
            spread = self.study.spread
            model = (
                RateModel(observed, environment, spread)
                if before is None
                else before[1].with_observations(observed, spread)
            )
            self._model = self._runs_so_far, model
        return self._model[1]

    def _foresee(self, best: TrainingConfig) -> Outlook:
        best_rate = exp(max(self.believed().values()))
        return foresee(self._near(best), self.time, self._rates(), self._memory(), best_rate)

    def _is_first_group(self, config: TrainingConfig) -> bool:
        kinds = {
            (one.config.strategy, one.config.world_size)
            for one in self.study.ended
            if one.measurement
        }
        return config.world_size > 1 and (config.strategy, config.world_size) not in kinds

    def _memory(self) -> MemoryModel:
        looks = self.sides or []
        space = self.study.space
        seen = self._runs_so_far
        if self._peaks is None or self._peaks[0] != (seen, len(looks)):
            only_ram = space.environment.has_only_ram
            model = memory_of_trials(
                looks, self.study.ended, space.limit_bytes, limit_is_ram=only_ram
            )
            self._peaks = (seen, len(looks)), model
        return self._peaks[1]

    def _near(self, best: TrainingConfig) -> list[tuple[Params, TrainingConfig]]:
        space = self.study.space
        if self._candidates is None or self._candidates[0] is not space:
            self._candidates = space, Candidates(pin_to_baseline(space, self._idle), self.seed)
        believed = self.believed()
        ended = [record for record in self.study.ended if record.number in believed]
        rates = {record.config: believed[record.number] for record in ended}
        fastest = sorted(rates, key=rates.__getitem__, reverse=True)[: self._trials.fastest]
        unchanged = {name: getattr(space.baseline, name) for name in self._idle}
        found = self._candidates[1].near(list(dict.fromkeys([best, *fastest])))
        return [({**params, **unchanged}, config) for params, config in found]


def _keep_point(ceilings: CeilingBook, one: ConfiguredPoint) -> None:
    ceilings.keep(one.side, one.config, one.point.ceiling)


def _known(space: ResolvedSpace, ceilings: CeilingBook) -> Curves:
    """Points that the baseline's trial has measured itself: none of a group, whose sides are not those of a device."""
    own = space.baseline
    if own.world_size > 1:
        return Curves()
    known = dict[str, tuple[CurvePoint, ...]]()
    for side in SIDES:
        ceiling = ceilings.ceiling_of(side, own)
        if ceiling is not None and not ceilings.is_in_doubt(side, own):
            known[side] = (CurvePoint(changes={}, ceiling=ceiling),)
    return Curves.model_validate(known)


# What proposes trials: one Protocol, and two implementations, chosen in `make_proposer` alone.
#
# Comes in: the study as it grows, and its space. Goes out: values to try next, or None where the
# study's sampler is to draw; reasons to skip a sample, to stop a trial early, and to end the
# search. The loop proposes; nothing here does.


def make_proposer(
    time: TimeBudget, *, seed: int, keep: Callable[[Curves], None] = lambda _: None
) -> Proposer:
    """The proposer of the study's search method; the arguments are ModelProposer's."""
    has_model = time.study.method.has_model
    return ModelProposer(time, seed, keep) if has_model else SamplerProposer(time.study)
