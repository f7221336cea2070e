"""Parse YAML into plain data, with the place of every value for error messages.

Comes in: a file, or the text of a --set override. Goes out: a Document of dicts, lists and plain
values with a place for each, and the problems that show without a schema (duplicate keys, tags).
Scalars follow the core schema of YAML 1.2: `1e-3` is a number, `yes` is a text and `010` is ten.
Source: YAML 1.2.2, section 10.3.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import ConfigError
from autotune.protocol.disk import read_some

# Our conventions: far above any configuration, far below what takes long to read.
_MAX_BYTES = 256 * 1024
_MAX_NODES = 10_000  # aliases counted as often as they are used: what "a billion laughs" expands to
_MAX_DEPTH = 32
_MAX_INT = 2**63
_LONGEST_WAIT_S = 5.0  # for a pipe's writer: our convention
_TAG = "tag:yaml.org,2002:"


def _int(text: str) -> int:
    # 64 bits have 64 binary digits, a sign and a prefix at the most; more would make int() slow, or
    # fail.
    value = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if len(text) <= 66 else _MAX_INT
    if abs(value) >= _MAX_INT:
        raise ValueError(f"a whole number must lie within 64 bits, but got {text[:30]}")
    return value


def _float(text: str) -> float:
    return float(text.replace(".", "") if text[-1].isalpha() else text)  # ".inf", ".nan"


_Convert = Callable[[str], str | int | float | bool | None]
_SCALARS: dict[str, tuple[re.Pattern[str], _Convert]] = {
    "str": (re.compile(r"(?s:.*)"), str),
    "null": (re.compile(r"~|null|Null|NULL|"), lambda _: None),
    "bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    "int": (re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), _int),
    "float": (
        re.compile(
            r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
        ),
        _float,
    ),
}
"""Scalars of the core schema by tag: their syntax and conversion."""

KeyPath = tuple[str | int, ...]
"""Keys and indices that lead to a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a value: a file's line and column (from 1), or a --set option (line 0)."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


_Locate = Callable[[yaml.Mark], Place]
"""Function that turns a mark of the parser into a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A broken rule and its place."""

    text: str
    path: KeyPath = ()
    place: Place | None = None

    def __str__(self) -> str:
        dotted = "".join(
            f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path
        ).removeprefix(".")
        line = ": ".join(str(part) for part in (self.place, dotted, self.text) if part)
        # Keys and values are the user's text: whatever they hold, a problem is one line that a
        # terminal can show.
        return "".join(
            char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(line.split())
        )


