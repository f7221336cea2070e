"""Store trials in an Optuna study, and ask it for the next one. The only user of Optuna.

Comes in: a space, a search method, values to propose, results of trials. Goes out: trials to run,
and the records of those that ended. The study lies in a SQLite file in the run folder, the only
store of trials that a search reads back.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage
from optuna.storages._rdb.models import BaseModel
from optuna.trial import TrialState
from sqlalchemy import URL, Engine, event
from sqlalchemy.exc import SQLAlchemyError

from autotune.config.plan import Choices, Domain, IntRange, Method, SettingValue
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError, RunFolderError, StudyMismatchError, first_line
from autotune.frozen import compacted
from autotune.models.evidence import assumed_variation, learn_variation, run_of
from autotune.models.statistics import mean_rate
from autotune.note import Note
from autotune.records.result import RunVariation
from autotune.records.trial import OUT_OF_MEMORY, Score, TrialRecord, TrialResult, answered, best_of
from autotune.space.constraints import same_behaviour_key
from autotune.space.space import ResolvedSpace, setting_of
from autotune.tuning.proposals import OpenCombinations, Skip, compose_allowed, params_of

# The SQLite file of a study, bound to one search. Each commit waits for the disk, so that a kill or a
# power cut loses no trial.


_SYNCHRONOUS = "FULL"
"""SQLite's setting for each connection: with a write-ahead log, a commit returns once the log is on
the disk, 21 waits a trial. Source: sqlite.org/pragma.html#pragma_synchronous."""
_IDENTITY = "autotune_identity"
_STUMBLES = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError)
"""Errors that Optuna raises for a database of another program, or of another version of Optuna."""


def open_storage(path: Path | None) -> BaseStorage:
    """Open the storage in a SQLite file, or in memory if there is no path."""
    return InMemoryStorage() if path is None else _sqlite(path)


def open_optuna(
    storage: BaseStorage,
    path: Path | None,
    identity: Mapping[str, str],
    seed: int,
    make_sampler: Callable[[int], BaseSampler],
) -> optuna.Study:
    """Open the study of a storage, or create one.

    Args:
        storage: The storage.
        path: Its file, for errors; None in memory.
        identity: Texts that must be equal in a study of the same search, by name.
        seed: Seed of the search; the sampler's also depends on the number of trials so far.
        make_sampler: Returns the sampler for a seed.

    Raises:
        StudyMismatchError: it is of another search; the message names the differences.
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
    if there is not None or trials:  # without both, a kill came right after the study was created
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
            # damage raises here, and not where the caller reads a trial
            study.get_trials(deepcopy=False)
            return study
    raise RunFolderError(
        f"{path} must hold one study, but holds {len(known)}; name the folder of a search"
    )


def _sqlite(path: Path) -> RDBStorage:
    """Open Optuna's storage in a SQLite file, after a check for damage.

    A write-ahead log takes one wait for the disk a commit, a rollback journal four. The file
    remembers that it has one. Source: sqlite.org/wal.html.
    """
    with closing(sqlite3.connect(path)) as connection:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))
        connection.execute("PRAGMA journal_mode=WAL")
    storage = RDBStorage(_address(path))
    event.listen(storage.engine, "connect", _synchronize)
    storage.engine.dispose()  # connections from before the listener
    weakref.finalize(storage, _let_go, storage.engine)
    return storage


def _synchronize(connection: Any, _: object) -> None:
    """Set how a connection waits for the disk; the default depends on the build of SQLite."""
    connection.execute(f"PRAGMA synchronous={_SYNCHRONOUS}")


def _address(path: Path) -> str:
    """Return a file's URL for SQLAlchemy; its name may hold "?", "#", "%", braces, or bytes that are no UTF-8.

    SQLAlchemy reads options after a "?", and Optuna replaces braces. Source: sqlite.org/uri.html;
    SQLAlchemy's documentation of SQLite, "URI Connections".
    """
    url = URL.create("sqlite", database=f"file:{quote(os.fsencode(path))}", query={"uri": "true"})
    return url.render_as_string()  # from SQLAlchemy 2.1 on a URL's database is quoted once more


def release(storage: BaseStorage) -> None:
    """Close a study's file; Optuna opens it again when the study is used."""
    if isinstance(storage, RDBStorage):
        storage.remove_session()
        _let_go(storage.engine)


