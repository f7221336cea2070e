"""The user's workload on its way to the trials: a cloudpickle stream, and one file of raw bytes.

The workload is written once a search. Every large array and tensor lies in the raw bytes, which
each trial maps copy-on-write: a big dataset is neither read nor copied again. cloudpickle sends what
is defined in `__main__` by value and everything else by name; modules that no entry of the search
path leads to (loaded from a file, as pytest's importlib mode does) are sent by value too. Only
payloads that this run's parent wrote are ever unpickled.
"""

from __future__ import annotations

import copyreg
import errno
import json
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

import cloudpickle

from autotune.config.plan import PARTS, Ref, Workload
from autotune.errors import WorkloadError
from autotune.protocol.disk import disk_error, private_file, write_atomic

if TYPE_CHECKING:
    from torch import UntypedStorage


_PROTOCOL = 5  # of pickle: the first with out-of-band buffers
_DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
)  # of our files, not of user code
_ALIGNMENT = 64  # bytes, a cache line; our convention
_SMALLEST_MAPPED_BYTES = 16 * 1024  # our convention: four pages; smaller arrays stay in the stream


def write_payload(value: object, folder: Path) -> None:
    """Write an object, such as a Workload, for ranks to read; tensors and arrays are stored to be mapped.

    Raises:
        WorkloadError: a part of it can't be pickled; the message names the attribute.
        RunFolderError: the folder can't be written or its disk is full.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _made(folder / "stream") as stream, _made(folder / "bytes") as raw:
            pickler = _Pickler(stream, raw)
            with _unreachable_by_value(value):
                _dump(pickler, value)
        write_atomic(
            folder / "index.json", json.dumps({"version": 1, "buffers": pickler.buffers}).encode()
        )
    except BaseException as error:
        for name in ("stream", "bytes"):
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(folder, error) from error
        raise


def _made(path: Path) -> BinaryIO:
    return open(path, "wb", opener=private_file)


def _dump(pickler: _Pickler, value: object) -> None:
    try:
        pickler.dump(value)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise
        place, reason = _culprit(value, error)
        raise WorkloadError(
            f"{place} can't be carried to a trial ({reason}). Pass a zero-argument function that "
            f"builds it instead: "
            "autotune calls it inside each trial."
        ) from error


def read_payload(folder: Path) -> Any:
    """Read what this run's parent wrote by `write_payload`; writes to its arrays stay in this process."""
    index = json.loads((folder / "index.json").read_bytes())
    with (folder / "bytes").open("rb") as raw, (folder / "stream").open("rb") as stream:
        size = os.fstat(raw.fileno()).st_size
        mapped = (
            memoryview(mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_COPY))
            if size
            else memoryview(b"")
        )
        buffers = [mapped[start : start + length] for start, length in index["buffers"]]
        return _Unpickler(stream, mapped, buffers).load()


@contextmanager
def _unreachable_by_value(value: object) -> Iterator[None]:
    """Pickle classes and functions of a workload's unreachable modules by value within this context."""
    parts = [getattr(value, part) for part in PARTS] if isinstance(value, Workload) else []
    names = {name for part in parts for name in _module_names(part)}
    modules = [
        sys.modules[name]
        for name in sorted(names)
        if name in sys.modules and not _is_reachable(name)
    ]
    with ExitStack() as undo:
        for module in modules:
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                undo.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _module_names(part: Any) -> Iterator[str]:
    """Yield modules of a part's class or function, of a model's submodules, and of the dataset inside a dataset."""
    for _ in range(8):  # a dataset in a dataset, such as Subset; ends a circle too
        if part is None or isinstance(part, Ref | str):
            return
        inner = None
        with suppress(
            Exception
        ):  # what a user's attributes of these names do is not ours to fail on
            yield from (
                name for owner in (part, type(part)) if isinstance(name := owner.__module__, str)
            )
        with suppress(Exception):  # as above
            yield from (
                ()
                if isinstance(part, type)
                else [type(module).__module__ for module in part.modules()]
            )
        with suppress(Exception):  # as above
            inner = part.dataset
        part = inner