@dataclass(slots=True, kw_only=True)
class Document:
    """Plain data, the place of each key and item, and the problems found while parsing."""

    root: Place
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)
    """Paths of values with a problem; the data has None there."""

    def placed(self, problems: Iterable[Problem], below: KeyPath = ()) -> list[Problem]:
        """Add the places to problems below a path: that of the key, or of the nearest parent.

        Problems of values that have one already are left out.
        """
        found = []
        for problem in problems:
            path = (*below, *problem.path)
            if path not in self.broken:
                parents = (path[:length] for length in range(len(path), 0, -1))
                known = (self.places[parent] for parent in parents if parent in self.places)
                found.append(replace(problem, path=path, place=next(known, self.root)))
        return found

    def build(self, node: yaml.Node, path: KeyPath, locate: _Locate) -> Any:
        """Return the plain data of a node, and record the place of each key and item."""
        place = self.places.setdefault(path, locate(node.start_mark))
        if len(self.places) > _MAX_NODES:
            raise _refusal(f"must hold at most {_MAX_NODES} values, aliases expanded", place)
        if len(path) > _MAX_DEPTH:
            raise _refusal(
                f"values are nested deeper than {_MAX_DEPTH} levels, aliases expanded", place
            )
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, path, locate)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [
                self.build(item, (*path, index), locate) for index, item in enumerate(node.value)
            ]
        try:
            return _scalar(node)
        except ValueError as error:
            self.problems.append(Problem(text=str(error), path=path, place=place))
            self.broken.add(path)
            return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, locate: _Locate) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            place = locate(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{_TAG}str":
                text = f"a key must be a text, but got {_source_of(key_node)}"
                self.problems.append(Problem(text=text, path=path, place=place))
            elif key in found:
                text = f"is given twice, first at {self.places[*path, key]}; keep one"
                self.problems.append(Problem(text=text, path=(*path, key), place=place))
            else:
                self.places[*path, key] = place
                found[key] = self.build(value_node, (*path, key), locate)
        return found


def read_document(path: Path) -> Document:
    """Read a YAML file.

    Raises:
        ConfigError: The file can't be read, is not YAML, is far too large, or has no mapping.
    """
    return parse_document(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Read the text of a configuration file.

    Raises:
        ConfigError: It can't be read, is not text, or is far too large.
    """
    place = Place(source=str(path))
    try:
        raw = read_some(path, _MAX_BYTES + 1, _LONGEST_WAIT_S)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _refusal(f"can't be read ({reason}); give a readable file", place) from None
    if raw is None:
        raise _refusal(
            f"nothing has come out of it for {_LONGEST_WAIT_S:.0f} s; give a file", place
        )
    if len(raw) > _MAX_BYTES:
        raise _refusal(
            f"must be at most {_MAX_BYTES // 1024} KiB, but is larger; is it a configuration?",
            place,
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refusal(
            f"must be UTF-8 text, but byte {error.start} is not; save it as UTF-8", place
        ) from None


def apply_override(document: Document, override: str) -> None:
    """Set `a.b=c` in a document; c is YAML, and missing mappings are created.

    Raises:
        ConfigError: The override is malformed.
    """
    place = Place(source=f"--set {override}")
    dotted, equals, text = override.partition("=")
    path = tuple(dotted.strip().split("."))
    if not equals or not all(path):
        raise _refusal("must have the form key.key=value, such as budget.n_trials=10", place)
    parent: Any = document.data
    for depth, key in enumerate(path[:-1], start=1):
        if parent.get(key) is None:
            parent[key] = {}
            document.places[path[:depth]] = place
        parent = parent[key]
        if not isinstance(parent, dict):
            raise _refusal(
                f"must be a mapping to be set in part, but is a {_kind(parent)}",
                place,
                path[:depth],
            )
    for below in [below for below in document.places if below[: len(path)] == path]:
        del document.places[below]
    document.places[path] = place
    node = _compose(text, lambda _: place)
    parent[path[-1]] = None if node is None else document.build(node, path, lambda _: place)


def parse_document(text: str, source: str) -> Document:
    """Parse a text whose top level is a mapping.

    Raises:
        ConfigError: It is not YAML, or has no mapping.
    """

    def locate(mark: yaml.Mark) -> Place:
        return Place(source=source, line=mark.line + 1, column=mark.column + 1)

    node = _compose(text, locate)
    if node is None:
        raise _refusal(
            "is empty; `autotune init` writes a configuration to start from", Place(source=source)
        )
    document = Document(root=locate(node.start_mark))
    data = document.build(node, (), locate)
    if not isinstance(data, dict):
        raise _refusal(
            f"the top level must be a mapping (key: value), but is a {_kind(data)}", document.root
        )
    document.data = data
    return document


class _Loader(yaml.SafeLoader):
    """A SafeLoader with YAML 1.2's plain scalars."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 -- pyyaml's own attribute, filled below


for _name, (_pattern, _) in _SCALARS.items():
    if _name != "str":
        _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern.pattern})$"), None)


def _compose(text: str, locate: _Locate) -> yaml.Node | None:
    """Parse a text into nodes, aliases not yet expanded."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position].split("\n")
        place = locate(yaml.Mark("", 0, len(before) - 1, len(before[-1]), None, 0))
        character = f"U+{ord(text[error.position]):04X}"
        raise _refusal(f"not valid YAML: the character {character} is not allowed", place) from None
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        detail = " ".join(filter(None, (error.problem, error.context and f"({error.context})")))
        remedy = "; indent with spaces, not tabs" if "\\t" in detail else ""
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        raise _refusal(f"not valid YAML: {detail}{remedy}", locate(mark)) from None
    except (ValueError, OverflowError):  # pyyaml passes "\U00110000" to chr() unchecked
        raise _refusal(
            "not valid YAML: an escape names no character", locate(loader.get_mark())
        ) from None
    except RecursionError:
        raise _refusal(
            f"values are nested deeper than {_MAX_DEPTH} levels", locate(loader.get_mark())
        ) from None
    finally:
        loader.dispose()


def _refusal(text: str, place: Place, path: KeyPath = ()) -> ConfigError:
    return ConfigError(str(Problem(text=text, path=path, place=place)))


def _scalar(node: yaml.Node) -> str | int | float | bool | None:
    pattern, convert = _SCALARS.get(node.tag.removeprefix(_TAG), (None, str))
    if pattern is None or not isinstance(node.value, str) or not pattern.fullmatch(node.value):
        raise ValueError(
            f"must be plain data, but got {_source_of(node)} with the tag {node.tag}; leave the "
            f"tag out"
        )
    return convert(node.value)


def _source_of(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value if len(node.value) <= 60 else f"{node.value[:57]}...")
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


def _kind(value: object) -> str:
    return "list" if isinstance(value, list) else "single value"
