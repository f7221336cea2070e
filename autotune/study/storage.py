"""Open the Optuna study of a search: a SQLite file in the run folder, bound to one search.

The file is the one store of trials. Each commit waits for the disk, so that SQLite alone keeps what was told through a
kill or a power cut.
"""

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
from urllib.parse import quote

import optuna
from optuna.samplers import BaseSampler
from optuna.storages._rdb.models import BaseModel
from sqlalchemy import URL, Engine, event
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import RunFolderError, StudyMismatchError, first_line

__all__ = ["guarded", "open_finished", "open_optuna", "open_storage", "release"]

_SYNCHRONOUS = "FULL"
"""SQLite's setting for each connection: with a write-ahead log, a commit returns once the log is on the disk, 21 waits
a trial. Source: sqlite.org/pragma.html#pragma_synchronous."""
_IDENTITY = "autotune_identity"
_STUMBLES = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError)
"""Raised by Optuna for a database that it has not written, or that another version of it has written."""


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
            f"a run folder must hold its study as a file, but {path} is a link; name the linked folder"
        )
    if not path.is_file():
        raise RunFolderError(f"a run folder must hold {path.name}, but {path.parent} does not; name that of a search")
    with guarded(path):
        is_writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
        storage = open_storage(path) if is_writable else _copied(path)
        known = optuna.get_all_study_names(storage)
        if len(known) == 1:
            study = optuna.load_study(study_name=known[0], storage=storage)
            study.get_trials(deepcopy=False)  # damage raises here, and not where the caller uses a trial
            return study
    raise RunFolderError(f"{path} must hold one study, but holds {len(known)}; name the folder of a search")


def _sqlite(path: Path) -> optuna.storages.RDBStorage:
    """Open Optuna's storage in a SQLite file, after a check for damage.

    A write-ahead log takes one wait for the disk a commit, a rollback journal four. The file remembers that it has one.
    Source: sqlite.org/wal.html.
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

    Python 3.13 warns of connections that nobody has closed. SQLAlchemy keeps the statements of the last hundred engines
    with Optuna's mapped classes, which no public name reaches: 17 MiB more after 150 searches in a process.
    """
    engine.dispose()
    for mapper in BaseModel.registry.mappers:
        vars(mapper).pop("_compiled_cache", None)  # made again when used; source: sqlalchemy/orm/mapper.py


def _copied(path: Path) -> optuna.storages.RDBStorage:
    """Open a copy of a file that can't be written, and of its log; the copy is removed with the storage."""
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
    except (SQLAlchemyError, sqlite3.Error, optuna.exceptions.StorageInternalError, OSError, *damaged) as error:
        if isinstance(error, damaged):
            cause = f"what it holds can't be read ({type(error).__name__}: {first_line(error)})"
        else:
            root: BaseException = error
            while root.__cause__ is not None:  # Optuna's error is raised from SQLAlchemy's, that one from sqlite3's
                root = root.__cause__
            cause = first_line(root)
        where = f" {path}" if path is not None else ""
        raise RunFolderError(
            f"the study{where} must be a SQLite file that can be read and written, but: {cause}. "
            "Free space there, name another run_dir, or start again with --fresh (fresh=True)."
        ) from error
    finally:
        optuna.logging.set_verbosity(before)
