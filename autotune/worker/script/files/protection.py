"""Protect the user's files: a trial never changes files that existed before, and new ones are recorded.

In: the trial's scratch folder. Out: a process in which opening for writing, renaming and removing
are redirected, visibly to all processes of the trial; and a journal of new files.

Redirected on Python's level: `open`, `io.open`, the functions of `os` (so pathlib, shutil,
tempfile, logging, numpy.save, Pillow, ...), `sqlite3.connect`, and the native writers of torch,
safetensors, h5py, OpenCV's images, tokenizers and pyarrow's Parquet files. New files lie where the
script wants them, so that native code and other programs find them; the parent removes them once
the trial has ended (`autotune.protocol.disk`). Those in the caches of torch, Hugging Face and
others stay, as do downloads.

A copy lies on the file system of its original, so that writing it costs the same: in scratch, or in
a hidden folder next to the original, which the parent removes too. `files_elsewhere` names those
where that was impossible.

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
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import getattr_static, isfunction
from pathlib import Path
from types import ClassMethodDescriptorType, ModuleType
from typing import Any

from autotune.worker.script.files.changes import Changes, Reads
from autotune.worker.script.files.view import View, copy_file, text_of
from autotune.worker.script.patching import after_import, open_file, real_os, replace_everywhere

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


def files_elsewhere() -> tuple[str, ...]:
    """Return the existing files whose redirected writes go to another file system than theirs.

    Writing them may cost less than in training: their folder can't be written, or its file system
    is nearly full.
    """
    return _installed[0][0].elsewhere() if _installed else ()


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


# Libraries whose native code opens files get a file's physical path.
#
# Most functions are patched by table: `_PATHS` names the argument that is a path. Functions that
# depend on a mode, or that need more than another path, have a patch of their own. Downloads by
# torch.hub and torchvision are kept for later trials.


_READ = "seen"
_WRITTEN = "emptied"
_PATHS: dict[str, Sequence[tuple[str, int, str, str]]] = {
    "cv2": [
        ("imcount", 0, "filename", _READ),
        ("imread", 0, "filename", _READ),
        ("imreadmulti", 0, "filename", _READ),
    ],
    "pyarrow.parquet": [
        ("ParquetFile.__init__", 1, "source", _READ),
        ("ParquetWriter.__init__", 1, "where", _WRITTEN),
        ("read_metadata", 0, "where", _READ),
        ("read_schema", 0, "where", _READ),
        ("read_table", 0, "source", _READ),
    ],
    "safetensors": [("safe_open", 0, "filename", _READ)],
    "tokenizers": [
        ("Tokenizer.from_file", 0, "path", _READ),
        ("Tokenizer.save", 1, "path", _WRITTEN),
    ],
    "torch": [
        ("_C.PyTorchFileReader.__init__", 1, "", _READ),
        ("jit.RecursiveScriptModule.save", 1, "f", _WRITTEN),
        ("jit.load", 0, "f", _READ),
    ],
    "torch.autograd.profiler": [("profile.export_chrome_trace", 1, "path", _WRITTEN)],
}
"""By module: its functions, the position and name of the path argument, and the use of the file."""
_DOWNLOADS: dict[str, Sequence[str]] = {
    "torch.hub": ["download_url_to_file"],
    "torchvision.datasets.utils": [
        "download_and_extract_archive", "download_file_from_google_drive", "download_url", "extract_archive",
    ],
}  # fmt: skip
"""Functions that download files."""
_PLAIN_DRIVERS = {None, "sec2", "stdio"}
"""HDF5's drivers that write one file by its name."""


def patch_module(name: str, module: ModuleType, view: View, changes: Changes) -> None:
    """Redirect the files that an imported module opens natively.

    Args:
        name: The module's name.
        module: The module.
        view: The view that resolves paths to read.
        changes: The functions that prepare files to write.
    """
    uses = {_READ: view.seen, _WRITTEN: changes.emptied}
    for function, position, keyword, use in _PATHS.get(name, ()):
        _patch(module, function, _with_path(uses[use], position, keyword))
    for function in _DOWNLOADS.get(name, ()):
        _patch(module, function, view.keeping())
    if name in _OTHERS:
        _OTHERS[name](module, view, changes)


