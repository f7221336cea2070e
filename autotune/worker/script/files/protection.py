"""Keeps a script's files from harm: what existed before a trial is never changed by it, and what is new is recorded.

Comes in: the trial's scratch. Goes out: a process in which opening for writing, renaming and
removing are redirected, as the script itself and every other process of the trial then see it; and
a journal of what is new.

Redirected on Python's level: `open`, `io.open`, the functions of `os` (so pathlib, shutil,
tempfile, logging, numpy.save, Pillow, ...), `sqlite3.connect`, and the native writers of torch,
safetensors, h5py, OpenCV's images, tokenizers and pyarrow's Parquet files. New files lie where the
script wants them, so that native code and other programs find them, until the parent removes them
once the trial has ended: `autotune.protocol.disk`. Those in the caches of torch, Hugging Face and
others stay, as do downloads.

Not redirected: what other native code and programs write by themselves (Arrow's own files, videos,
`rm` in a shell, a `sqlite3.Connection` made without `connect`), `io.FileIO`, functions of os that
others had kept before in a dict or as a default value, and files that are already open. What these
read, and what is imported, is the real file. The permissions and times of existing folders stay as
they are, without a word. A memory map of numpy for reading and writing an existing file above 256
MiB changes this process's memory alone.
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
from autotune.worker.script.hooks import after_import

_CACHES = (
    "HF_DATASETS_CACHE", "HF_HOME", "HF_HUB_CACHE", "KAGGLEHUB_CACHE", "KERAS_HOME", "NLTK_DATA", "NUMBA_CACHE_DIR",
    "PYTHONPYCACHEPREFIX", "TFDS_DATA_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCH_HOME",
    "TRITON_CACHE_DIR", "XDG_CACHE_HOME",
)  # fmt: skip
"""Variables that name such a folder, each in its library's documentation."""
_CACHES_AT_HOME = (
    "~/.cache", "~/.fastai", "~/.keras", "~/.triton", "~/nltk_data", "~/scikit_learn_data", "~/tensorflow_datasets",
)  # fmt: skip
"""Where it is without a variable."""
_installed: list[tuple[View, Changes]] = []
_protected: set[str] = set()


def protect_files(scratch: Path, *, own: Sequence[Path] = ()) -> None:
    """Redirect what this process and those that it forks would do to files that existed before; once is enough.

    Args:
        scratch: a folder of the trial's alone; made where it is not there. A process started anew
            gets the same one.
        own: folders whose files are the trial's own: written as ever, not recorded.

    Raises:
        OSError: scratch can't be written. Later on too: a change that can't be redirected is never
            made instead.
    """
    if _installed:
        return
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    view = View(os.path.realpath(scratch), tuple(map(os.path.realpath, own)), _cache_folders())
    reads = Reads(view)
    changes = Changes(view)
    _installed.append((view, changes))
    replacements = {
        getattr(real_os, name): getattr(functions, name)
        for functions in (reads, changes)
        for name in dir(functions)
        if name in real_os.__all__
    }
    _join_capabilities(replacements)
    replace_everywhere([*replacements.items(), (open_file, changes.open_file)])
    builtins.open = io.open = changes.open_file
    os.register_at_fork(after_in_child=view.forked)
    _replace_defaults(tempfile._TemporaryFileCloser, replacements)  # type: ignore[attr-defined]  # noqa: SLF001
    if (
        "shutil" in sys.modules
    ):  # imported later, it finds by itself that os's functions take no folder's descriptor
        sys.modules["shutil"]._use_fd_functions = False  # type: ignore[attr-defined]  # noqa: SLF001
    for name in PATCHED_MODULES - {"torch"}:
        after_import(name, partial(_protect, name))


def _replace_defaults(kind: type, replacements: Mapping[Any, Any]) -> None:
    """Replace functions of os that the methods of a class keep as default values of their arguments."""
    for method in filter(isfunction, vars(kind).values()):
        method.__defaults__ = (
            tuple(replacements.get(one, one) for one in method.__defaults__ or ()) or None
        )


def protect_torch() -> None:
    """Redirect torch's native writers; torch is imported, and files are protected."""
    _protect("torch")


def _protect(name: str, _: ModuleType | None = None) -> None:
    """Redirect the native writers of a module that is imported, once."""
    if _installed and name not in _protected:
        _protected.add(name)
        patch_module(name, sys.modules[name], *_installed[0])


def _cache_folders() -> tuple[str, ...]:
    """Return where libraries keep what they have downloaded or compiled, for every later process."""
    named = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    folders = map(os.path.expanduser, (*_CACHES_AT_HOME, *named))
    return tuple(map(os.path.realpath, folders))


def _join_capabilities(replacements: Mapping[Any, Any]) -> None:
    """Declare what the replacements can do too; none takes a folder's descriptor, so that trees are walked by path."""
    for able in (os.supports_effective_ids, os.supports_fd, os.supports_follow_symlinks):
        able.update([new for old, new in replacements.items() if old in able])
