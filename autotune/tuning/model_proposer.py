"""What guides a search: a model of the machine, learned from one look at either side alone and from every trial.

Takes the study as it grows; proposes the trial that promises most, sets the bar that a trial must come near, and says
what can still be won. Composition, like tune, from which alone it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, hypot, inf, log

import numpy as np

from autotune.analysis.durations import queue_s
from autotune.analysis.early_stopping import Bar
from autotune.analysis.expected_gain import expected_gain, most_gain, without_matter
from autotune.analysis.failures import chance_to_run, has_failed
from autotune.analysis.memory_forecast import MemoryForecast, forecast_memory
from autotune.analysis.observations import Look, looks_of, peaks_seen, rate_seen, sightings_of
from autotune.analysis.rate_model import MachineModel, fit_machine
from autotune.analysis.variations import device_variations, loader_variations
from autotune.launch.runner import TrialRunner
from autotune.protocol.messages import Extras
from autotune.records.ceilings import CeilingBook
from autotune.records.diagnosis import Curves
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import TrainingConfig
from autotune.space.resolved_space import ResolvedSpace
from autotune.study.candidates import Candidates, Params
from autotune.study.proposals import params_of
from autotune.study.study import Doubt, Study, Trial

__all__ = ["Guide", "Outlook"]

_STRETCH_S = 0.2
_SURE_TO_FIT = 0.9
_LIKELY_TO_FIT = 0.5
_FORESEEN_BY_MEMORY = frozenset({"oom", "host_oom", "over_memory"})
_SURPRISE = 3.0  # standard deviations
_LEAST_SD = 0.01
_FASTEST = 3  # trials whose neighbours are candidates
_FEWEST_TRIALS = 3  # before the search may end
_NEAR_CEILING = 0.97
_WORTH = 0.01
_SAME_BATCH_TRIALS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What can still be expected of a search."""

    params: Params | None
    """The trial that promises most; None where nothing is left that could tell more."""
    gain: float
    """What a trial is expected to win at the most over the best so far, as a share of it, however long it takes."""
    same_batch: Params | None
    """The settings that should be the fastest at the baseline's global batch."""
    best_rate: float
    """What the best trial so far is taken to reach: its own rate, as far as it can be told from chance."""
    lower_ceiling: float
    """The rate that nothing should pass that fits: the lower of what the fastest loader and the fastest device reach,
    each with its standard deviation on top."""
    scatter_sd: float
    """What measuring the same settings anew may differ by on this machine, relatively."""


