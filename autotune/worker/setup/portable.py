"""Makes the user's objects travel to loader workers that are not forked (spawn, forkserver; Python 3.14's default).

Such workers pickle by name, which fails for what was defined in `__main__` or loaded from a file. Here the dataset and
the functions go as a payload instead: written once a trial, mapped by each worker.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from autotune.protocol.payload import read_payload, write_payload

__all__ = ["PortableFunction", "make_portable"]


def make_portable(dataset: object, folder: Path) -> None:
    """Have multiprocessing pickle this dataset's type as a payload below `folder`."""

    def reduce(instance: object) -> tuple[Callable[[Path], Any], tuple[Path]]:
        return read_payload, (_written(instance, folder),)

    ForkingPickler.register(type(dataset), reduce)


class PortableFunction:
    """A callable of the user's that pickles as a payload; torch.utils.data gets it in place of the function."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._function, self._folder = function, folder

    def __call__(self, *args: Any) -> Any:
        """Call the user's function."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Callable[..., PortableFunction], tuple[Path, Path]]:
        return _read_function, (_written(self._function, self._folder), self._folder)


def _read_function(payload: Path, folder: Path) -> PortableFunction:
    return PortableFunction(read_payload(payload), folder)


def _written(value: object, folder: Path) -> Path:
    payload = Path(tempfile.mkdtemp(prefix="loader-", dir=folder))
    write_payload(value, payload)
    return payload