def _patch(
    module: ModuleType, dotted: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a function, wherever modules keep it, or a method; skip one that does not exist."""
    *path, name = dotted.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part)
    function = getattr(owner, name, None)
    if function is None:
        return
    if isinstance(owner, ModuleType):
        replace_everywhere([(function, wrap(function))])
        return
    kind = type(getattr_static(owner, name))
    if issubclass(kind, staticmethod | classmethod | ClassMethodDescriptorType):
        setattr(owner, name, staticmethod(wrap(function)))
    else:
        setattr(owner, name, wrap(function))


def _with_path(
    use: Callable[[Any], str], position: int, keyword: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper that replaces the path argument of a function.

    Args:
        use: Function from the script's path to the physical one.
        position: Position of the argument.
        keyword: Name of the argument.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if named.get("filesystem") is not None:  # a file system of pyarrow
                return function(*arguments, **named)
            if len(arguments) > position and _is_path(arguments[position]):
                changed = list(arguments)
                changed[position] = use(arguments[position])
                return function(*changed, **named)
            if _is_path(named.get(keyword)):
                named[keyword] = use(named[keyword])
            return function(*arguments, **named)

        return call

    return wrap


def _is_path(name: Any) -> bool:
    """Return whether something is a local path: neither a URL nor an open file."""
    return isinstance(name, str | bytes | os.PathLike) and "://" not in text_of(name)


def _patch_torch(torch: ModuleType, view: View, changes: Changes) -> None:
    def written(path: Any) -> Any:
        at = changes.emptied(path)
        if at.isascii():
            return at
        return open(at, "wb", buffering=0)  # noqa: PTH123 - as torch.save does, and scratch may have such a name

    _patch(torch, "_C.PyTorchFileWriter.__init__", _with_path(written, 1, ""))

    def mapping(function: Callable[..., Any]) -> Callable[..., Any]:
        def from_file(
            filename: str, shared: bool | None = None, *arguments: Any, **named: Any
        ) -> Any:
            at = changes.prepared(filename) if shared else view.seen(filename)
            return function(at, bool(shared), *arguments, **named)

        return from_file

    _patch(torch, "from_file", mapping)
    _patch(torch, "UntypedStorage.from_file", mapping)


def _patch_safetensors(safetensors: ModuleType, _: View, changes: Changes) -> None:
    serialize_file = safetensors.serialize_file

    def write(tensor_dict: Any, filename: Any, *arguments: Any, **named: Any) -> Any:
        at = changes.emptied(filename)
        written = serialize_file(tensor_dict, at, *arguments, **named)
        changes.replaced(at)  # safetensors 0.8 writes another file and renames it
        return written

    replace_everywhere([(serialize_file, write)])


def _patch_h5py(h5py: ModuleType, view: View, changes: Changes) -> None:
    begin = h5py.File.__init__

    def begin_in_view(
        self: Any,
        name: Any,
        mode: str = "r",
        driver: str | None = None,
        *arguments: Any,
        **named: Any,
    ) -> None:
        if _is_path(name) and driver in _PLAIN_DRIVERS:
            is_there = os.path.exists(view.seen(name))  # noqa: PTH110 - of the view
            if mode == "w" or (mode in {"a", "x", "w-"} and not is_there):
                name = changes.emptied(name)
                mode = "w"  # HDF5 refuses an empty file in any other mode
            elif mode in {"a", "r+"} and is_there:
                name = changes.prepared(name)
            else:
                name = view.seen(name)
        begin(self, name, mode, driver, *arguments, **named)

    h5py.File.__init__ = begin_in_view


def _patch_opencv(cv2: ModuleType, _: View, changes: Changes) -> None:
    write_image = cv2.imwrite

    def write(filename: str, *arguments: Any, **named: Any) -> bool:
        try:
            at = changes.emptied(filename)
        except OSError:
            return False  # as OpenCV reports an error
        return bool(write_image(at, *arguments, **named))

    replace_everywhere([(write_image, write)])


def _patch_pyarrow(pyarrow: ModuleType, view: View, changes: Changes) -> None:
    class OSFile(pyarrow.OSFile):  # type: ignore[misc, name-defined] # pandas writes its Parquet files by it
        def __new__(cls, path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            own = {"w": changes.emptied, "a": changes.prepared}.get(mode[:1], view.seen)
            return super().__new__(cls, own(path), mode, *arguments, **named)

        def __init__(self, *_: Any, **__: Any) -> None:
            """Ignore the arguments, which `__new__` has used."""

    replace_everywhere([(pyarrow.OSFile, OSFile)])


def _patch_sqlite3(sqlite3: ModuleType, view: View, changes: Changes) -> None:
    connect = sqlite3.connect

    def connect_in_view(database: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(database, int):
            return connect(database, *arguments, **named)

        # Take a URI apart; a database in memory has no file.
        path = text_of(database)
        mark = ""
        query = ""
        is_uri = named.get("uri", False) or (len(arguments) > 6 and arguments[6])
        is_address = is_uri and path.startswith("file:")
        if is_address:
            path, mark, query = path.removeprefix("file:").partition("?")
            path = urllib.parse.unquote(path)
        if path in {"", ":memory:"} or "mode=memory" in query:
            return connect(database, *arguments, **named)

        is_read = "mode=ro" in query or "immutable=1" in query
        must_exist = "mode=rw" in query and "mode=rwc" not in query
        is_changed = not is_read and (not must_exist or os.path.exists(path))  # noqa: PTH110 - of the view
        at = _database(path, view, changes) if is_changed else view.seen(path)
        if is_address:
            at = f"file:{urllib.parse.quote(at)}{mark}{query}"
        return connect(at, *arguments, **named)

    replace_everywhere([(connect, connect_in_view)])


def _database(path: str, view: View, changes: Changes) -> str:
    """Return the physical path where sqlite may write a database; copy its journals along."""
    before = view.seen(path)
    try:
        at = changes.prepared(path)
    except OSError as error:
        import sqlite3

        raise sqlite3.OperationalError("unable to open database file") from error
    if at != before:
        for end in ("-wal", "-journal"):
            if os.path.exists(before + end):  # noqa: PTH110 - of the view
                copy_file(before + end, at + end)
    return at


def _patch_numpy(numpy: ModuleType, view: View, changes: Changes) -> None:
    make = numpy.memmap.__new__

    def mapped(
        subtype: Any,
        filename: Any,
        dtype: Any = numpy.uint8,
        mode: str = "r+",
        *arguments: Any,
        **named: Any,
    ) -> Any:
        if mode in {"r+", "readwrite"} and isinstance(filename, str | bytes | os.PathLike):
            found = view.seen(filename)
            size = real_os.stat(found).st_size if os.path.exists(found) else 0  # noqa: PTH110 - of the view
            if size > 256 << 20 and not view.is_own(found):
                # Copy-on-write changes only this process's memory; a redirected "r+", numpy's
                # default, would copy a whole data set.
                mode = "c"
        return make(subtype, filename, dtype, mode, *arguments, **named)

    numpy.memmap.__new__ = mapped
    openers = numpy.lib._datasource._file_openers  # noqa: SLF001 - savetxt and loadtxt keep `open` in a dict there
    openers._file_openers[None] = changes.open_file  # noqa: SLF001 - as above


_OTHERS: dict[str, Callable[[ModuleType, View, Changes], None]] = {
    "cv2": _patch_opencv,
    "h5py": _patch_h5py,
    "numpy": _patch_numpy,
    "pyarrow": _patch_pyarrow,
    "safetensors": _patch_safetensors,
    "sqlite3": _patch_sqlite3,
    "torch": _patch_torch,
}
PATCHED_MODULES = frozenset({*_PATHS, *_DOWNLOADS, *_OTHERS})