def _let_go(engine: Engine) -> None:
    """Close a study's connections, and drop its cached statements.

    Python 3.13 warns of connections that are not closed. SQLAlchemy keeps the statements of the
    last hundred engines with Optuna's mapped classes, without a public way to drop them: 17 MiB
    after 150 searches in a process.
    """
    engine.dispose()
    for mapper in BaseModel.registry.mappers:
        # created again when used; source: sqlalchemy/orm/mapper.py
        vars(mapper).pop("_compiled_cache", None)


def _copied(path: Path) -> RDBStorage:
    """Open a copy of a read-only file and its log; the copy is removed with the storage."""
    folder = TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True)
    try:
        # of a killed search, the last trials are only in the log
        for file in path.parent.glob(f"{path.name}*"):
            shutil.copyfile(file, Path(folder.name, file.name))
        storage = _sqlite(Path(folder.name, path.name))
    except BaseException:
        folder.cleanup()
        raise
    weakref.finalize(storage, folder.cleanup)
    return storage


def _refuse_other(path: Path | None, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise a StudyMismatchError with the differences between two identities, if there are any."""
    differences = []
    for key in sorted({*there, *here}):
        theirs = there.get(key, "none")
        ours = here.get(key, "none")
        if theirs != ours:
            differences.append(f"{key}: {theirs} there, {ours} here")
    if differences:
        raise StudyMismatchError(
            f"the run folder must hold a study of the same search, but {path} differs in "
            f"{'; '.join(differences)}. "
            "Name another run_dir, or start again with --fresh (fresh=True)."
        )


@contextmanager
def guarded(path: Path | None = None) -> Iterator[None]:
    """Silence Optuna's log lines and warnings, and raise a RunFolderError for errors of the disk.

    Args:
        path: The file that is opened, for which errors in its content are raised so as well.
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
            # Optuna's error is raised from SQLAlchemy's, that one from sqlite3's
            root: BaseException = error
            while root.__cause__ is not None:
                root = root.__cause__
            cause = first_line(root)
        where = "" if path is None else f" {path}"
        raise RunFolderError(
            f"the study{where} must be a SQLite file that can be read and written, but: {cause}. "
            "Free space there, name another run_dir, or start again with --fresh (fresh=True)."
        ) from error
    finally:
        optuna.logging.set_verbosity(before)


# The search methods by name, each with Optuna's sampler.


_STARTUP_TRIALS = 8
"""Random trials before a sampler's model is used. Source: our own convention; Optuna's ten would be
most of a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMethod:
    """A way to search."""

    make_sampler: Callable[[int], BaseSampler]
    """Returns the sampler for a seed, which draws when nothing is proposed; raises ConfigError
    without its package."""
    has_model: bool = False
    """True if a model of the machine proposes trials; the sampler draws where it has no proposal."""
    begins_with_guesses: bool = False
    """True if an expert's first guesses are tried right after the baseline."""
    visits_all: bool = False
    """True if every combination is tried once, in random order."""


def _tpe(seed: int) -> BaseSampler:
    # the constant liar treats running trials as bad until they finish
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
    # combinations are enqueued one by one: Optuna's GridSampler stops the study, which only
    # `Study.optimize` allows
    "grid": SearchMethod(make_sampler=lambda seed: RandomSampler(seed=seed), visits_all=True),
}


# Trials in Optuna's study: distributions, attributes, constraints; written and read back.


CONFIG = "autotune_config"
"""User attribute: the configuration of a trial that was handed out."""
PROMISING = {"role": "promising"}
"""User attribute of a trial of which the model expected the largest gain."""
_RECORD = "autotune_record"
_PLACE = "autotune_place"
"""User attribute: a record's place in the order in which trials ended."""
_MEMORY = "memory"
_REPEATS = "autotune_repeats_"
"""Attribute of the study, followed by the trial's number."""
_ANSWER = "guard of "
"""Attribute of the study, followed by the trial's number."""


def as_begun(space: ResolvedSpace, study: optuna.Study) -> ResolvedSpace:
    """Return the space with the default choices of the study's earlier trials.

    Each start probes again, and some default choices depend on times that the probe measured. They
    may differ now, but Optuna accepts no other choices in the same study. Source:
    optuna.distributions.check_distribution_compatibility.
    """
    begun: dict[str, Domain] = {}
    for trial in study.get_trials(deepcopy=False):
        for name, known in trial.distributions.items():
            is_default = name in space.domains and name not in space.given
            if is_default and isinstance(known, CategoricalDistribution):
                begun.setdefault(name, Choices(values=known.choices))
        # a waiting trial has only these values
        fixed = trial.system_attrs.get("fixed_params", {})
        for name, value in fixed.items():
            domain = begun.get(name, space.domains.get(name))
            if isinstance(domain, Choices) and value not in domain and name not in space.given:
                begun[name] = Choices(values=(*domain.values, value))
    return replace(space, domains={**space.domains, **begun})