def _is_reachable(name: str) -> bool:
    top = name.partition(".")[0]
    if name == "__main__" or not isinstance(sys.modules.get(name), ModuleType):
        return True
    return any(
        finder.find_spec(top, None) is not None
        for finder in sys.meta_path
        if hasattr(finder, "find_spec")
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle ships no types
    """Puts large arrays (out-of-band buffers) and all tensor storages into a file of raw bytes.

    Storages go by persistent id, as in torch.save, so that tensors which share one still do.
    """

    def __init__(self, stream: BinaryIO, raw: BinaryIO) -> None:
        super().__init__(stream, protocol=_PROTOCOL, buffer_callback=self._take_buffer)
        self.buffers: list[tuple[int, int]] = []
        self._raw = raw
        self._storages: dict[tuple[int, int], tuple[int, UntypedStorage]] = {}

    def persistent_id(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(obj, torch.storage.TypedStorage):
            return None
        storage: UntypedStorage = obj._untyped_storage  # noqa: SLF001 - as torch.save does; no public accessor
        if storage.device.type == "meta" or storage.nbytes() == 0:
            return None
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._storages:
            array = torch.empty(0, dtype=torch.uint8).set_(storage.cpu()).numpy()  # type: ignore[no-untyped-call] # torch
            start = self._append(memoryview(array))
            self._storages[key] = (
                start,
                storage,
            )  # kept alive, so that no other one gets its address
        return "storage", self._storages[key][0], storage.nbytes(), obj.dtype

    def reducer_override(self, obj: Any) -> Any:
        """Leave out what a trial makes again: a loader's running iterator, and the state of an optimizer."""
        torch = sys.modules.get("torch")
        if (
            torch is not None
            and isinstance(obj, torch.utils.data.DataLoader)
            and obj._iterator is not None  # noqa: SLF001 - no public name
        ):
            idle = copy(obj)
            idle._iterator = None  # noqa: SLF001 - as above
            return idle.__reduce_ex__(_PROTOCOL)
        if torch is not None and isinstance(obj, torch.optim.Optimizer):
            from autotune.apply.prepare import stateless

            return copyreg.__newobj__, (type(obj),), stateless(obj)  # type: ignore[attr-defined] # what pickle itself uses
        return super().reducer_override(obj)

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _SMALLEST_MAPPED_BYTES:
            return True
        self.buffers.append((self._append(view), view.nbytes))
        return False

    def _append(self, view: memoryview) -> int:
        start = -(-self._raw.tell() // _ALIGNMENT) * _ALIGNMENT
        self._raw.seek(start)
        self._raw.write(view)
        return start


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, mapped: memoryview, buffers: list[memoryview]) -> None:
        super().__init__(stream, buffers=buffers)
        self._mapped = mapped
        self._storages: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        import torch

        _, start, length, dtype = pid
        if start not in self._storages:
            tensor = torch.frombuffer(self._mapped, dtype=torch.uint8, count=length, offset=start)
            self._storages[start] = tensor.untyped_storage()
        storage = self._storages[start]
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call] # torch


def _culprit(value: object, error: Exception) -> tuple[str, str]:
    """Return the innermost attribute that does not pickle, such as "model.encoder.lock", and the reason."""
    path: list[str] = []
    reason = f"{type(error).__name__}: {error}"
    for _ in range(6):
        for name, child in _children(value):
            failure = _pickle_failure(child)
            if failure is not None:
                path.append(name)
                value = child
                reason = failure
                break
        else:
            break
    return ".".join(path) or type(value).__name__, reason


def _children(value: object) -> list[tuple[str, object]]:
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, dict):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    named: Callable[[], Any] | None = getattr(value, "named_children", None)
    modules = list(named()) if named is not None and not isinstance(value, type) else []
    attributes = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
    own = [
        (name, child)
        for name, child in attributes.items()
        if name not in {"_modules", "_parameters", "_buffers"}
    ]
    return [*modules, *own]


def _pickle_failure(value: object) -> str | None:
    with open(os.devnull, "wb") as nowhere, open(os.devnull, "wb") as raw:  # noqa: PTH123 - a device, not a path
        try:
            _Pickler(nowhere, raw).dump(value)
        except Exception as error:  # noqa: BLE001 - a user's __reduce__ may raise anything
            return f"{type(error).__name__}: {error}"
    return None
