"""An Optuna study: where it lies, a SQLite file in the run folder, bound to one search."""

from __future__ import annotations

import os
import shutil
import sqlite3
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote, unquote_to_bytes

import optuna
from optuna.samplers import BaseSampler
from optuna.storages._rdb.models import BaseModel
from sqlalchemy import URL, Engine, event
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import RunFolderError, StudyMismatchError, first_line

__all__ = ["guarded", "keep_on_disk", "open_finished", "open_optuna", "open_storage", "release"]

_IDENTITY = "autotune_identity"
_STUMBLES = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError)
"""What Optuna raises over a database with other content than it has written, or of another version of it."""


def open_storage(path: Path | None) -> optuna.storages.BaseStorage:
    """A SQLite file, or memory where there is no path."""
    return optuna.storages.InMemoryStorage() if path is None else _sqlite(path)


def open_optuna(
    storage: optuna.storages.BaseStorage,
    path: Path | None,
    identity: Mapping[str, str],
    seed: int,
    make_sampler: Callable[[int], BaseSampler],
) -> optuna.Study:
    """The study in a storage, or a new one.

    Raises:
        StudyMismatchError: it is of another search; the message names what differs.
    """
    name, sampler = f"autotune-{identity.get('space', 'study')}", make_sampler(seed)
    for known in storage.get_all_studies():
        study_id = known._study_id  # noqa: SLF001 - the storage's own key
        there = storage.get_study_user_attrs(study_id).get(_IDENTITY)
        if there is not None or storage.get_n_trials(study_id) > 0:  # else a kill came right after it was made
            _refuse_other(path, there or {}, identity)
        name, sampler = known.study_name, make_sampler(seed + storage.get_n_trials(study_id))
    study = optuna.create_study(
        storage=storage, study_name=name, sampler=sampler, direction="maximize", load_if_exists=True
    )
    study.set_user_attr(_IDENTITY, dict(identity))
    return study


def open_finished(path: Path) -> optuna.Study:
    """The study of a search that has ended, as Optuna has it.

    Raises:
        RunFolderError: there is no such file, it is a link, it can't be read, or it holds no study.
    """
    if path.is_symlink():
        raise RunFolderError(
            f"a run folder must hold its study as a file, but {path} is a link; name the linked folder"
        )
    if not path.is_file():
        raise RunFolderError(f"a run folder must hold {path.name}, but {path.parent} does not; name that of a search")
    with guarded(path):
        is_writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
        storage = open_storage(path) if is_writable else _copied(path)
        known = [study.study_name for study in storage.get_all_studies()]
        if len(known) == 1:
            study = optuna.load_study(study_name=known[0], storage=storage)
            study.get_trials(deepcopy=False)  # what is damaged is told here, not where a trial is looked at
            return study
    raise RunFolderError(f"{path} must hold one study, but holds {len(known)}; name the folder of a search")


def _sqlite(path: Path) -> optuna.storages.RDBStorage:
    """Optuna's storage with a write-ahead log: a trial costs a dozen commits, and each would wait for the disk.

    Source: sqlite.org/wal.html and pragma.html#pragma_synchronous: NORMAL with a WAL can't corrupt the file; a power
    cut may cost the commits since the last `keep_on_disk`.
    """
    with closing(sqlite3.connect(path)) as connection:  # what is no database fails here, and its connection is closed
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))
    storage = optuna.storages.RDBStorage(_address(path))

    def configure(connection: Any, _: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    event.listen(storage.engine, "connect", configure)
    storage.engine.dispose()  # connections from before the listener
    weakref.finalize(storage, _let_go, storage.engine)
    return storage


def _address(path: Path) -> str:
    """A file's URL for SQLAlchemy, whatever its name holds: "?", "#", "%", braces, bytes that are no UTF-8.

    SQLAlchemy takes what follows a "?" for options, and Optuna fills in what stands in braces.
    Source: sqlite.org/uri.html; SQLAlchemy's documentation of SQLite, "URI Connections".
    """
    url = URL.create("sqlite", database=f"file:{quote(os.fsencode(path))}", query={"uri": "true"})
    return url.render_as_string()  # from SQLAlchemy 2.1 on a URL's database is quoted once more


def release(storage: optuna.storages.BaseStorage) -> None:
    """Close a study's file; whoever uses the study afterwards opens it again."""
    if isinstance(storage, optuna.storages.RDBStorage):
        storage.remove_session()
        _let_go(storage.engine)


def _let_go(engine: Engine) -> None:
    """Close a study's connections, and forget its statements.

    Python 3.13 warns of connections that nobody has closed. SQLAlchemy keeps the statements of the last hundred engines
    with Optuna's mapped classes: a process of many searches would grow by some 100 KiB with each of them.
    """
    engine.dispose()
    for mapper in BaseModel.registry.mappers:
        vars(mapper).pop("_compiled_cache", None)  # made anew where it is asked for; source: sqlalchemy/orm/mapper.py


def _file_of(storage: optuna.storages.RDBStorage) -> Path:
    """The file behind an address."""
    return Path(os.fsdecode(unquote_to_bytes((storage.engine.url.database or "").removeprefix("file:"))))


def keep_on_disk(storage: optuna.storages.BaseStorage) -> None:
    """Wait until all commits so far would outlast a power cut.

    They are in the log: without one (a file system that can't have it), each commit has waited already. No lock is on
    the log's file, so that closing it here lets go of none. Source: sqlite.org/walformat.html (2.3, locks).
    """
    if isinstance(storage, optuna.storages.RDBStorage):
        log = _file_of(storage).with_name(f"{_file_of(storage).name}-wal")
        if log.exists():
            for path in (log, log.parent):  # the folder holds its name
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)


def _copied(path: Path) -> optuna.storages.RDBStorage:
    """Optuna's storage of a file that can't be written, as a copy with its log, which goes with the storage."""
    folder = TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True)
    try:
        for file in path.parent.glob(f"{path.name}*"):  # a killed search's last trials are in the log alone
            shutil.copyfile(file, Path(folder.name, file.name))
        storage = _sqlite(Path(folder.name, path.name))
    except BaseException:
        folder.cleanup()
        raise
    weakref.finalize(storage, folder.cleanup)
    return storage


def _refuse_other(path: Path | None, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    differing = sorted(key for key in {*there, *here} if there.get(key, "none") != here.get(key, "none"))
    if differing:
        details = "; ".join(f"{key}: {there.get(key, 'none')} there, {here.get(key, 'none')} here" for key in differing)
        raise StudyMismatchError(
            f"the run folder must hold a study of the same search, but {path} differs in {details}. "
            "Name another run_dir, or begin anew with --fresh (fresh=True)."
        )


@contextmanager
def guarded(path: Path | None = None) -> Iterator[None]:
    """Keep Optuna's log lines and notices from the terminal, and say by a RunFolderError what a disk does not allow.

    Where a path is given, a file is opened, and what Optuna or we stumble over there is said of the file as well.
    """
    damaged = () if path is None else _STUMBLES
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    except (SQLAlchemyError, sqlite3.Error, optuna.exceptions.StorageInternalError, OSError, *damaged) as error:
        cause: object = getattr(error, "orig", None) or error.__cause__ or error
        if isinstance(error, damaged):
            cause = f"what it holds can't be read ({type(error).__name__}: {first_line(error)})"
        where = f" {path}" if path is not None else ""
        raise RunFolderError(
            f"the study{where} must be a SQLite file that can be read and written, but: {cause}. "
            "Free space there, name another run_dir, or begin anew with --fresh (fresh=True)."
        ) from error
    finally:
        optuna.logging.set_verbosity(before)
