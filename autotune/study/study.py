"""The Study: proposals from Optuna, results told back, kept in an ordinary Optuna SQLite study in the run folder.

`ask` hands out only configurations that have not been measured and are not running: repeats are answered from what is
known, and what the rules exclude is told as pruned. A finished trial carries its TrialRecord as a user attribute, so
that a study read back is complete; trials that were running when a sitting ended are enqueued again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from autotune.analysis.early_stopping import seen_rate
from autotune.errors import ConfigError
from autotune.records.trial import Score, TrialRecord, TrialResult
from autotune.settings.search_options import Method
from autotune.settings.search_space import Domain, IntRange, SettingValue
from autotune.settings.training_config import TrainingConfig
from autotune.space import constraints as rules
from autotune.space.resolved_space import ResolvedSpace, compose, setting_of
from autotune.study.importance import setting_importances
from autotune.study.proposals import params_of
from autotune.study.storage import disk_errors, open_optuna, open_storage, quiet

__all__ = ["Doubt", "Study", "Trial", "read_records"]

Doubt = Literal["", "would not fit", "would tell nothing"]
"""Why a configuration is not worth a run, as far as that is foreseen; "" where it is."""

_RECORD = "autotune_record"
_CONFIG = "autotune_config"
_PLACE = "autotune_place"  # of a record in the order in which trials ended
_ROLE, _PROMISING = "role", "promising"  # what a trial was proposed as
_REPEATS_IN_A_ROW = 8
_ENUMERABLE = 20_000
_RANDOM_TRIES = 500
_MEMORY = "memory"
_NO_DOUBT: Doubt = ""
_UNKNOWN_MEMORY = 0.25  # an out-of-memory that does not tell how much was missing


@dataclass(frozen=True, slots=True)
class Trial:
    """A configuration to measure."""

    number: int
    config: TrainingConfig


class Study:
    """One search's study. Made by `Study.open`; not for several processes at once (the run folder's lock)."""

    def __init__(
        self,
        study: optuna.Study,
        storage: optuna.storages.BaseStorage,
        space: ResolvedSpace,
        seed: int,
        method: Method,
    ) -> None:
        self.optuna_study = study
        self.method = method
        self._storage = storage
        self._space = space
        self._random = random.Random(seed)  # noqa: S311 - a seeded choice, no secret
        self._distributions = {name: _distribution(name, domain, space) for name, domain in space.parameters.items()}
        self._excluded: list[dict[str, frozenset[SettingValue]]] = []
        self._keys: dict[TrainingConfig, str] = {}
        self._records: dict[str, TrialRecord] = {}
        self._running: dict[str, Trial] = {}
        self._asked: dict[int, optuna.Trial] = {}
        self._waiting: set[str] = set()
        """Keys of what was proposed and not handed out yet."""
        self._queued = 0
        """Trials in Optuna's queue, which it hands out before it samples; counted here, since to read it takes long."""
        self._is_drained = False
        self._promising: set[int] = set()
        """Numbers of the trials that a model expected most of."""
        for trial in sorted(_measured(study), key=lambda one: one.user_attrs.get(_PLACE, -1)):
            record = _record_of(trial)
            self._records[self._key(record.config)] = record
            self._note_role(record.number, trial.user_attrs)

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
        if method == "grid" and space.size > _ENUMERABLE:
            raise ConfigError(
                f"search.method grid takes at most {_ENUMERABLE:,} combinations, but the space has {space.size:,}; "
                "list fewer values, or choose another method"
            )
        with quiet(), disk_errors(path):
            storage = open_storage(path)
            study = open_optuna(storage, path, identity, seed, method)
            if _lacks_baseline(study):
                optuna.delete_study(study_name=study.study_name, storage=storage)
                study = open_optuna(storage, path, identity, seed, method)
            opened = cls(study, storage, space, seed, method)
            if not study.trials:
                opened._enqueue_baseline()
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                study.enqueue_trial(trial.params, user_attrs=_carried(trial.user_attrs))
                study.tell(trial.number, state=TrialState.FAIL)
            opened._note_waiting()
        return opened

    def close(self) -> None:
        """Let go of the file; the study can't be used afterwards."""
        if isinstance(self._storage, optuna.storages.RDBStorage):
            self._storage.remove_session()
            self._storage.engine.dispose()

    @property
    def records(self) -> list[TrialRecord]:
        """Every measured trial, in order."""
        return sorted(self._records.values(), key=lambda record: record.number)

    @property
    def ended(self) -> list[TrialRecord]:
        """Every measured trial, in the order in which they ended: another than theirs where several ran at once."""
        return list(self._records.values())

    @property
    def promising(self) -> list[TrialRecord]:
        """Of the measured trials those that a model expected most of, in the order in which they ended."""
        return [record for record in self.ended if record.number in self._promising]

    @property
    def running(self) -> list[Trial]:
        """The trials that were asked for and not told yet."""
        return list(self._running.values())

    @property
    def is_exhausted(self) -> bool:
        """Whether every configuration of the space was measured."""
        return not self._running and self._unmeasured() is None

    def ask(self, doubt: Callable[[TrainingConfig], Doubt] = lambda _: _NO_DOUBT) -> Trial | None:
        """The next configuration to measure; None when all others of the space were measured or are running.

        What the sampler finds and is in doubt is answered without a run: what would not fit as beyond the memory limit,
        what would tell nothing as failed, from which samplers learn nothing. It comes only where nothing else is found.
        """
        with quiet(), disk_errors(None):
            takes_all = self._is_drained or (self.method == "grid" and not self.has_waiting)
            fruitless = _REPEATS_IN_A_ROW if takes_all else 0
            while True:
                if fruitless >= _REPEATS_IN_A_ROW:
                    params = self._unmeasured(doubt)
                    self._is_drained = params is None
                    if params is None:
                        return None
                    self.optuna_study.enqueue_trial(params)
                    self._queued += 1
                    fruitless = 0
                is_sampled = not self.has_waiting
                trial = self.optuna_study.ask(self._distributions)
                self._queued -= 0 if is_sampled else 1
                config, why_not = self._config_of(trial), _NO_DOUBT
                if isinstance(config, TrainingConfig) and not self._is_taken(config):
                    why_not = doubt(config) if is_sampled else _NO_DOUBT
                    if why_not == _NO_DOUBT:
                        return self._hand_out(trial, config)
                self._answer(trial, config, why_not)
                fruitless += 1

    @property
    def has_waiting(self) -> bool:
        """Whether a proposal waits to be asked for."""
        return self._queued > 0

    def is_open(self, config: TrainingConfig) -> bool:
        """Whether a configuration may still be tried: neither measured, nor running, nor left out."""
        return not self.is_left_out(config) and not self._is_taken(config)

    def propose(self, params: Mapping[str, SettingValue], *, is_promising: bool = False) -> bool:
        """Have these values tried next; False where they are known, wait already, are running or break a rule."""
        config = compose(params, self._space)
        if isinstance(config, str) or self.is_left_out(config) or self._is_taken(config):
            return False
        if self._key(config) in self._waiting:
            return False
        with quiet(), disk_errors(None):
            self.optuna_study.enqueue_trial(dict(params), user_attrs={_ROLE: _PROMISING} if is_promising else None)
        self._queued += 1
        self._waiting.add(self._key(config))
        return True

    def exclude(self, setting: str, values: frozenset[SettingValue]) -> None:
        """Propose no configuration with one of these values any more."""
        self._excluded.append({setting: values})

    def refuse(self, settings: Mapping[str, SettingValue]) -> None:
        """Propose no configuration any more that has all of these settings, trials to be retried among them."""
        self._excluded.append({name: frozenset({value}) for name, value in settings.items()})

    def importances(self) -> dict[str, float]:
        """How much each searched setting tells of a trial's score, in shares of 1; empty where too few trials tell."""
        with quiet(), disk_errors(None):
            feasible = {record.number for record in self.records if record.is_feasible}
            return setting_importances(self.optuna_study, feasible)

    def tell(self, trial: Trial, result: TrialResult, score: Score | None) -> TrialRecord:
        """Record how a trial ended: limits as a violated constraint, time-outs as pruned, crashes as failed."""
        record = TrialRecord(number=trial.number, config=trial.config, result=result, score=score)
        with quiet(), disk_errors(None):
            asked = self._asked.pop(trial.number)
            asked.set_user_attr(_RECORD, record.model_dump_json())
            asked.set_user_attr(_PLACE, len(self._records))
            asked.set_user_attr("outcome", record.outcome)
            self._tell(asked, record)
        key = self._key(trial.config)
        self._records[key] = record
        del self._running[key]
        return record

    def _note_waiting(self) -> None:
        """Know what an earlier sitting has left to be tried."""
        waiting = self.optuna_study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        self._queued = len(waiting)
        for trial in waiting:
            config = compose(trial.system_attrs.get("fixed_params", {}), self._space)
            if isinstance(config, TrainingConfig):
                self._waiting.add(self._key(config))

    def _hand_out(self, asked: optuna.Trial, config: TrainingConfig) -> Trial:
        asked.set_user_attr(_CONFIG, config.model_dump_json())
        trial = Trial(asked.number, config)
        self._note_role(trial.number, asked.user_attrs)
        self._asked[trial.number] = asked
        self._running[self._key(config)] = trial
        self._waiting.discard(self._key(config))
        return trial

    def _note_role(self, number: int, attributes: Mapping[str, Any]) -> None:
        if attributes.get(_ROLE) == _PROMISING:
            self._promising.add(number)

    def _tell(self, asked: optuna.Trial, record: TrialRecord) -> None:
        if record.score is not None and record.measurement is not None and record.result.outcome == "ok":
            asked.set_constraint(_MEMORY, record.score.violation)
            self.optuna_study.tell(asked, record.score.value)
        elif record.outcome == "crashed":
            self.optuna_study.tell(asked, state=TrialState.FAIL)
        else:
            if record.result.blocks:
                asked.report(self._relative_rate(record), step=len(record.result.blocks))
            if record.outcome in {"oom", "host_oom"} and record.measurement is None:  # a guard's is not the trial's
                known = record.result.violation
                asked.set_constraint(_MEMORY, _UNKNOWN_MEMORY if known is None else known)
            self.optuna_study.tell(asked, state=TrialState.PRUNED)

    def _relative_rate(self, record: TrialRecord) -> float:
        """What a trial has shown that was stopped early, on the scale of scores, its busy fraction left out."""
        first = next(one.measurement for one in self.ended if one.measurement is not None)
        return seen_rate(record.result.blocks).samples_per_s / first.samples_per_s

    def _answer(self, trial: optuna.Trial, config: TrainingConfig | str, doubt: Doubt) -> None:
        """Answer a repeat from what was measured, and what a rule excludes, or would not fit, as pruned.

        Of one that is still running nothing is known: its repeat is told as failed, from which samplers learn nothing,
        and so is what would tell nothing.
        """
        key = "" if isinstance(config, str) else self._key(config)
        if (known := self._records.get(key)) is not None:
            trial.set_user_attr("outcome", f"repeat of {known.number}")
            self._tell(trial, known)
        elif (running := self._running.get(key)) is not None:
            trial.set_user_attr("outcome", f"repeat of running {running.number}")
            self.optuna_study.tell(trial, state=TrialState.FAIL)
        else:
            trial.set_user_attr("outcome", doubt or "invalid")
            if doubt == "would not fit":
                trial.set_constraint(_MEMORY, _UNKNOWN_MEMORY)
            self.optuna_study.tell(trial, state=TrialState.FAIL if doubt == "would tell nothing" else TrialState.PRUNED)

    def _config_of(self, trial: optuna.Trial) -> TrainingConfig | str:
        fixed = trial.user_attrs.get(_CONFIG)
        config = TrainingConfig.model_validate_json(fixed) if fixed else compose(trial.params, self._space)
        if isinstance(config, TrainingConfig) and self.is_left_out(config):
            return "excluded after failures"
        return config

    def is_left_out(self, config: TrainingConfig) -> bool:
        """Whether nothing of its kind is proposed any more, after failures or by the precision guard."""
        return any(all(setting_of(config, name) in values for name, values in one.items()) for one in self._excluded)

    def _is_taken(self, config: TrainingConfig) -> bool:
        """Whether one that runs alike was measured or is running."""
        key = self._key(config)
        return key in self._records or key in self._running

    def _key(self, config: TrainingConfig) -> str:
        if config not in self._keys:  # thousands are asked about before each trial
            self._keys[config] = rules.same_behaviour_key(config, self._space.facts, self._space.environment)
        return self._keys[config]

    def _enqueue_baseline(self) -> None:
        baseline = self._space.baseline
        own = {_CONFIG: baseline.model_dump_json()}
        self.optuna_study.enqueue_trial(params_of(baseline, self._space), user_attrs=own)

    def _unmeasured(
        self, doubt: Callable[[TrainingConfig], Doubt] = lambda _: _NO_DOUBT
    ) -> dict[str, SettingValue] | None:
        """A random combination that was not measured and is not running; None: there is none.

        One without a doubt comes first, then what would tell nothing.
        """
        domains = self._space.parameters
        if self._space.size > _ENUMERABLE:
            tries: Iterator[dict[str, SettingValue]] = (
                {name: self._random.choice(list(domain)) for name, domain in domains.items()}
                for _ in range(_RANDOM_TRIES)
            )
        else:
            combinations = list(self._space.combinations())
            self._random.shuffle(combinations)
            tries = iter(combinations)
        doubted: dict[Doubt, dict[str, SettingValue]] = {}
        asked = 0
        for params in tries:
            config = compose(params, self._space)
            if isinstance(config, str) or not self.is_open(config):
                continue
            why_not = doubt(config)
            if why_not == _NO_DOUBT:
                return params
            doubted.setdefault(why_not, params)
            asked += 1
            if asked == _RANDOM_TRIES:
                break
        return doubted.get("would tell nothing", doubted.get("would not fit"))


