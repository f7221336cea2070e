"""Gives native code that writes files by itself a path of the view.

Such as torch, safetensors, sqlite3, h5py, OpenCV's images, Parquet files of pyarrow and numpy's memory maps.

Comes in: a module just imported. Goes out: the same module, its functions replaced that take a path to C++ or Rust.
What torch.hub and torchvision download is kept for later trials.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType
from typing import Any

from autotune.worker.attach.redirect.changes import Changes
from autotune.worker.attach.redirect.copying import copy_file
from autotune.worker.attach.redirect.paths import text_of
from autotune.worker.attach.redirect.real import FUNCTIONS as REAL
from autotune.worker.attach.redirect.real import replace_everywhere
from autotune.worker.attach.redirect.view import View

__all__ = ["PROTECTORS"]

_PLAIN_DRIVERS = {None, "sec2", "stdio"}
"""HDF5's drivers that write one file by its name."""


def _protect_torch(torch: ModuleType, view: View, changes: Changes) -> None:
    class Writer(torch._C.PyTorchFileWriter):  # type: ignore[misc, name-defined] # noqa: SLF001 - no public name has it
        def __init__(self, target: Any, *arguments: Any, **named: Any) -> None:
            if isinstance(target, str):
                target = changes.emptied(target)
                if not target.isascii():  # as torch.save does, and scratch may have another name
                    target = self._autotune_stream = open(target, "wb", buffering=0)  # noqa: PTH123, SIM115
            super().__init__(target, *arguments, **named)

    class Reader(torch._C.PyTorchFileReader):  # type: ignore[misc, name-defined] # noqa: SLF001 - no public name has it
        def __init__(self, source: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(view.seen(source) if isinstance(source, str) else source, *arguments, **named)

    from_file: Any = torch.__dict__["from_file"]
    storage_from_file = torch.UntypedStorage.from_file

    def mapped(filename: Any, shared: Any) -> str:
        return changes.prepared(filename) if shared else view.seen(filename)

    def tensor_from_file(filename: str, shared: bool | None = None, *arguments: Any, **named: Any) -> Any:
        return from_file(mapped(filename, shared), shared, *arguments, **named)

    def untyped_from_file(filename: str, shared: bool = False, *arguments: Any, **named: Any) -> Any:
        return storage_from_file(mapped(filename, shared), shared, *arguments, **named)

    torch._C.PyTorchFileWriter, torch._C.PyTorchFileReader = Writer, Reader  # noqa: SLF001
    torch.__dict__["from_file"] = tensor_from_file
    torch.UntypedStorage.from_file = staticmethod(untyped_from_file)
    script = torch.jit.RecursiveScriptModule
    save = script.save

    def save_script(self: Any, f: Any, **named: Any) -> Any:
        return save(self, changes.emptied(f), **named)

    script.save = save_script
    load = torch.jit.load

    def load_script(f: Any, *arguments: Any, **named: Any) -> Any:
        return load(view.seen(f) if isinstance(f, str | os.PathLike) else f, *arguments, **named)

    replace_everywhere([(load, load_script)])


def _protect_profiler(profiler: ModuleType, _: View, changes: Changes) -> None:
    export = profiler.profile.export_chrome_trace

    def export_in_view(self: Any, path: str, *arguments: Any, **named: Any) -> Any:
        return export(self, changes.emptied(path), *arguments, **named)

    profiler.profile.export_chrome_trace = export_in_view


def _protect_downloads(*names: str) -> Callable[[ModuleType, View, Changes], None]:
    """Keep what functions of a module download for later trials."""

    def protect(module: ModuleType, view: View, _: Changes) -> None:
        def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def call(*arguments: Any, **named: Any) -> Any:
                with view.keeping():
                    return function(*arguments, **named)

            return call

        found = [module.__dict__[name] for name in names if name in module.__dict__]
        replace_everywhere([(function, keeping(function)) for function in found])

    return protect


def _protect_safetensors(safetensors: ModuleType, view: View, changes: Changes) -> None:
    serialize_file, safe_open = safetensors.serialize_file, safetensors.safe_open

    def write(tensor_dict: Any, filename: Any, *arguments: Any, **named: Any) -> Any:
        at = changes.emptied(filename)
        written = serialize_file(tensor_dict, at, *arguments, **named)
        changes.replaced(at)  # 0.8 writes a file beside it and renames that
        return written

    def read(filename: Any, *arguments: Any, **named: Any) -> Any:
        return safe_open(view.seen(filename), *arguments, **named)

    replace_everywhere([(serialize_file, write), (safe_open, read)])


def _protect_h5py(h5py: ModuleType, view: View, changes: Changes) -> None:
    begin = h5py.File.__init__

    def begin_in_view(
        self: Any, name: Any, mode: str = "r", driver: str | None = None, *arguments: Any, **named: Any
    ) -> None:
        if _is_path(name) and driver in _PLAIN_DRIVERS:
            is_there = os.path.exists(view.seen(name))  # noqa: PTH110 - of the view
            if mode == "w" or (mode in {"a", "x", "w-"} and not is_there):
                name, mode = changes.emptied(name), "w"  # HDF5 refuses an empty file in any other mode
            else:
                name = changes.prepared(name) if mode in {"a", "r+"} and is_there else view.seen(name)
        begin(self, name, mode, driver, *arguments, **named)

    h5py.File.__init__ = begin_in_view


def _protect_opencv(cv2: ModuleType, view: View, changes: Changes) -> None:
    write_image = cv2.imwrite
    _read_in_view(cv2, view, "imread", "imreadmulti", "imcount")

    def write(filename: str, *arguments: Any, **named: Any) -> bool:
        try:
            at = changes.emptied(filename)
        except OSError:
            return False  # as OpenCV says it
        return bool(write_image(at, *arguments, **named))

    replace_everywhere([(write_image, write)])


def _protect_pyarrow(pyarrow: ModuleType, view: View, changes: Changes) -> None:
    class OSFile(pyarrow.OSFile):  # type: ignore[misc, name-defined] # pandas writes its Parquet files by it
        def __new__(cls, path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            own = {"w": changes.emptied, "a": changes.prepared}.get(mode[:1], view.seen)
            return super().__new__(cls, own(path), mode, *arguments, **named)

        def __init__(self, *_: Any, **__: Any) -> None:
            """Take what `__new__` has used."""

    replace_everywhere([(pyarrow.OSFile, OSFile)])


def _protect_tokenizers(tokenizers: ModuleType, view: View, changes: Changes) -> None:
    save, from_file = tokenizers.Tokenizer.save, tokenizers.Tokenizer.from_file

    def save_in_view(self: Any, path: Any, *arguments: Any, **named: Any) -> Any:
        return save(self, changes.emptied(path), *arguments, **named)

    def read_in_view(path: Any) -> Any:
        return from_file(view.seen(path))

    tokenizers.Tokenizer.save, tokenizers.Tokenizer.from_file = save_in_view, staticmethod(read_in_view)


def _protect_parquet(parquet: ModuleType, view: View, changes: Changes) -> None:
    begin, begin_reading = parquet.ParquetWriter.__init__, parquet.ParquetFile.__init__

    def begin_in_view(self: Any, where: Any, schema: Any, filesystem: Any = None, *more: Any, **named: Any) -> None:
        is_own = filesystem is None and _is_path(where)
        begin(self, changes.emptied(where) if is_own else where, schema, filesystem, *more, **named)

    def read_in_view(self: Any, source: Any, *arguments: Any, **named: Any) -> None:
        begin_reading(self, _seen(view, source, named), *arguments, **named)

    parquet.ParquetWriter.__init__, parquet.ParquetFile.__init__ = begin_in_view, read_in_view
    _read_in_view(parquet, view, "read_table", "read_metadata", "read_schema")


def _read_in_view(module: ModuleType, view: View, *names: str) -> None:
    """Have functions of a module that take a path first read what the script sees there."""

    def reading(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(source: Any, *arguments: Any, **named: Any) -> Any:
            return function(_seen(view, source, named), *arguments, **named)

        return call

    found = [module.__dict__[name] for name in names if name in module.__dict__]
    replace_everywhere([(function, reading(function)) for function in found])


def _seen(view: View, source: Any, named: Mapping[str, Any]) -> Any:
    return view.seen(source) if _is_path(source) and named.get("filesystem") is None else source


def _is_path(name: Any) -> bool:
    """Return whether something is a path on this machine: neither an address nor an open file."""
    return isinstance(name, str | bytes | os.PathLike) and "://" not in text_of(name)


def _protect_sqlite3(sqlite3: ModuleType, view: View, changes: Changes) -> None:
    connect = sqlite3.connect

    def opened(database: Any, *arguments: Any, **named: Any) -> Any:
        is_address = named.get("uri", False) or (len(arguments) > 6 and arguments[6])
        if isinstance(database, int) or text_of(database) in {"", ":memory:"}:
            return connect(database, *arguments, **named)
        text = text_of(database)
        if is_address and text.startswith("file:"):
            path, mark, query = text.removeprefix("file:").partition("?")
            if not path or path == ":memory:" or "mode=memory" in query:
                return connect(database, *arguments, **named)
            is_read = "mode=ro" in query or "immutable=1" in query
            must_be = "mode=rw" in query and "mode=rwc" not in query
            if is_read or (must_be and not os.path.exists(urllib.parse.unquote(path))):  # noqa: PTH110 - of the view
                return connect(
                    f"file:{urllib.parse.quote(view.seen(urllib.parse.unquote(path)))}{mark}{query}",
                    *arguments,
                    **named,
                )
            return connect(
                f"file:{urllib.parse.quote(_database(urllib.parse.unquote(path), view, changes))}{mark}{query}",
                *arguments,
                **named,
            )
        return connect(_database(text, view, changes), *arguments, **named)

    replace_everywhere([(connect, opened)])


def _database(path: str, view: View, changes: Changes) -> str:
    """Where sqlite may write a database; what it had not merged yet lies beside the copy too."""
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


def _protect_numpy(numpy: ModuleType, view: View, changes: Changes) -> None:
    make = numpy.memmap.__new__

    def mapped(
        subtype: Any, filename: Any, dtype: Any = numpy.uint8, mode: str = "r+", *arguments: Any, **named: Any
    ) -> Any:
        if mode in {"r+", "readwrite"} and isinstance(filename, str | bytes | os.PathLike):
            found = view.seen(filename)
            size = REAL["stat"](found).st_size if os.path.exists(found) else 0  # noqa: PTH110 - of the view
            if size > 256 << 20 and not view.is_own(found):  # what is copied in about a second
                mode = "c"  # changed in this process's memory alone: numpy's default would copy a whole data set
        return make(subtype, filename, dtype, mode, *arguments, **named)

    numpy.memmap.__new__ = mapped
    openers = numpy.lib._datasource._file_openers  # noqa: SLF001 - savetxt and loadtxt keep `open` in a dict there
    openers._file_openers[None] = changes.open_file  # noqa: SLF001 - as above


PROTECTORS: Mapping[str, Callable[[ModuleType, View, Changes], None]] = {
    "cv2": _protect_opencv,
    "h5py": _protect_h5py,
    "numpy": _protect_numpy,
    "pyarrow": _protect_pyarrow,
    "pyarrow.parquet": _protect_parquet,
    "safetensors": _protect_safetensors,
    "sqlite3": _protect_sqlite3,
    "tokenizers": _protect_tokenizers,
    "torch": _protect_torch,
    "torch.autograd.profiler": _protect_profiler,
    "torch.hub": _protect_downloads("download_url_to_file"),
    "torchvision.datasets.utils": _protect_downloads(
        "download_and_extract_archive", "download_file_from_google_drive", "download_url", "extract_archive"
    ),
}
"""By the module that has to be imported."""