def distributions_of(space: ResolvedSpace) -> dict[str, BaseDistribution]:
    """Return Optuna's distribution of each searched setting, with the baseline's value included.

    `compose` refuses that value to other trials if the space does not have it.
    """
    baseline = params_of(space.baseline, space)
    found = dict[str, BaseDistribution]()
    for name, domain in space.parameters.items():
        own = baseline.get(name)
        if isinstance(domain, IntRange):
            ends = [domain.low, domain.high]
            if isinstance(own, int):
                ends.append(own)
            is_log = domain.log and min(ends) >= 1
            found[name] = IntDistribution(min(ends), max(ends), log=is_log)
        elif name in baseline and own not in domain:
            found[name] = CategoricalDistribution([*domain.values, own])
        else:
            found[name] = CategoricalDistribution(domain.values)
    return found


def read_records(study: optuna.Study) -> list[TrialRecord]:
    """Return the records of a study's measured trials, in the order in which they ended."""
    finished = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
    measured = [trial.user_attrs for trial in finished if _RECORD in trial.user_attrs]
    measured.sort(key=lambda attributes: attributes[_PLACE])
    of_study = study.user_attrs  # read once: each access is a query
    records = []
    for attributes in measured:
        record = compacted(TrialRecord.model_validate_json(attributes[_RECORD]))
        answer = of_study.get(f"{_ANSWER}{record.number}")
        if answer is not None:
            record = answered(record, TrialResult.model_validate_json(answer))
        for run in of_study.get(f"{_REPEATS}{record.number}", []):
            record = record.with_run(compacted(TrialResult.model_validate_json(run)))
        records.append(record)
    return records


def end_recorded(study: optuna.Study) -> None:
    """End the trials whose records were written before a kill kept them from ending; they don't run again."""
    for known in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if _RECORD in known.user_attrs:
            record = TrialRecord.model_validate_json(known.user_attrs[_RECORD])
            end_trial(study, known.number, record)


def lacks_baseline(study: optuna.Study) -> bool:
    """Return True if the baseline, the first trial, was interrupted or failed: the study is of no use then."""
    trials = study.get_trials(deepcopy=False)
    if not trials:
        return False
    written = trials[0].user_attrs.get(_RECORD)
    if written is None or not trials[0].state.is_finished():
        return True
    return TrialRecord.model_validate_json(written).outcome in {"crashed", "invalid"}


def is_promising(trial: optuna.trial.BaseTrial) -> bool:
    """Return True if the model expected the largest gain of a trial."""
    return bool(trial.user_attrs.get("role") == PROMISING["role"])


def write_figures(
    trial: optuna.Trial, record: TrialRecord, reference_rate: float | None, unknown_excess: float
) -> None:
    """Write figures that Optuna's samplers use besides the score: memory as a constraint, throughput.

    The throughput of a trial that was stopped early is reported as a share of the reference's, so
    that it compares with scores, apart from the busy fraction.

    Args:
        trial: Optuna's trial.
        record: Its record.
        reference_rate: Throughput of the reference, in samples/s; None without one.
        unknown_excess: Excess over the memory limit, as a share, where it is unknown.
    """
    if record.score is not None:
        trial.set_constraint(_MEMORY, record.score.violation)
        return
    if record.outcome == "crashed":
        return
    blocks = record.result.blocks
    if blocks and reference_rate is not None:
        trial.report(mean_rate(blocks)[0] / reference_rate, step=len(blocks))
    # with a measurement, it was the guard that ran out of memory, not the trial
    if record.outcome in OUT_OF_MEMORY and record.measurement is None:
        known = record.result.violation
        trial.set_constraint(_MEMORY, unknown_excess if known is None else known)


def end_trial(study: optuna.Study, number: int, record: TrialRecord) -> None:
    """End a trial in Optuna: with its score, or as failed after a crash, or else as pruned."""
    if record.score is not None:
        study.tell(number, record.score.value)
    elif record.outcome == "crashed":
        study.tell(number, state=TrialState.FAIL)
    else:
        study.tell(number, state=TrialState.PRUNED)


