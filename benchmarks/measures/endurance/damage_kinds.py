"""Damage a file of a run folder: cut it, flip bits, or replace it by something else.

Comes in: a file, and a folder outside of the run folder, where a pickle of ours makes a folder if somebody reads it.
Goes out: the file damaged in place.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path

__all__ = ["DAMAGES", "NOT_SEEN", "OF_A_FOLDER", "ONE_OF_A_KIND", "OPENED", "bits_flipped"]

OPENED = "unpickled"
"""The file outside that a pickle of ours makes, where somebody reads it."""
_SPARSE = 1 << 30
_NOT_OURS = b"Dear diary,\ntoday I have written over a file that was not mine.\n" * 200


class _Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self._path),)


def _removed(file: Path) -> None:
    shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)


def _written(data: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    def damage(file: Path, _outside: Path) -> None:
        before = file.read_bytes() if file.is_file() else b""
        _removed(file)
        file.write_bytes(data(before))

    return damage


def _cut(share: float) -> Callable[[Path, Path], None]:
    return _written(lambda before: before[: int(share * len(before))])


def bits_flipped(before: bytes, seed: int) -> bytes:
    """The bytes with three bits the other way round."""
    draw, flipped = random.Random(seed), bytearray(before)
    for _ in range(3 if flipped else 0):
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def _flipped(seed: int) -> Callable[[Path, Path], None]:
    return _written(lambda before: bits_flipped(before, seed))


def _pickled(file: Path, outside: Path) -> None:
    _removed(file)
    file.write_bytes(pickle.dumps(_Trap(outside / OPENED)))


def _other_version(file: Path, _outside: Path) -> None:
    """Of a version to come: another number of the format, or of the database's schema."""
    if file.name == "study.db":
        with suppress(sqlite3.Error), closing(sqlite3.connect(file)) as known:
            known.execute("UPDATE alembic_version SET version_num = 'v9.9.9'")
            known.execute("UPDATE version_info SET schema_version = 99")
            known.commit()
        return
    text = file.read_text(errors="replace") if file.is_file() else ""
    _removed(file)
    later = (
        text.replace("format: 1", "format: 99")
        .replace('"name"', '"title"')
        .replace('"config"', '"settings"')
    )
    file.write_text(later.replace('"loader"', '"reader"').replace('"device"', '"place"'))


def _sparse(file: Path, _outside: Path) -> None:
    _removed(file)
    with file.open("wb") as made:
        made.truncate(_SPARSE)


def _gone(file: Path, _outside: Path) -> None:
    _removed(file)


def _unreadable(file: Path, _outside: Path) -> None:
    if not file.exists():
        file.write_bytes(b"")
    file.chmod(0)


DAMAGES: Mapping[str, Callable[[Path, Path], None]] = {
    "emptied": _written(lambda _: b""),
    "cut to 1 byte": _written(lambda before: before[:1]),
    **{f"cut to {share:.0%}": _cut(share) for share in (0.3, 0.7, 0.99)},
    **{f"bits flipped {seed}": _flipped(seed) for seed in range(1, 5)},
    "other text": _written(lambda _: _NOT_OURS),
    "noise": _written(lambda _: random.Random(7).randbytes(5000)),
    "deep": _written(lambda _: b"[" * 200_000),
    "pickle": _pickled,
    "other version": _other_version,
    "doubled": _written(lambda before: before + before),
    "sparse": _sparse,
    "removed": _gone,
    "unreadable": _unreadable,
}
"""By name: damages a file in place; what it needs outside the run folder lies in the second path."""
NOT_SEEN = frozenset(
    {"removed", "doubled", *(name for name in DAMAGES if name.startswith(("bits", "cut")))}
)
"""What may leave a file that is whole in itself: nobody must see it, though nobody may fall over it."""
ONE_OF_A_KIND = (
    *(
        "emptied",
        "cut to 70%",
        "bits flipped 1",
        "other text",
        "pickle",
        "other version",
        "removed",
        "unreadable",
    ),
)
"""What is tried of a search that has not ended, where all are of one that has."""
OF_A_FOLDER = ("removed", "other text")
"""What may have happened to a folder."""
