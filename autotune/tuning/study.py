"""The study: the only user of Optuna. Trials are asked for, stored and read back here."""

from __future__ import annotations

import os
import shutil
import sqlite3
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages._rdb.models import BaseModel
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import URL, Engine, event
from sqlalchemy.exc import SQLAlchemyError

from autotune.config.plan import Choices, Domain, IntRange, Method, SettingValue
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError, RunFolderError, StudyMismatchError, first_line
from autotune.frozen import compacted
from autotune.models.evidence import assumed_spread, spread_of_repeats
from autotune.models.memory import UNKNOWN_EXCESS_FRACTION
from autotune.models.statistics import mean_rate
from autotune.note import Note
from autotune.records.result import RunSpread
from autotune.records.trial import OUT_OF_MEMORY, Score, TrialRecord, TrialResult, answered, best_of
from autotune.space.constraints import same_behaviour_key
from autotune.space.space import ResolvedSpace, setting_of
from autotune.tuning.proposals import OpenCombinations, Skip, compose_allowed, params_of

# Open the Optuna study of a search: a SQLite file in the run folder, bound to one search.
#
# The file is the one store of trials. Each commit waits for the disk, so that SQLite alone keeps
# what was told through a kill or a power cut.


_SYNCHRONOUS = "FULL"
"""SQLite's setting for each connection: with a write-ahead log, a commit returns once the log is on
the disk, 21 waits a trial. Source: sqlite.org/pragma.html#pragma_synchronous."""
_IDENTITY = "autotune_identity"
_STUMBLES = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError)
"""Raised by Optuna for a database that it has not written, or that another version of it has
written."""


def open_storage(path: Path | None) -> optuna.storages.BaseStorage:
    """Open the storage in a SQLite file, or in memory where there is no path."""
    return optuna.storages.InMemoryStorage() if path is None else _sqlite(path)


def open_optuna(
    storage: optuna.storages.BaseStorage,
    path: Path | None,
    identity: Mapping[str, str],
    seed: int,
    make_sampler: Callable[[int], BaseSampler],
) -> optuna.Study:
    """Open the study of a storage, or make a new one.

    Raises:
        StudyMismatchError: it is of another search; the message names what differs.
    """
    known = optuna.get_all_study_names(storage)
    study = optuna.create_study(
        storage=storage,
        study_name=known[0] if known else f"autotune-{identity.get('space', 'study')}",
        direction="maximize",
        load_if_exists=True,
    )
    trials = study.get_trials(deepcopy=False)
    there = study.user_attrs.get(_IDENTITY)
    if there is not None or trials:  # without both, a kill came right after the study was made
        _refuse_other(path, there or {}, identity)
    study.sampler = make_sampler(seed + len(trials))
    study.set_user_attr(_IDENTITY, dict(identity))
    return study


def open_finished(path: Path) -> optuna.Study:
    """Open the study of a search that has ended.

    Raises:
        RunFolderError: there is no such file, it is a link, it can't be read, or it holds no study.
    """
    if path.is_symlink():
        raise RunFolderError(
            f"a run folder must hold its study as a file, but {path} is a link; name the linked "
            f"folder"
        )
    if not path.is_file():
        raise RunFolderError(
            f"a run folder must hold {path.name}, but {path.parent} does not; name that of a search"
        )
    with guarded(path):
        is_writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
        storage = open_storage(path) if is_writable else _copied(path)
        known = optuna.get_all_study_names(storage)
        if len(known) == 1:
            study = optuna.load_study(study_name=known[0], storage=storage)
            study.get_trials(
                deepcopy=False
            )  # damage raises here, and not where the caller uses a trial
            return study
    raise RunFolderError(
        f"{path} must hold one study, but holds {len(known)}; name the folder of a search"
    )


def _sqlite(path: Path) -> optuna.storages.RDBStorage:
    """Open Optuna's storage in a SQLite file, after a check for damage.

    A write-ahead log takes one wait for the disk a commit, a rollback journal four. The file
    remembers that it has one. Source: sqlite.org/wal.html.
    """
    with closing(sqlite3.connect(path)) as connection:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))
        connection.execute("PRAGMA journal_mode=WAL")
    storage = optuna.storages.RDBStorage(_address(path))
    event.listen(storage.engine, "connect", _synchronize)
    storage.engine.dispose()  # connections from before the listener
    weakref.finalize(storage, _let_go, storage.engine)
    return storage