def read_records(study: optuna.Study) -> list[TrialRecord]:
    """The records of a study's measured trials, in order."""
    return [_record_of(trial) for trial in _measured(study)]


def _measured(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    return [
        trial for trial in study.get_trials(deepcopy=False) if _RECORD in trial.user_attrs and trial.state.is_finished()
    ]


def _record_of(trial: optuna.trial.FrozenTrial) -> TrialRecord:
    return TrialRecord.model_validate_json(trial.user_attrs[_RECORD])


def _lacks_baseline(study: optuna.Study) -> bool:
    """Whether the first trial, the baseline, was interrupted or failed: then nothing in the study can be used."""
    if not study.trials:
        return False
    first = next(iter(read_records(study)), None)
    return first is None or first.number != 0 or first.outcome in {"crashed", "invalid"}


def _distribution(name: str, domain: Domain, space: ResolvedSpace) -> BaseDistribution:
    """Optuna's form of a domain, widened to the baseline's own value, which `compose` refuses to others."""
    told = params_of(space.baseline, space)
    own: Any = told.get(name)
    is_told = name in told
    if isinstance(domain, IntRange):
        ends = [domain.low, domain.high, *([own] if is_told and isinstance(own, int) else [])]
        log = domain.log and min(ends) >= 1
        return IntDistribution(min(ends), max(ends), log=log)
    values = list(domain.values)
    return CategoricalDistribution(values if not is_told or own in domain else [*values, own])


def _carried(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name in {_CONFIG, _ROLE}}
