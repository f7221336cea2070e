"""The Study: what to try next, what was measured, kept in an ordinary Optuna SQLite study in the run folder.

`ask` hands out only configurations that have not been measured and are not running: repeats are answered from what is
known, and what the rules exclude is told as pruned. A finished trial carries its TrialRecord as a user attribute, so
that a study read back is complete; trials that were running when a search was interrupted are enqueued again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from autotune.analysis.decisions.run_spread import assumed_spread, spread_of_repeats
from autotune.errors import ConfigError
from autotune.frozen import compacted
from autotune.note import Note
from autotune.records.run_spread import RunSpread
from autotune.records.trial import Score, TrialRecord, TrialResult, answered
from autotune.settings.search_options import Method
from autotune.settings.search_space import Domain, SettingValue
from autotune.settings.training_config import TrainingConfig
from autotune.space.constraints import same_behaviour_key
from autotune.space.resolved_space import ResolvedSpace, setting_of
from autotune.study import optuna_trials as written
from autotune.study.combinations import OpenCombinations, Skip
from autotune.study.measured import MeasuredTrials
from autotune.study.proposals import compose_allowed, params_of
from autotune.study.samplers import METHODS, SearchMethod
from autotune.study.storage import guarded, open_optuna, open_storage, release

__all__ = ["Study"]


class Study:
    """One search's study. Made by `Study.open`; not for several processes at once (the run folder's lock)."""

    def __init__(
        self,
        study: optuna.Study,
        storage: optuna.storages.BaseStorage,
        space: ResolvedSpace,
        seed: int,
        method: SearchMethod,
    ) -> None:
        self.prior_spread = assumed_spread(space.environment.device_kind, space.policy.spread)
        """Between runs, before this study's own repeats; whoever knows more of the machine sets it."""
        self.optuna_study = study
        self.method = method
        self.space = space
        self._storage = storage
        self._distributions = written.distributions_of(space)
        self._seed = seed
        self._combinations = OpenCombinations(space, seed, self.is_open)
        self._left_out: list[dict[str, frozenset[SettingValue]]] = []
        self._keys: dict[TrainingConfig, str] = {}
        known = written.read_records(study)
        self._measured = MeasuredTrials({self._key(record.config): record for record in known})
        self._running: dict[str, tuple[TrialRecord, optuna.Trial]] = {}
        self._waiting: set[str] = set()
        """Keys of what was proposed and not handed out yet."""
        self._queued = 0
        """Trials in Optuna's queue, which it hands out before it samples; counted here, since to read it takes long."""
        self._is_drained = False
        """Samples brought nothing new, and no combination was left."""
        trials = study.get_trials(deepcopy=False)
        self._promising = {trial.number for trial in trials if written.is_promising(trial.user_attrs)}
        """Numbers of the trials that a model expected most of."""

    @classmethod
    def open(
        cls,
        path: Path | None,
        space: ResolvedSpace,
        *,
        identity: Mapping[str, str],
        seed: int,
        method: Method = "model",
    ) -> Study:
        """Open or make the study in a SQLite file (None: in memory), and retry what was running.

        Raises:
            ConfigError: the method needs a package that is not installed, or fewer combinations.
            StudyMismatchError: the file holds a study of something else; the message names what differs.
            RunFolderError: the file can't be written or is no database.
        """
        way = METHODS[method]
        most_listed = space.policy.trials.most_listed
        if way.visits_all and space.size > most_listed:
            raise ConfigError(
                f"search.method {method} takes at most {most_listed:,} combinations, but the space has "
                f"{space.size:,}; list fewer values, or choose another method"
            )
        with guarded(path):
            storage = open_storage(path)
            study = open_optuna(storage, path, identity, seed, way.make_sampler)
            written.end_recorded(study)
            if written.lacks_baseline(study):
                optuna.delete_study(study_name=study.study_name, storage=storage)
                study = open_optuna(storage, path, identity, seed, way.make_sampler)
            space = written.as_begun(space, study)
            opened = cls(study, storage, space, seed, way)
            if not study.trials:
                own = {written.CONFIG: space.baseline.model_dump_json()}
                study.enqueue_trial(params_of(space.baseline, space), user_attrs=own)
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                study.enqueue_trial(written.begun_params(trial), user_attrs=written.carried(trial.user_attrs))
                study.tell(trial.number, state=TrialState.FAIL)
            opened._note_waiting()
        return opened

    def close(self) -> None:
        """Close the study's file; Optuna opens it again when the study is used."""
        release(self._storage)

    @property
    def records(self) -> Sequence[TrialRecord]:
        """Every measured trial, in order."""
        return self._measured.in_order

    @property
    def ended(self) -> Sequence[TrialRecord]:
        """Every measured trial, in the order in which they ended: not that of numbers where several ran at once.

        The same object until another one ends.
        """
        return self._measured.ended

    @property
    def best(self) -> TrialRecord | None:
        """The feasible trial with the best score, as it was measured."""
        return self._measured.best

    @property
    def spread(self) -> RunSpread:
        """Between runs of the same settings, as far as this study's repeats have taught it."""
        return spread_of_repeats(self.prior_spread, (record.runs for record in self.ended if record.repeats))

    @property
    def promising(self) -> list[TrialRecord]:
        """Of the measured trials those that a model expected most of, in the order in which they ended."""
        return [record for record in self.ended if record.number in self._promising]

    @property
    def running(self) -> list[TrialRecord]:
        """The trials that were asked for and have not ended."""
        return [trial for trial, _ in self._running.values()]

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing runs and no open configuration is left, as far as that can be seen."""
        return not self._running and not self._combinations.has_open

    @property
    def none_left(self) -> Note:
        """Why `ask` found nothing: everything was measured, or, in a large space, nothing new was drawn."""
        return self._combinations.none_left

    @property
    def has_waiting(self) -> bool:
        """Whether a proposal waits to be asked for."""
        return self._queued > 0

    def ask(self, skip: Skip = lambda _: None) -> TrialRecord | None:
        """The next configuration to measure: what was proposed, else a sample; None where nothing new is found.

        A sample that `skip` names a reason against is answered without a run: what would not fit as beyond the memory
        limit, what would tell nothing as failed, from which samplers learn nothing. It is tried only where nothing
        else is found.
        """
        with guarded():
            picks = self._is_drained or (self.method.visits_all and not self.has_waiting)
            most_repeats = self.space.policy.trials.repeats_in_a_row
            fruitless = most_repeats if picks else 0
            while True:
                if fruitless >= most_repeats:
                    params = self._combinations.next(skip)
                    self._is_drained = params is None
                    if params is None:
                        return None
                    self._enqueue(params)
                    fruitless = 0
                is_sampled = not self.has_waiting
                asked = self.optuna_study.ask(self._distributions)
                self._queued -= 0 if is_sampled else 1
                config, reason = self._config_of(asked), None
                if config is not None and not self._is_taken(config):
                    reason = skip(config) if is_sampled else None
                    if reason is None:
                        return self._hand_out(asked, config)
                self._answer(asked, config, reason)
                fruitless += 1

    def may_propose(self, params: Mapping[str, SettingValue]) -> bool:
        """Whether `propose` would take these values: they break no rule, and are neither known, waiting nor running."""
        return self._proposable(params) is not None

    def propose(self, params: Mapping[str, SettingValue], *, is_promising: bool = False) -> bool:
        """Have these values tried next; False where they may not be proposed."""
        config = self._proposable(params)
        if config is None:
            return False
        with guarded():
            self._enqueue(params, written.PROMISING if is_promising else None)
        self._waiting.add(self._key(config))
        return True

    def widen(self, domains: Mapping[str, Domain]) -> None:
        """Search these values too from now on, of settings that had a single one; nothing may be waiting."""
        self.space = replace(self.space, domains={**self.space.domains, **domains})
        self._distributions = written.distributions_of(self.space)
        self._combinations = OpenCombinations(self.space, self._seed, self.is_open)
        self._is_drained = False

    def leave_out(self, settings: Mapping[str, frozenset[SettingValue]]) -> None:
        """Try no configuration any more that has one of the values of each of these settings."""
        self._left_out.append(dict(settings))

    def is_open(self, config: TrainingConfig) -> bool:
        """Whether a configuration may still be tried: neither measured, nor running, nor left out."""
        return not self.is_left_out(config) and not self._is_taken(config)

    def is_left_out(self, config: TrainingConfig) -> bool:
        """Whether nothing of its kind is tried any more, after failures or by the precision guard."""
        return any(
            all(setting_of(config, name) in values for name, values in settings.items()) for settings in self._left_out
        )

    def tell(self, trial: TrialRecord, result: TrialResult, score: Score | None) -> TrialRecord:
        """Record how a trial ended, here and in Optuna's study; once this returns, no power cut loses it."""
        record = compacted(TrialRecord(number=trial.number, config=trial.config, results=(result,), score=score))
        key = self._key(trial.config)
        with guarded():
            _, asked = self._running[key]
            written.write_figures(asked, record, self._reference_rate)
            written.write_record(asked, record, len(self._measured))
            written.end_trial(self.optuna_study, asked.number, record)
        self._measured.keep(key, record)
        del self._running[key]
        return record

    def add_run(self, number: int, result: TrialResult) -> TrialRecord:
        """Record a further run of a finished trial's settings."""
        key, record = self._measured.of_number(number)
        record = record.with_run(compacted(result))
        with guarded():
            written.write_repeats(self.optuna_study, record)
        self._measured.keep(key, record)
        return record

    def keep_answer(self, number: int, answer: TrialResult) -> TrialRecord:
        """Record what the precision guard says of a finished trial."""
        key, record = self._measured.of_number(number)
        record = answered(record, answer)
        with guarded():
            written.write_answer(self.optuna_study, record)
        self._measured.keep(key, record)
        return record

    @property
    def _reference_rate(self) -> float | None:
        """The throughput of the first trial that was measured, in samples/s."""
        for ended in self.ended:
            if ended.measurement is not None:
                return ended.measurement.samples_per_s
        return None

    def _proposable(self, params: Mapping[str, SettingValue]) -> TrainingConfig | None:
        config = compose_allowed(params, self.space)
        is_new = config is not None and self.is_open(config) and self._key(config) not in self._waiting
        return config if is_new else None

    def _enqueue(self, params: Mapping[str, SettingValue], attributes: dict[str, Any] | None = None) -> None:
        self.optuna_study.enqueue_trial(dict(params), user_attrs=attributes)
        self._queued += 1

    def _note_waiting(self) -> None:
        """Count what an interrupted search has left to be tried."""
        waiting = self.optuna_study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        self._queued = len(waiting)
        configs = (compose_allowed(trial.system_attrs.get("fixed_params", {}), self.space) for trial in waiting)
        self._waiting = {self._key(config) for config in configs if config is not None}

    def _hand_out(self, asked: optuna.Trial, config: TrainingConfig) -> TrialRecord:
        asked.set_user_attr(written.CONFIG, config.model_dump_json())
        trial = TrialRecord(number=asked.number, config=config)
        if written.is_promising(asked.user_attrs):
            self._promising.add(trial.number)
        self._running[self._key(config)] = trial, asked
        self._waiting.discard(self._key(config))
        return trial

    def _answer(self, asked: optuna.Trial, config: TrainingConfig | None, reason: Note | None) -> None:
        """Answer a repeat from what was measured; of one that is still running nothing is known, so it is no lesson."""
        key = "" if config is None else self._key(config)
        if (known := self._measured.get(key)) is not None:
            asked.set_user_attr("outcome", f"repeat of {known.number}")
            written.write_figures(asked, known, self._reference_rate)
            written.end_trial(self.optuna_study, asked.number, known)
        elif (running := self._running.get(key)) is not None:
            asked.set_user_attr("outcome", f"repeat of running {running[0].number}")
            self.optuna_study.tell(asked, state=TrialState.FAIL)
        else:
            written.answer_skipped(self.optuna_study, asked, reason)

    def _config_of(self, asked: optuna.Trial) -> TrainingConfig | None:
        """What a trial's values compose to; None where they break a rule, or were left out."""
        fixed = asked.user_attrs.get(written.CONFIG)
        config = TrainingConfig.model_validate_json(fixed) if fixed else compose_allowed(asked.params, self.space)
        return None if config is None or self.is_left_out(config) else config

    def _is_taken(self, config: TrainingConfig) -> bool:
        """Whether one that runs alike was measured or is running."""
        key = self._key(config)
        return key in self._measured or key in self._running

    def _key(self, config: TrainingConfig) -> str:
        if config not in self._keys:  # thousands are asked about before each trial
            self._keys[config] = same_behaviour_key(config, self.space.facts, self.space.environment)
        return self._keys[config]