def _synchronize(connection: Any, _: object) -> None:
    """Set how a connection waits for the disk; builds of SQLite differ in their default."""
    connection.execute(f"PRAGMA synchronous={_SYNCHRONOUS}")


def _address(path: Path) -> str:
    """Return a file's URL for SQLAlchemy, whatever its name holds: "?", "#", "%", braces, bytes that are no UTF-8.

    SQLAlchemy takes what follows a "?" for options, and Optuna fills in what stands in braces.
    Source: sqlite.org/uri.html; SQLAlchemy's documentation of SQLite, "URI Connections".
    """
    url = URL.create("sqlite", database=f"file:{quote(os.fsencode(path))}", query={"uri": "true"})
    return url.render_as_string()  # from SQLAlchemy 2.1 on a URL's database is quoted once more


def release(storage: optuna.storages.BaseStorage) -> None:
    """Close a study's file; Optuna opens it again when the study is used."""
    if isinstance(storage, optuna.storages.RDBStorage):
        storage.remove_session()
        _let_go(storage.engine)


def _let_go(engine: Engine) -> None:
    """Close a study's connections, and forget its statements.

    Python 3.13 warns of connections that nobody has closed. SQLAlchemy keeps the statements of the
    last hundred engines with Optuna's mapped classes, which no public name reaches: 17 MiB more
    after 150 searches in a process.
    """
    engine.dispose()
    for mapper in BaseModel.registry.mappers:
        vars(mapper).pop(
            "_compiled_cache", None
        )  # made again when used; source: sqlalchemy/orm/mapper.py


def _copied(path: Path) -> optuna.storages.RDBStorage:
    """Open a copy of a file that can't be written, and of its log; the copy is removed with the storage."""
    folder = TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True)
    try:
        for file in path.parent.glob(
            f"{path.name}*"
        ):  # a killed search's last trials are in the log alone
            shutil.copyfile(file, Path(folder.name, file.name))
        storage = _sqlite(Path(folder.name, path.name))
    except BaseException:
        folder.cleanup()
        raise
    weakref.finalize(storage, folder.cleanup)
    return storage


