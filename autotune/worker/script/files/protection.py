"""Protect the user's files: a trial never changes files that existed before, and new ones are recorded.

In: the trial's scratch folder. Out: a process in which opening for writing, renaming and removing
are redirected, visibly to all processes of the trial; and a journal of new files.

Redirected on Python's level: `open`, `io.open`, the functions of `os` (so pathlib, shutil,
tempfile, logging, numpy.save, Pillow, ...), `sqlite3.connect`, and the native writers of torch,
safetensors, h5py, OpenCV's images, tokenizers and pyarrow's Parquet files. New files lie where the
script wants them, so that native code and other programs find them; the parent removes them once
the trial has ended (`autotune.protocol.disk`). Those in the caches of torch, Hugging Face and
others stay, as do downloads.

Not redirected: writes by other native code and programs (Arrow's own files, videos, `rm` in a
shell, a `sqlite3.Connection` made without `connect`), `io.FileIO`, functions of os that modules
kept before in a dict or as a default value, and files that are already open. These, and imports,
read the real file. The permissions and times of existing folders silently stay as they are. A
read-write memory map by numpy of an existing file above 256 MiB changes only this process's memory.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.worker.script.files.changes import Changes, Reads
from autotune.worker.script.files.native import PATCHED_MODULES, patch_module
from autotune.worker.script.files.real import open_file, real_os, replace_everywhere
from autotune.worker.script.files.view import View
from autotune.worker.script.imports import after_import

_CACHES = (
    "HF_DATASETS_CACHE", "HF_HOME", "HF_HUB_CACHE", "KAGGLEHUB_CACHE", "KERAS_HOME", "NLTK_DATA", "NUMBA_CACHE_DIR",
    "PYTHONPYCACHEPREFIX", "TFDS_DATA_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCH_HOME",
    "TRITON_CACHE_DIR", "XDG_CACHE_HOME",
)  # fmt: skip
"""Environment variables that name a cache folder. Source: each library's documentation."""
_CACHES_AT_HOME = (
    "~/.cache", "~/.fastai", "~/.keras", "~/.triton", "~/nltk_data", "~/scikit_learn_data", "~/tensorflow_datasets",
)  # fmt: skip
"""Cache folders if no variable names one. Source: each library's documentation."""
_installed: list[tuple[View, Changes]] = []
_protected: set[str] = set()


def protect_files(scratch: Path, *, own: Sequence[Path] = ()) -> None:
    """Redirect changes of existing files, in this process and those that it forks.

    A second call does nothing.

    Args:
        scratch: Scratch folder of this trial only, made if needed; the same for all processes of
            the trial.
        own: Folders whose files the trial may change; changes there are not recorded.

    Raises:
        OSError: Scratch can't be written. Later calls of the script raise it too: a change that
            can't be redirected is not made at all.
    """
    if _installed:
        return

    # Replace the functions of os and io, everywhere.
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    view = View(os.path.realpath(scratch), tuple(map(os.path.realpath, own)), _cache_folders())
    reads = Reads(view)
    changes = Changes(view)
    _installed.append((view, changes))
    replacements: dict[Any, Any] = {}
    for functions in (reads, changes):
        for name in dir(functions):
            if name in real_os.__all__:
                replacements[getattr(real_os, name)] = getattr(functions, name)
    _join_capabilities(replacements)
    replace_everywhere([*replacements.items(), (open_file, changes.open_file)])
    builtins.open = io.open = changes.open_file
    os.register_at_fork(after_in_child=view.forked)
    _replace_defaults(tempfile._TemporaryFileCloser, replacements)  # type: ignore[attr-defined]  # noqa: SLF001
    # The replacements take no folder descriptors; a later import of shutil finds that itself.
    if "shutil" in sys.modules:
        sys.modules["shutil"]._use_fd_functions = False  # type: ignore[attr-defined]  # noqa: SLF001

    # Redirect the native writers of other libraries, once they are imported.
    for name in PATCHED_MODULES - {"torch"}:
        after_import(name, partial(_protect, name))


def _replace_defaults(kind: type, replacements: Mapping[Any, Any]) -> None:
    """Replace functions of os that a class's methods keep as default values of arguments."""
    for method in filter(isfunction, vars(kind).values()):
        if method.__defaults__:
            method.__defaults__ = tuple(replacements.get(one, one) for one in method.__defaults__)


def protect_torch() -> None:
    """Redirect torch's native writers; call after `import torch` and `protect_files`."""
    _protect("torch")


def _protect(name: str, _: ModuleType | None = None) -> None:
    """Redirect the native writers of an imported module, once."""
    if _installed and name not in _protected:
        _protected.add(name)
        patch_module(name, sys.modules[name], *_installed[0])


def _cache_folders() -> tuple[str, ...]:
    """Return the folders in which libraries keep downloads and compiled code."""
    named = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    folders = map(os.path.expanduser, (*_CACHES_AT_HOME, *named))
    return tuple(map(os.path.realpath, folders))


def _join_capabilities(replacements: Mapping[Any, Any]) -> None:
    """Add the replacements to os's sets of capabilities.

    None takes a folder's descriptor, so that shutil walks trees by path.
    """
    for able in (os.supports_effective_ids, os.supports_fd, os.supports_follow_symlinks):
        able.update([new for old, new in replacements.items() if old in able])
