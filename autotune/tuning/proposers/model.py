"""Proposals of a model of the machine, of loader and device alone, measured once, and of every trial.

Comes in: the study as it grows, and its space. Goes out: values to try next, or None where the study's sampler is to
draw; reasons to skip a sample, to stop a trial early, and to end the search. The loop tries them; nothing here does.

The model proposes the trial with the largest expected gain, also after a trial that was far from what it expected:
left to the sampler, the next one found no more (benchmarks/regret.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp

from autotune.analysis.decisions.early_stopping import PruningThreshold, luck_of
from autotune.analysis.forecast.acquisition import redundant_among
from autotune.analysis.forecast.observations import (
    ConfiguredPoint,
    configured_points,
    device_variations,
    failed_side,
    loader_variations,
    mean_log_rates,
    most_telling,
    rate_observations,
)
from autotune.analysis.forecast.rate_model import RateModel
from autotune.analysis.forecast.switches import (
    changes_no_effect_setting,
    no_effect_settings,
    pin_to_baseline,
    unhelpful_switches,
)
from autotune.analysis.memory.lines import memory_of_trials
from autotune.analysis.memory.model import MemoryModel
from autotune.launch.runner import TrialRunner
from autotune.messages.search import (
    little_gain_expected,
    near_ceiling,
    no_informative_candidate,
    sides_not_measured,
    would_not_fit,
    would_tell_nothing,
)
from autotune.note import Note
from autotune.policy import Trials
from autotune.records.ceilings import SIDES, CeilingBook
from autotune.records.diagnosis import CurvePoint, Curves
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import TrainingConfig
from autotune.space.resolved_space import ResolvedSpace
from autotune.study.combinations import Candidates
from autotune.study.proposals import Params, params_of
from autotune.study.study import Study
from autotune.tuning.proposers.bounds import bounds_of
from autotune.tuning.proposers.outlook import Outlook, foresee, measured_to_fit, tried_in
from autotune.tuning.proposers.proposer import Proposal
from autotune.tuning.time_budget import TimeBudget

__all__ = ["ModelProposer"]


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

        Nothing else runs meanwhile, on a cluster either: every proposal rests on this, and a trial beside it would
        share its host and change what it measures. Where it failed, the sampler alone goes on.
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
            space.baseline, variations, deadline_s=deadline_s, stretch_s=self.time.limits.side_s, known=known
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
        return sides_not_measured(next((reason for reason in reasons if reason), report.result.outcome))

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
            side: tuple(one.point for one in sides if one.side == side and one.config not in doubted) for side in SIDES
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
        if outlook.gain < self._least_gain(best) and (params := self.at_same_batch(best)) is not None:
            return Proposal(params=params)
        return Proposal(params=outlook.params, is_promising=True)

    def at_same_batch(self, best: TrialRecord | None) -> Params | None:
        """What should be the fastest at the baseline's global batch, unless it was tried; twice at most."""
        outlook = self.outlook(best)
        if outlook is None or outlook.same_batch is None or self._same_batch_trials == self._trials.same_batch:
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
        otherwise = config.model_copy(update={"pin_memory": not config.pin_memory})  # may tell as much
        configs = list(dict.fromkeys([config, otherwise, *tried]))
        is_redundant = redundant_among(configs, self._model[1].forecast(configs), tried)[0]
        return would_tell_nothing() if is_redundant else None

    def pruning_threshold(self, trial: TrialRecord) -> PruningThreshold | None:
        """The rate of the best so far, at the baseline's batch of the best of those at that.

        The more runs of the same settings differ, the lower: either may have been lucky. Who holds the trial that runs
        is known at its end alone, so it counts as held by the host. None for the first group of its kind, which runs
        to its end to show what limits it, and without a model.
        """
        if not self.has_model or self._is_first_group(trial.config):
            return None
        space, believed, spread = self.study.space, self.believed(), self.study.spread
        keeps_batch = trial.config.global_batch_ratio(space.baseline) == 1
        lows = {
            record.number: exp(
                believed[record.number]
                - luck_of(
                    spread.of(run.window.is_held_by_device for run in record.runs), spread, self.time.policy.stopping
                )
            )
            for record in self.study.records
            if record.number in believed and (not keeps_batch or record.config.global_batch_ratio(space.baseline) == 1)
        }
        number = max(lows, key=lows.__getitem__, default=None)
        return None if number is None else PruningThreshold(number=number, low_samples_per_s=lows[number])

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
            # of what the model is no longer made from, what was believed last stays: of thousands, few are forecast
            asked = [
                record
                for record in self.study.ended
                if record.is_feasible and (record.number in told or record.repeats or record.number not in known)
            ]
            log_rates = self._rates().forecast([record.config for record in asked]).log_rate if asked else ()
            new = {record.number: float(rate) for record, rate in zip(asked, log_rates, strict=True)}
            feasible = {record.number for record in self.study.ended if record.is_feasible}
            believed = {number: rate for number, rate in {**known, **new}.items() if number in feasible}
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
        return sum(len(record.results) for record in ended), sum(record.is_feasible for record in ended)

    def _rates(self) -> RateModel:
        """The model of all that was measured so far."""
        if self._model is None or self._model[0] != self._runs_so_far:
            environment = self.study.space.environment
            observed = list(rate_observations(self.sides or [], self.study.ended, environment.device_kind))
            before, spread = self._model, self.study.spread
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
        kinds = {(one.config.strategy, one.config.world_size) for one in self.study.ended if one.measurement}
        return config.world_size > 1 and (config.strategy, config.world_size) not in kinds

    def _memory(self) -> MemoryModel:
        looks, space, seen = self.sides or [], self.study.space, self._runs_so_far
        if self._peaks is None or self._peaks[0] != (seen, len(looks)):
            only_ram = space.environment.has_only_ram
            model = memory_of_trials(looks, self.study.ended, space.limit_bytes, limit_is_ram=only_ram)
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