def _refuse_other(path: Path | None, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    differing = sorted(
        key for key in {*there, *here} if there.get(key, "none") != here.get(key, "none")
    )
    if differing:
        details = "; ".join(
            f"{key}: {there.get(key, 'none')} there, {here.get(key, 'none')} here"
            for key in differing
        )
        raise StudyMismatchError(
            f"the run folder must hold a study of the same search, but {path} differs in "
            f"{details}. "
            "Name another run_dir, or start again with --fresh (fresh=True)."
        )


@contextmanager
def guarded(path: Path | None = None) -> Iterator[None]:
    """Keep Optuna's log lines and notices from the terminal, and say by a RunFolderError what a disk does not allow.

    Where a path is given, a file is opened, and any error in its content is raised so as well.
    """
    damaged = () if path is None else _STUMBLES
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    except (
        SQLAlchemyError,
        sqlite3.Error,
        optuna.exceptions.StorageInternalError,
        OSError,
        *damaged,
    ) as error:
        if isinstance(error, damaged):
            cause = f"what it holds can't be read ({type(error).__name__}: {first_line(error)})"
        else:
            root: BaseException = error
            while (
                root.__cause__ is not None
            ):  # Optuna's error is raised from SQLAlchemy's, that one from sqlite3's
                root = root.__cause__
            cause = first_line(root)
        where = f" {path}" if path is not None else ""
        raise RunFolderError(
            f"the study{where} must be a SQLite file that can be read and written, but: {cause}. "
            "Free space there, name another run_dir, or start again with --fresh (fresh=True)."
        ) from error
    finally:
        optuna.logging.set_verbosity(before)


# The search methods by name: what sets each apart, and Optuna's sampler of each. No other place
# knows the names.


_STARTUP_TRIALS = 8
"""Random trials before a sampler models anything: our own convention; Optuna's ten would be most of
a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMethod:
    """A way to search."""

    make_sampler: Callable[[int], BaseSampler]
    """Given a seed, the sampler that draws what nothing else has proposed; raises ConfigError
    without its package."""
    has_model: bool = False
    """A model of the machine proposes; the sampler draws where the model was wrong."""
    begins_with_guesses: bool = False
    """An expert's first guesses are tried right after the baseline."""
    visits_all: bool = False
    """Every combination is tried once, in random order."""


def _tpe(seed: int) -> BaseSampler:
    # The constant liar takes running trials for bad ones until they end; one trial at a time is not
    # affected.
    return TPESampler(
        seed=seed, multivariate=True, n_startup_trials=_STARTUP_TRIALS, constant_liar=True
    )


METHODS: dict[Method, SearchMethod] = {
    "model": SearchMethod(make_sampler=_tpe, has_model=True),
    "tpe": SearchMethod(make_sampler=_tpe, begins_with_guesses=True),
    "gp": SearchMethod(
        make_sampler=lambda seed: GPSampler(seed=seed, n_startup_trials=_STARTUP_TRIALS),
        begins_with_guesses=True,
    ),
    "random": SearchMethod(make_sampler=lambda seed: RandomSampler(seed=seed)),
    # Combinations are enqueued one by one: Optuna's GridSampler stops the study, which only
    # `Study.optimize` allows.
    "grid": SearchMethod(make_sampler=lambda seed: RandomSampler(seed=seed), visits_all=True),
}


# Trials in Optuna's study: how they are written, read back and compared; distributions,
# constraints.


CONFIG = "autotune_config"
"""User attribute: the configuration as it was handed out."""
PROMISING = {"role": "promising"}
"""User attribute: a model expected most of this trial."""
_RECORD = "autotune_record"
_PLACE = "autotune_place"  # of a record in the order in which trials ended
_MEMORY = "memory"
_REPEATS = "autotune_repeats_"  # and the trial's number
_ANSWER = "guard of "


def as_begun(space: ResolvedSpace, study: optuna.Study) -> ResolvedSpace:
    """The space with the default choices that the study's trials were drawn from.

    Each start probes anew, and some choices follow from times that the probe took: they may come
    out otherwise, but Optuna takes no other choices in the same study. Source:
    optuna.distributions.check_distribution_compatibility.
    """
    begun: dict[str, Domain] = {}
    for trial in study.get_trials(deepcopy=False):
        for name, known in trial.distributions.items():
            if (
                isinstance(known, CategoricalDistribution)
                and name in space.domains
                and name not in space.given
            ):
                begun.setdefault(name, Choices(values=known.choices))
        fixed = trial.system_attrs.get(
            "fixed_params", {}
        )  # of one that waits, nothing else is there
        for name, value in fixed.items():
            domain = begun.get(name, space.domains.get(name))
            if isinstance(domain, Choices) and value not in domain and name not in space.given:
                begun[name] = Choices(values=(*domain.values, value))
    return replace(space, domains={**space.domains, **begun})


def distributions_of(space: ResolvedSpace) -> dict[str, BaseDistribution]:
    """Optuna's form of each searched setting, widened to the baseline's value, which `compose` refuses to others."""
    baseline = params_of(space.baseline, space)
    return {
        name: _distribution(domain, baseline, name) for name, domain in space.parameters.items()
    }


def _distribution(domain: Domain, baseline: Mapping[str, Any], name: str) -> BaseDistribution:
    own = baseline.get(name)
    if isinstance(domain, IntRange):
        ends = [domain.low, domain.high, *([own] if isinstance(own, int) else [])]
        return IntDistribution(min(ends), max(ends), log=domain.log and min(ends) >= 1)
    values = list(domain.values)
    return CategoricalDistribution(
        values if name not in baseline or own in domain else [*values, own]
    )


def read_records(study: optuna.Study) -> list[TrialRecord]:
    """Return the records of a study's measured trials, in the order in which they ended."""
    trials = [
        trial
        for trial in study.get_trials(deepcopy=False)
        if _RECORD in trial.user_attrs and trial.state.is_finished()
    ]
    trials.sort(key=lambda trial: trial.user_attrs[_PLACE])
    records = [
        compacted(TrialRecord.model_validate_json(trial.user_attrs[_RECORD])) for trial in trials
    ]
    attributes = study.user_attrs  # each look is a query
    return [_as_kept(record, attributes) for record in records]


def end_recorded(study: optuna.Study) -> None:
    """End the trials that a kill kept from ending once their records were written: they are not run again."""
    for known in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if _RECORD in known.user_attrs:
            end_trial(
                study, known.number, TrialRecord.model_validate_json(known.user_attrs[_RECORD])
            )


def begun_params(trial: FrozenTrial) -> dict[str, Any]:
    """The values of an interrupted trial: those that it was handed out with, and those it was to have."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def lacks_baseline(study: optuna.Study) -> bool:
    """Whether the first trial, the baseline, was interrupted or failed: then nothing in the study can be used."""
    trials = study.get_trials(deepcopy=False)
    ended = (trial.user_attrs.get(_RECORD) for trial in trials[:1] if trial.state.is_finished())
    baseline = next(
        (TrialRecord.model_validate_json(record) for record in ended if record is not None), None
    )
    return bool(trials) and (baseline is None or baseline.outcome in {"crashed", "invalid"})


def carried(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The user attributes that an interrupted trial passes on to the one that repeats it."""
    return {name: value for name, value in attributes.items() if name in {CONFIG, *PROMISING}}


def is_promising(attributes: Mapping[str, Any]) -> bool:
    """Whether a model expected most of the trial that has these user attributes."""
    return bool(attributes.get("role") == PROMISING["role"])


def write_figures(trial: optuna.Trial, record: TrialRecord, reference_rate: float | None) -> None:
    """Write what Optuna's samplers and pruners learn from besides the score: memory as a constraint, throughput.

    The throughput of a trial that was stopped early is reported over the reference's, in samples/s:
    on the scale of scores, but for the busy fraction.
    """
    score = _score_of(record)
    if score is not None:
        trial.set_constraint(_MEMORY, score.violation)
        return
    if record.outcome == "crashed":
        return
    blocks = record.result.blocks
    if blocks and reference_rate is not None:
        trial.report(mean_rate(blocks)[0] / reference_rate, step=len(blocks))
    if (
        record.outcome in OUT_OF_MEMORY and record.measurement is None
    ):  # a guard's is not the trial's
        known = record.result.violation
        trial.set_constraint(_MEMORY, UNKNOWN_EXCESS_FRACTION if known is None else known)


def write_record(trial: optuna.Trial, record: TrialRecord, place: int) -> None:
    """Write a record to its trial; `place` is its place in the order in which trials ended.

    The record is written last: where it is, all is, and `end_recorded` needs no more to end the
    trial.
    """
    trial.set_user_attr(_PLACE, place)
    trial.set_user_attr("outcome", record.outcome)
    trial.set_user_attr(_RECORD, record.model_dump_json())


def end_trial(study: optuna.Study, number: int, record: TrialRecord) -> None:
    """End a trial in Optuna: with its score, a crash as failed, anything else as pruned."""
    score = _score_of(record)
    if score is not None:
        study.tell(number, score.value)
    elif record.outcome == "crashed":
        study.tell(number, state=TrialState.FAIL)
    else:
        study.tell(number, state=TrialState.PRUNED)


def write_repeats(study: optuna.Study, record: TrialRecord) -> None:
    """Keep the further runs of a trial with the study: Optuna takes no attribute of a trial that has ended."""
    study.set_user_attr(
        f"{_REPEATS}{record.number}", [run.model_dump_json() for run in record.repeats]
    )


def write_answer(study: optuna.Study, record: TrialRecord) -> None:
    """Keep the precision guard's answer on a trial with the study, for the same reason."""
    answer = record.result.model_dump_json(include={"outcome", "reason", "guard"})
    study.set_user_attr(f"{_ANSWER}{record.number}", answer)


def _as_kept(record: TrialRecord, attributes: Mapping[str, Any]) -> TrialRecord:
    """A record with the further runs and the guard's answer that came after it."""
    answer = attributes.get(f"{_ANSWER}{record.number}")
    if answer is not None:
        record = answered(record, TrialResult.model_validate_json(answer))
    for run in attributes.get(f"{_REPEATS}{record.number}", []):
        record = record.with_run(compacted(TrialResult.model_validate_json(run)))
    return record


def _score_of(record: TrialRecord) -> Score | None:
    """Return the score of a trial that ended well, else None."""
    is_measured = record.measurement is not None and record.result.outcome == "ok"
    return record.score if is_measured else None


def answer_skipped(study: optuna.Study, trial: optuna.Trial, reason: Note | None) -> None:
    """Answer a sample that is not run: "would_tell_nothing" as failed, from which samplers learn nothing, else pruned.

    Without a reason to skip it, it breaks a rule of the space, or was left out.
    """
    code = "invalid" if reason is None else reason.code
    trial.set_user_attr("outcome", code)
    if reason is not None and reason.figures:
        trial.set_user_attr("figures", reason.figures)
    if code == "would_not_fit":
        trial.set_constraint(_MEMORY, UNKNOWN_EXCESS_FRACTION)
    study.tell(trial, state=TrialState.FAIL if code == "would_tell_nothing" else TrialState.PRUNED)


# The trials of a study that have ended, and what is asked of them many times between two of them:
# calculated once.


class MeasuredTrials:
    """Records by a key of their configuration's behaviour."""

    def __init__(self, records: Mapping[str, TrialRecord]) -> None:
        self._by_key = dict(records)

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def get(self, key: str) -> TrialRecord | None:
        """The record of a configuration; None where it was not measured."""
        return self._by_key.get(key)

    def of_number(self, number: int) -> tuple[str, TrialRecord]:
        """A trial's key and record."""
        return next(
            (key, record) for key, record in self._by_key.items() if record.number == number
        )

    def keep(self, key: str, record: TrialRecord) -> None:
        """Add a record, or put it in the place of the former one."""
        self._by_key[key] = record
        for name in ("ended", "in_order", "best"):
            self.__dict__.pop(name, None)

    @cached_property
    def ended(self) -> Sequence[TrialRecord]:
        """In the order in which they ended; the same object until another one ends."""
        return tuple(self._by_key.values())

    @cached_property
    def in_order(self) -> Sequence[TrialRecord]:
        """By number."""
        return tuple(sorted(self.ended, key=lambda record: record.number))

    @cached_property
    def best(self) -> TrialRecord | None:
        """The feasible trial with the best score, as it was measured."""
        return best_of(self.in_order)


# The Study: what to try next, what was measured, kept in an ordinary Optuna SQLite study in the run
# folder.
#
# `ask` hands out only configurations that have not been measured and are not running: repeats are
# answered from what is known, and what the rules exclude is told as pruned. A finished trial
# carries its TrialRecord as a user attribute, so that a study read back is complete; trials that
# were running when a search was interrupted are enqueued again.


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
        self._distributions = distributions_of(space)
        self._seed = seed
        self._combinations = OpenCombinations(space, seed, self.is_open)
        self._left_out: list[dict[str, frozenset[SettingValue]]] = []
        self._keys: dict[TrainingConfig, str] = {}
        known = read_records(study)
        self._measured = MeasuredTrials({self._key(record.config): record for record in known})
        self._running: dict[str, tuple[TrialRecord, optuna.Trial]] = {}
        self._waiting: set[str] = set()
        """Keys of what was proposed and not handed out yet."""
        self._queued = 0
        """Trials in Optuna's queue, which it hands out before it samples; counted here, since to
        read it takes long."""
        self._is_drained = False
        """Samples brought nothing new, and no combination was left."""
        trials = study.get_trials(deepcopy=False)
        self._promising = {trial.number for trial in trials if is_promising(trial.user_attrs)}
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
            StudyMismatchError: the file holds a study of something else; the message names what
                differs.
            RunFolderError: the file can't be written or is no database.
        """
        way = METHODS[method]
        most_listed = space.policy.trials.most_listed
        if way.visits_all and space.size > most_listed:
            raise ConfigError(
                f"search.method {method} takes at most {most_listed:,} combinations, but the space "
                f"has "
                f"{space.size:,}; list fewer values, or choose another method"
            )
        with guarded(path):
            storage = open_storage(path)
            study = open_optuna(storage, path, identity, seed, way.make_sampler)
            end_recorded(study)
            if lacks_baseline(study):
                optuna.delete_study(study_name=study.study_name, storage=storage)
                study = open_optuna(storage, path, identity, seed, way.make_sampler)
            space = as_begun(space, study)
            opened = cls(study, storage, space, seed, way)
            if not study.trials:
                own = {CONFIG: space.baseline.model_dump_json()}
                study.enqueue_trial(params_of(space.baseline, space), user_attrs=own)
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                study.enqueue_trial(begun_params(trial), user_attrs=carried(trial.user_attrs))
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
        return spread_of_repeats(
            self.prior_spread, (record.runs for record in self.ended if record.repeats)
        )

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

        A sample that `skip` names a reason against is answered without a run: what would not fit as
        beyond the memory limit, what would tell nothing as failed, from which samplers learn
        nothing. It is tried only where nothing else is found.
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
                config = self._config_of(asked)
                reason = None
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
            self._enqueue(params, PROMISING if is_promising else None)
        self._waiting.add(self._key(config))
        return True

    def widen(self, domains: Mapping[str, Domain]) -> None:
        """Search these values too from now on, of settings that had a single one; nothing may be waiting."""
        self.space = replace(self.space, domains={**self.space.domains, **domains})
        self._distributions = distributions_of(self.space)
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
            all(setting_of(config, name) in values for name, values in settings.items())
            for settings in self._left_out
        )

    def tell(self, trial: TrialRecord, result: TrialResult, score: Score | None) -> TrialRecord:
        """Record how a trial ended, here and in Optuna's study; once this returns, no power cut loses it."""
        record = compacted(
            TrialRecord(number=trial.number, config=trial.config, results=(result,), score=score)
        )
        key = self._key(trial.config)
        with guarded():
            _, asked = self._running[key]
            write_figures(asked, record, self._reference_rate)
            write_record(asked, record, len(self._measured))
            end_trial(self.optuna_study, asked.number, record)
        self._measured.keep(key, record)
        del self._running[key]
        return record

    def add_run(self, number: int, result: TrialResult) -> TrialRecord:
        """Record a further run of a finished trial's settings."""
        key, record = self._measured.of_number(number)
        record = record.with_run(compacted(result))
        with guarded():
            write_repeats(self.optuna_study, record)
        self._measured.keep(key, record)
        return record

    def keep_answer(self, number: int, answer: TrialResult) -> TrialRecord:
        """Record what the precision guard says of a finished trial."""
        key, record = self._measured.of_number(number)
        record = answered(record, answer)
        with guarded():
            write_answer(self.optuna_study, record)
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
        is_new = (
            config is not None and self.is_open(config) and self._key(config) not in self._waiting
        )
        return config if is_new else None

    def _enqueue(
        self, params: Mapping[str, SettingValue], attributes: dict[str, Any] | None = None
    ) -> None:
        self.optuna_study.enqueue_trial(dict(params), user_attrs=attributes)
        self._queued += 1

    def _note_waiting(self) -> None:
        """Count what an interrupted search has left to be tried."""
        waiting = self.optuna_study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        self._queued = len(waiting)
        configs = (
            compose_allowed(trial.system_attrs.get("fixed_params", {}), self.space)
            for trial in waiting
        )
        self._waiting = {self._key(config) for config in configs if config is not None}

    def _hand_out(self, asked: optuna.Trial, config: TrainingConfig) -> TrialRecord:
        asked.set_user_attr(CONFIG, config.model_dump_json())
        trial = TrialRecord(number=asked.number, config=config)
        if is_promising(asked.user_attrs):
            self._promising.add(trial.number)
        self._running[self._key(config)] = trial, asked
        self._waiting.discard(self._key(config))
        return trial

    def _answer(
        self, asked: optuna.Trial, config: TrainingConfig | None, reason: Note | None
    ) -> None:
        """Answer a repeat from what was measured; of one that is still running nothing is known, so it is no lesson."""
        key = "" if config is None else self._key(config)
        if (known := self._measured.get(key)) is not None:
            asked.set_user_attr("outcome", f"repeat of {known.number}")
            write_figures(asked, known, self._reference_rate)
            end_trial(self.optuna_study, asked.number, known)
        elif (running := self._running.get(key)) is not None:
            asked.set_user_attr("outcome", f"repeat of running {running[0].number}")
            self.optuna_study.tell(asked, state=TrialState.FAIL)
        else:
            answer_skipped(self.optuna_study, asked, reason)

    def _config_of(self, asked: optuna.Trial) -> TrainingConfig | None:
        """What a trial's values compose to; None where they break a rule, or were left out."""
        fixed = asked.user_attrs.get(CONFIG)
        config = (
            TrainingConfig.model_validate_json(fixed)
            if fixed
            else compose_allowed(asked.params, self.space)
        )
        return None if config is None or self.is_left_out(config) else config

    def _is_taken(self, config: TrainingConfig) -> bool:
        """Whether one that runs alike was measured or is running."""
        key = self._key(config)
        return key in self._measured or key in self._running

    def _key(self, config: TrainingConfig) -> str:
        if config not in self._keys:  # thousands are asked about before each trial
            self._keys[config] = same_behaviour_key(
                config, self.space.facts, self.space.environment
            )
        return self._keys[config]
