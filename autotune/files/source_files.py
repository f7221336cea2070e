"""The user's own code behind a reference: its file or module, and the modules that this imports.

Comes in: a Ref. Goes out: a digest of all these files. They are read, never run; code of Python and of installed
packages is left to its name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from autotune.records.object_identity import LIBRARY_FOLDERS
from autotune.settings.workload import Ref

__all__ = ["SourceDigest", "is_file", "source_digest"]

# Our conventions: far above a training script and its modules, and read in about a second.
_MOST_FILES = 500
_MOST_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDigest:
    """The files behind a reference."""

    digest: str
    """Changes with any of the files that were read; "" where the reference leads to no file of the user's."""
    is_complete: bool
    """No file was left out for there being too many."""


def source_digest(ref: Ref) -> SourceDigest:
    """Read the code that a reference leads to."""
    place = ref.target.rpartition(":")[0]
    roots = [Path(folder) for folder in dict.fromkeys((*ref.folders, *sys.path))]
    if place.endswith(".py"):
        paths = [path for folder in ref.folders if is_file(path := Path(folder, place))][:1]
        roots = [*(path.resolve().parent for path in paths), *roots]  # the worker imports a file's neighbours too
    else:
        paths = list(_modules(roots, place))
    whole, seen = sha256(), list[Path](paths)
    for path in seen:  # grows meanwhile
        content = _content(path)
        whole.update(f"{path.name}\0{len(content)}\0".encode() + content)
        if len(seen) < _MOST_FILES:
            seen += [found for found in _imported(content, path, roots) if found not in seen]
    return SourceDigest(digest=whole.hexdigest()[:12] if paths else "", is_complete=len(seen) < _MOST_FILES)


def _imported(content: bytes, path: Path, roots: list[Path]) -> Iterator[Path]:
    """The user's files that a file imports, anywhere in it."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError, RecursionError):  # not Python: a trial will say so
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _modules(roots, alias.name)
        elif isinstance(node, ast.ImportFrom):
            places = [path.parents[min(node.level, len(path.parents)) - 1]] if node.level else roots
            for alias in node.names:
                yield from _modules(places, ".".join(filter(None, (node.module, alias.name))))


def _modules(roots: list[Path], dotted: str) -> Iterator[Path]:
    """The user's files of a module and of the packages that it is in, below the first root that has them."""
    names = dotted.split(".")
    for root in roots:
        stems = [root.joinpath(*names[:length]) for length in range(1, len(names) + 1)]
        found = [file for stem in stems for file in (Path(f"{stem}.py"), stem / "__init__.py") if is_file(file)]
        if found:
            is_library = any(found[0].is_relative_to(folder) for folder in LIBRARY_FOLDERS)
            yield from () if is_library else found
            return


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:  # gone, or not to be read: a trial will say so
        return b""


def is_file(path: Path) -> bool:
    """Whether there is such a file; no where no file system takes the name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
