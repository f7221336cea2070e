"""Patch libraries whose native code opens files, so that it gets a file's physical path.

In: a module, once it is imported. Most functions are patched by table: `_PATHS` names the argument
that is a path. Functions that depend on a mode, or that need more than another path, have a patch
of their own. Downloads by torch.hub and torchvision are kept for later trials.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import getattr_static
from types import ClassMethodDescriptorType, ModuleType
from typing import Any

from autotune.worker.script.files.changes import Changes
from autotune.worker.script.files.real import real_os, replace_everywhere
from autotune.worker.script.files.view import View, copy_file, text_of

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