class Study:
    """The study of one search, opened by `Study.open`, for one process at a time (the run folder's lock).

    `ask` returns only configurations that were not measured and are not running. It answers other
    samples itself: repeats from their records, and those that break a rule as pruned. A finished
    trial has its TrialRecord as a user attribute, so that a study is complete when it is read back.
    Trials that were running at an interruption are enqueued again.
    """

    def __init__(
        self,
        study: optuna.Study,
        storage: BaseStorage,
        space: ResolvedSpace,
        seed: int,
        method: SearchMethod,
    ) -> None:
        self.prior_variation = assumed_variation(space.environment.device_kind, space.policy.spread)
        """Run-to-run variation before this study's own repeats."""
        self.optuna_study = study
        self.method = method
        self.space = space
        self._storage = storage
        self._distributions = distributions_of(space)
        self._seed = seed
        self._combinations = OpenCombinations(space, seed, self.is_open)
        self._left_out: list[dict[str, frozenset[SettingValue]]] = []
        self._keys: dict[TrainingConfig, str] = {}
        self._measured: dict[str, TrialRecord] = {}
        """The measured trials by a key of their configuration's behaviour."""
        self.ended: Sequence[TrialRecord] = ()
        """The measured trials in the order in which they ended; another object once one of them changes.

        The order differs from that of the numbers if trials ran side by side.
        """
        self.records: Sequence[TrialRecord] = ()
        """The measured trials by number."""
        self.best: TrialRecord | None = None
        """The feasible trial with the best measured score."""
        if records := read_records(study):
            self.keep(*records)
        self._running: dict[str, tuple[TrialRecord, optuna.Trial]] = {}
        self._waiting: set[str] = set()
        """Keys of the proposals that were not handed out yet."""
        self._queued = 0
        """Number of trials in Optuna's queue, which it returns before it samples; counted here,
        since reading it takes long."""
        self._is_drained = False
        """True once samples were all known, and no combination was left."""
        trials = study.get_trials(deepcopy=False)
        self._promising = {trial.number for trial in trials if is_promising(trial)}
        """Numbers of the trials of which the model expected the largest gain."""

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
        """Open or create a study, and enqueue the trials that were running again.

        Args:
            path: The SQLite file; None: in memory.
            space: The space to search.
            identity: Texts that must be equal in a study of the same search, by name.
            seed: Seed of samplers and combinations.
            method: The search method.

        Raises:
            ConfigError: the method needs a package that is not installed, or fewer combinations.
            StudyMismatchError: the file holds a study of another search; the message names the
                differences.
            RunFolderError: the file can't be written or is no database.
        """
        way = METHODS[method]
        most_listed = space.policy.trials.most_listed
        if way.visits_all and space.size > most_listed:
            raise ConfigError(
                f"search.method {method} takes at most {most_listed:,} combinations, but the space "
                f"has {space.size:,}; list fewer values, or choose another method"
            )
        with guarded(path):
            storage = open_storage(path)
            begin = partial(open_optuna, storage, path, identity, seed, way.make_sampler)
            study = begin()
            end_recorded(study)
            if lacks_baseline(study):
                optuna.delete_study(study_name=study.study_name, storage=storage)
                study = begin()
            space = as_begun(space, study)
            # the baseline first; after an interruption, the trials that were running again
            opened = cls(study, storage, space, seed, way)
            if not study.trials:
                own = {CONFIG: space.baseline.model_dump_json()}
                study.enqueue_trial(params_of(space.baseline, space), user_attrs=own)
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                params = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
                kept = {
                    name: value
                    for name, value in trial.user_attrs.items()
                    if name in {CONFIG, *PROMISING}
                }
                study.enqueue_trial(params, user_attrs=kept)
                study.tell(trial.number, state=TrialState.FAIL)
            # the waiting trials, also those of an interrupted search
            waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            opened._queued = len(waiting)
            for trial in waiting:
                config = compose_allowed(trial.system_attrs.get("fixed_params", {}), space)
                if config is not None:
                    opened._waiting.add(opened._key(config))
        return opened

    def close(self) -> None:
        """Close the study's file; Optuna opens it again when the study is used."""
        release(self._storage)

    @property
    def spread(self) -> RunVariation:
        """Run-to-run variation, by this study's repeats and the prior."""
        return learn_variation(
            self.prior_variation,
            (
                [run_of(run, self.space.policy) for run in record.runs]
                for record in self.ended
                if record.repeats
            ),
            self.space.policy.spread,
        )

    @property
    def promising(self) -> list[TrialRecord]:
        """The measured trials of which the model expected the largest gain, in the order in which they ended."""
        return [record for record in self.ended if record.number in self._promising]

    @property
    def running(self) -> list[TrialRecord]:
        """The trials that `ask` returned and that have not ended."""
        return [trial for trial, _ in self._running.values()]

    @property
    def is_exhausted(self) -> bool:
        """Return True if no trial runs and no open configuration was found."""
        return not self._running and not self._combinations.has_open

    @property
    def none_left(self) -> Note:
        """The note that everything was measured, or, in a large space, that nothing new was drawn."""
        return self._combinations.none_left

    @property
    def has_waiting(self) -> bool:
        """Return True if a proposal waits."""
        return self._queued > 0

    def ask(self, skip: Skip = lambda _: None) -> TrialRecord | None:
        """Return the next trial: a proposal, else a sample; None if nothing new is found.

        A sample that is skipped is ended without a run: as beyond the memory limit if it would not
        fit, as failed if it is uninformative, since samplers ignore failed trials. It is run only
        if nothing else is found.

        Args:
            skip: Returns why a sample is not worth a run, or None.
        """
        with guarded():
            picks = self._is_drained or (self.method.visits_all and not self.has_waiting)
            most_repeats = self.space.policy.trials.repeats_in_a_row
            fruitless = most_repeats if picks else 0
            while True:
                # after enough fruitless samples, pick an open combination
                if fruitless >= most_repeats:
                    params = self._combinations.next(skip)
                    self._is_drained = params is None
                    if params is None:
                        return None
                    self._enqueue(params)
                    fruitless = 0
                is_sampled = not self.has_waiting
                asked = self.optuna_study.ask(self._distributions)
                if not is_sampled:
                    self._queued -= 1
                config = self._config_of(asked)
                reason = None
                if config is not None and not self._is_taken(config):
                    if is_sampled:
                        reason = skip(config)
                    if reason is None:
                        return self._hand_out(asked, config)
                self._answer(asked, config, reason)
                fruitless += 1

    def propose(self, params: Mapping[str, SettingValue], *, is_promising: bool = False) -> bool:
        """Enqueue values as the next trial.

        Args:
            params: The values.
            is_promising: The model expects the largest gain of them.

        Returns:
            False if they break a rule, or are known or waiting.
        """
        config = compose_allowed(params, self.space)
        if config is None or not self.is_open(config) or self._key(config) in self._waiting:
            return False
        with guarded():
            self._enqueue(params, PROMISING if is_promising else None)
        self._waiting.add(self._key(config))
        return True

    def widen(self, domains: Mapping[str, Domain]) -> None:
        """Search further values from now on, of settings that had a single one; no proposal may be waiting."""
        self.space = replace(self.space, domains={**self.space.domains, **domains})
        self._distributions = distributions_of(self.space)
        self._combinations = OpenCombinations(self.space, self._seed, self.is_open)
        self._is_drained = False

    def leave_out(self, settings: Mapping[str, frozenset[SettingValue]]) -> None:
        """Exclude configurations that have, for each of these settings, one of its values."""
        self._left_out.append(dict(settings))

    def is_open(self, config: TrainingConfig) -> bool:
        """Return True if a configuration is neither measured, nor running, nor left out."""
        return not self.is_left_out(config) and not self._is_taken(config)

    def is_left_out(self, config: TrainingConfig) -> bool:
        """Return True if a configuration was excluded, after failures or by the precision guard."""
        return any(
            all(setting_of(config, name) in values for name, values in settings.items())
            for settings in self._left_out
        )

    def tell(self, trial: TrialRecord, result: TrialResult, score: Score | None) -> TrialRecord:
        """Store a trial that has ended, here and in Optuna's study; once this returns, no power cut loses it.

        Args:
            trial: The trial, as `ask` returned it.
            result: The result of its run.
            score: Its score; None without a measurement.

        Returns:
            The trial's record.
        """
        record = compacted(
            TrialRecord(number=trial.number, config=trial.config, results=(result,), score=score)
        )
        key = self._key(trial.config)
        with guarded():
            _, asked = self._running[key]
            write_figures(asked, record, self._reference_rate, self._unknown_excess)
            asked.set_user_attr(_PLACE, len(self._measured))
            asked.set_user_attr("outcome", record.outcome)
            # last: if it is there, everything that `end_recorded` needs is
            asked.set_user_attr(_RECORD, record.model_dump_json())
            end_trial(self.optuna_study, asked.number, record)
        del self._running[key]
        return self.keep(record)

    def add_run(self, number: int, result: TrialResult) -> TrialRecord:
        """Store a repeat of a finished trial, and return the trial's new record."""
        record = self._of(number).with_run(compacted(result))
        runs = [run.model_dump_json() for run in record.repeats]
        with guarded():
            # to the study: Optuna accepts no attribute of a trial that has ended
            self.optuna_study.set_user_attr(f"{_REPEATS}{number}", runs)
        return self.keep(record)

    def keep_answer(self, number: int, answer: TrialResult) -> TrialRecord:
        """Store the precision guard's answer on a finished trial, and return the trial's new record."""
        record = answered(self._of(number), answer)
        written = record.result.model_dump_json(include={"outcome", "reason", "guard"})
        with guarded():
            self.optuna_study.set_user_attr(f"{_ANSWER}{number}", written)
        return self.keep(record)

    def keep(self, *records: TrialRecord) -> TrialRecord:
        """Add or replace records in memory only, not in Optuna's study; return the last one."""
        self._measured.update((self._key(record.config), record) for record in records)
        self.ended = tuple(self._measured.values())
        self.records = tuple(sorted(self.ended, key=lambda record: record.number))
        self.best = best_of(self.records)
        return records[-1]

    def _of(self, number: int) -> TrialRecord:
        return next(record for record in self.records if record.number == number)

    @property
    def _unknown_excess(self) -> float:
        """The excess over the memory limit, as a share, where it is unknown."""
        return self.space.policy.memory.unknown_excess

    @property
    def _reference_rate(self) -> float | None:
        """The throughput of the first trial that was measured, in samples/s."""
        for ended in self.ended:
            if ended.measurement is not None:
                return ended.measurement.samples_per_s
        return None

    def _enqueue(
        self, params: Mapping[str, SettingValue], attributes: dict[str, Any] | None = None
    ) -> None:
        self.optuna_study.enqueue_trial(dict(params), user_attrs=attributes)
        self._queued += 1

    def _hand_out(self, asked: optuna.Trial, config: TrainingConfig) -> TrialRecord:
        asked.set_user_attr(CONFIG, config.model_dump_json())
        trial = TrialRecord(number=asked.number, config=config)
        if is_promising(asked):
            self._promising.add(trial.number)
        self._running[self._key(config)] = trial, asked
        self._waiting.discard(self._key(config))
        return trial

    def _answer(
        self, asked: optuna.Trial, config: TrainingConfig | None, reason: Note | None
    ) -> None:
        """End a sample without a run.

        A repeat gets its record's figures. Samplers ignore what is uninformative, or a repeat of a
        running trial, since it is ended as failed; others are ended as pruned.
        """
        key = "" if config is None else self._key(config)
        known = self._measured.get(key)
        if known is not None:
            asked.set_user_attr("outcome", f"repeat of {known.number}")
            write_figures(asked, known, self._reference_rate, self._unknown_excess)
            end_trial(self.optuna_study, asked.number, known)
            return
        state = TrialState.PRUNED
        outcome = "invalid"
        if key in self._running:
            state = TrialState.FAIL
            outcome = f"repeat of running {self._running[key][0].number}"
        elif reason is not None:
            outcome = reason.code
            if reason.figures:
                asked.set_user_attr("figures", reason.figures)
            if reason.code == "would_not_fit":
                asked.set_constraint(_MEMORY, self._unknown_excess)
            else:
                state = TrialState.FAIL
        asked.set_user_attr("outcome", outcome)
        self.optuna_study.tell(asked, state=state)

    def _config_of(self, asked: optuna.Trial) -> TrainingConfig | None:
        """Return the configuration of Optuna's trial; None if it breaks a rule, or was left out."""
        fixed = asked.user_attrs.get(CONFIG)
        if fixed:
            config: TrainingConfig | None = TrainingConfig.model_validate_json(fixed)
        else:
            config = compose_allowed(asked.params, self.space)
        if config is None or self.is_left_out(config):
            return None
        return config

    def _is_taken(self, config: TrainingConfig) -> bool:
        """Return True if a configuration that runs alike was measured or is running."""
        key = self._key(config)
        return key in self._measured or key in self._running

    def _key(self, config: TrainingConfig) -> str:
        if config not in self._keys:  # computed for thousands of candidates before each trial
            self._keys[config] = same_behaviour_key(
                config, self.space.facts, self.space.environment
            )
        return self._keys[config]