@dataclass(slots=True)
class Guide:
    """A search's model of the machine."""

    study: Study
    space: ResolvedSpace
    limit_bytes: int
    seed: int
    keep: Callable[[Curves], None] = lambda _: None
    """Given what a look has shown, so that a search that goes on need not look again."""
    longest_s: Callable[[], float] = lambda: inf
    """What takes longer to measure is proposed only where nothing else is left."""
    looks: list[Look] | None = None
    """What a look at either side alone has shown; None until it was taken."""
    _model: MachineModel | None = None
    """The latest."""
    _candidates: Candidates | None = None
    _outlook: tuple[tuple[int, int], Outlook] | None = None
    """The latest, and the numbers of ended and running trials that it was made at."""
    _same_batch_trials: int = 0
    _expected: dict[TrainingConfig, tuple[float, float]] = field(default_factory=dict)
    """Logarithm of the rate and its standard deviation, of what was proposed."""

    def look(self, runner: TrialRunner, deadline_s: float, book: CeilingBook) -> str | None:
        """Measure loader and device alone, in one process; why that can't be, or None. Ceilings go into the book."""
        variations = [*loader_variations(self.space, book), *device_variations(self.space)]
        extras = Extras(stretch_s=_STRETCH_S)
        report = runner.curves(self.space.baseline, variations, deadline_s=deadline_s, extras=extras)
        curves = report.curves or Curves()
        self.recall(curves, book)
        if any(look.point.ceiling is not None for look in self.looks or ()):
            self.keep(curves)
            return None
        reasons = (report.result.reason, *(point.reason for point in (*curves.loader, *curves.device)))
        reason = next((one for one in reasons if one), report.result.outcome)
        cause = reason if isinstance(reason, str) else reason.code.replace("_", " ")
        return f"Loader and device were not looked at alone: {cause}."

    def recall(self, curves: Curves, book: CeilingBook) -> None:
        """Take up what a look has shown; ceilings go into the book."""
        self.looks = looks_of(curves, self.space)
        for look in self.looks:
            ceiling = look.point.ceiling
            book.keep(
                look.config,
                loader=ceiling if look.side == "loader" else None,
                device=ceiling if look.side == "device" else None,
            )

    def propose(self, best: TrialRecord | None) -> None:
        """Propose the trial that promises most, unless the last one was not what was expected.

        Then the study's own sampler proposes: it explores what the model does not explain. Where nothing has run within
        the limit yet, what a look has shown to fit is tried.
        """
        if best is None:
            self._propose_seen_to_fit()
        outlook = self.outlook(best)
        if outlook is None or outlook.params is None or self._is_surprised(self.study.ended[-1]):
            return
        if outlook.gain < _WORTH:  # of little use; what has to be known before the end is of more
            self.propose_same_batch(best)
        if not self.study.has_waiting:
            self.study.propose(outlook.params, is_promising=True)

    def propose_same_batch(self, best: TrialRecord | None) -> None:
        """Propose what should be the fastest at the baseline's global batch, unless it was tried."""
        outlook = self.outlook(best)
        if outlook is None or outlook.same_batch is None or self._same_batch_trials == _SAME_BATCH_TRIALS:
            return
        self._same_batch_trials += self.study.propose(outlook.same_batch)

    def _propose_seen_to_fit(self) -> None:
        fitting = [look for look in self.looks or () if look.side == "device" and look.point.ceiling is not None]
        for look in sorted(fitting, key=_rate_alone, reverse=True):
            if self.study.propose(params_of(look.config, self.space)):
                return

    def doubt(self, config: TrainingConfig) -> Doubt:
        """Why a configuration that was sampled is not worth a try: it is not likely to fit, or to tell anything new."""
        if self._peaks and self._memory().chance_to_fit([config], self.limit_bytes)[0] < _LIKELY_TO_FIT:
            return "would not fit"
        if self._model is None:
            return ""
        tried = self._tried
        configs = list(dict.fromkeys([config, *tried]))
        tells_nothing = without_matter(configs, self._model.forecast(configs), tried)[0]
        return "would tell nothing" if tells_nothing else ""

    def bar_of(self, trial: Trial) -> Bar | None:
        """What a trial has to come near: the fastest so far, at the baseline's batch the fastest of those at that.

        The more the machine scatters, the lower the bar: the fastest so far may have been lucky. None for the first
        group of its kind: that is seen through, so that it shows what holds it.
        """
        if self._is_first_group(trial.config):
            return None
        luck = 1.0 if self._outlook is None else exp(-self._outlook[1].scatter_sd)
        wanted = self.space.baseline.global_batch_size
        keeps_batch = trial.config.global_batch_size == wanted
        bars = [
            Bar(number=one.number, low_samples_per_s=luck * one.measurement.samples_per_s_ci[0])
            for one in self.study.records
            if one.is_feasible and one.measurement and (not keeps_batch or one.config.global_batch_size == wanted)
        ]
        return max(bars, key=lambda bar: bar.low_samples_per_s, default=None)

    def _is_first_group(self, config: TrainingConfig) -> bool:
        kind = (config.strategy, config.world_size)
        measured = [one.config for one in self.study.ended if one.measurement is not None]
        return config.world_size > 1 and kind not in {(one.strategy, one.world_size) for one in measured}

    def why_enough(self, best: TrialRecord | None) -> str:
        """Why no further trial is worth its time, in a clause; "" where one may be."""
        outlook = self.outlook(best) if len(self.study.ended) >= _FEWEST_TRIALS else None
        if outlook is None or best is None or best.measurement is None:
            return ""
        share = outlook.best_rate / outlook.lower_ceiling
        if share >= _NEAR_CEILING:
            return f"the best found reaches {min(share, 1.0):.0%} of the lower ceiling of loader and device"
        if outlook.params is None:
            return "no configuration is left that could tell more"
        if outlook.gain < _WORTH:
            return f"another trial is expected to bring {outlook.gain:.1%}"
        return ""

    def can_win(self, best: TrialRecord | None) -> float | None:
        """What the ceilings leave to be won at the most, as a share of the best; None where nothing tells."""
        outlook = self.outlook(best)
        if outlook is None or best is None or best.measurement is None or outlook.lower_ceiling == inf:
            return None
        return max(0.0, outlook.lower_ceiling / best.measurement.samples_per_s - 1)

    def outlook(self, best: TrialRecord | None) -> Outlook | None:
        """What a further trial can win over the best so far; None before the look, and where nothing is feasible."""
        if not self.looks or best is None or best.measurement is None:
            return None
        step = len(self.study.ended), len(self.study.running)
        if self._outlook is None or self._outlook[0] != step:
            self._outlook = step, self._foresee(best, best.measurement.samples_per_s)
        return self._outlook[1]

    def _foresee(self, best: TrialRecord, measured_rate: float) -> Outlook:
        looks, records, environment = self.looks or [], self.study.ended, self.space.environment
        pairs = self._near(best, records)
        configs = [config for _, config in pairs]
        self._model = model = fit_machine(list(sightings_of(looks, records, environment.device_kind)), environment)
        forecast, fits = model.forecast(configs), self._memory().chance_to_fit(configs, self.limit_bytes)
        runs = chance_to_run(
            configs,
            [one.config for one in records if has_failed(one)],
            [one.config for one in records if one.is_feasible],
        )
        tried = self._tried
        best_rate = min(measured_rate, self._most_believed(model, records))
        gains = np.minimum(expected_gain(forecast, best_rate), most_gain(forecast, best_rate)) * fits * runs
        may_try = np.array([self.study.is_open(config) for config in configs]) & (fits >= _SURE_TO_FIT)
        tells = may_try & ~without_matter(configs, forecast, tried)
        inside = (fits >= _LIKELY_TO_FIT) & ~np.array([self.study.is_left_out(config) for config in configs])
        sides = (forecast.loader, forecast.loader_sd), (forecast.device, forecast.device_sd)
        ceilings = (float((side * np.exp(sd))[inside].max(initial=0.0)) for side, sd in sides)
        wanted, has_run = self.space.baseline.global_batch_size, set(tried)
        keeps = np.array([config.global_batch_size == wanted for config in configs])
        keeps &= tells | np.array([config in has_run for config in configs])
        same = int(np.argmax(np.where(keeps, forecast.log_rate, -inf)))
        rates, epoch_samples = np.exp(forecast.log_rate), self.space.facts.dataset_length
        queues_s = [queue_s(one, rate, epoch_samples) for one, rate in zip(configs, rates, strict=True)]
        soon = tells & (np.array(queues_s) <= self.longest_s())
        chosen = int(np.argmax(np.where(soon if soon.any() else tells, gains, -1.0)))
        if tells.any():
            sd = hypot(float(forecast.sd[chosen]), forecast.scatter_sd)
            self._expected[configs[chosen]] = float(forecast.log_rate[chosen]), sd
        return Outlook(
            params=pairs[chosen][0] if tells.any() else None,
            gain=float(gains[tells].max(initial=0.0)),
            same_batch=pairs[same][0] if keeps.any() else None,
            best_rate=best_rate,
            lower_ceiling=min(ceilings) or inf,
            scatter_sd=forecast.scatter_sd,
        )

    @staticmethod
    def _most_believed(model: MachineModel, records: Sequence[TrialRecord]) -> float:
        """The highest rate that any feasible trial is taken to reach: a lucky window is no bar for what may follow.

        Source: Picheny, Wagner, Ginsbourger 2013, "A benchmark of kriging-based infill criteria for noisy
        optimization": expected improvement with a plug-in.
        """
        return float(np.exp(model.forecast([one.config for one in records if one.is_feasible]).log_rate.max()))

    @property
    def _tried(self) -> list[TrainingConfig]:
        """What has shown a rate."""
        return [one.config for one in self.study.ended if one.measurement is not None or one.result.blocks]

    def _memory(self) -> MemoryForecast:
        return forecast_memory(self._peaks, has_workers_in_ram=self._limit_is_ram)

    @property
    def _peaks(self) -> list[tuple[TrainingConfig, int]]:
        return peaks_seen(self.looks or [], self.study.ended, self.limit_bytes, limit_is_ram=self._limit_is_ram)

    @property
    def _limit_is_ram(self) -> bool:
        return self.space.environment.has_only_ram

    def _near(self, best: TrialRecord, records: Sequence[TrialRecord]) -> list[tuple[Params, TrainingConfig]]:
        if self._candidates is None:
            self._candidates = Candidates(self.space, self.seed)
        rates = {one.config: one.measurement.samples_per_s for one in records if one.is_feasible and one.measurement}
        fastest = sorted(rates, key=lambda config: rates[config], reverse=True)[:_FASTEST]
        return self._candidates.near(list(dict.fromkeys([best.config, *fastest])))

    def _is_surprised(self, record: TrialRecord) -> bool:
        """Whether a trial's rate is far from what was expected, or it had none: the model does not explain that."""
        rate = rate_seen(record)
        if record.config not in self._expected:
            return False
        if rate is None:
            return record.outcome not in _FORESEEN_BY_MEMORY
        log_rate, sd = self._expected[record.config]
        return abs(log(rate) - log_rate) > _SURPRISE * max(sd, _LEAST_SD)


def _rate_alone(look: Look) -> float:
    return 0.0 if look.point.ceiling is None else look.point.ceiling.samples_per_s
