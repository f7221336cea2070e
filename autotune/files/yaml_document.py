"""YAML text to plain data in which every value knows its place.

Comes in: a file, or the text of a --set override. Goes out: a Document of dicts, lists and plain values with a place
for each, and the problems that YAML alone can tell (duplicate keys, tags). Scalars follow the core schema of YAML 1.2:
`1e-3` is a number, `yes` and `010` are what they look like. Source: YAML 1.2.2, section 10.3.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import ConfigError

__all__ = ["Document", "KeyPath", "Place", "Problem", "apply_override", "parse_document", "read_document"]

_MAX_BYTES = 256 * 1024
_MAX_NODES = 10_000  # aliases counted as often as they are used: what "a billion laughs" expands to
_MAX_DEPTH = 32
_MAX_INT = 2**63
_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

KeyPath = tuple[str | int, ...]
"""The keys and indices that lead to a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a value was written: a file's line and column (from 1), or a --set option (no line)."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A rule that is broken, and where."""

    text: str
    path: KeyPath = ()
    place: Place | None = None

    def __str__(self) -> str:
        dotted = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path).removeprefix(".")
        line = ": ".join(str(part) for part in (self.place, dotted, self.text) if part)
        # Keys and values are the user's text: whatever they hold, a problem is one line that a terminal can show.
        return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in " ".join(line.split()))


@dataclass(slots=True, kw_only=True)
class Document:
    """Plain data, the place of each value and key, and the problems found on the way."""

    data: dict[str, Any]
    root: Place
    values: dict[KeyPath, Place] = field(default_factory=dict)
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)
    """Values that are already told as a problem and stand for nothing."""

    def problem(self, text: str, path: KeyPath, *, at_key: bool = False) -> Problem:
        """A problem with a value (or its key), placed there or at the nearest parent that has a place."""
        if at_key and path in self.keys:
            return Problem(text=text, path=path, place=self.keys[path])
        ends = range(len(path), 0, -1)
        return Problem(
            text=text,
            path=path,
            place=next((self.values[path[:n]] for n in ends if path[:n] in self.values), self.root),
        )


def read_document(path: Path) -> Document:
    """Read a YAML file.

    Raises:
        ConfigError: the file can't be read, is no YAML, is far too large, or holds no mapping.
    """
    place = Place(source=str(path))
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise _refusal("there is no such file; check the path", place) from None
    except IsADirectoryError:
        raise _refusal("is a folder; give a YAML file", place) from None
    except UnicodeDecodeError as error:
        if len(raw) <= _MAX_BYTES:
            raise _refusal(f"must be UTF-8 text, but byte {error.start} is not; save it as UTF-8", place) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refusal(f"can't be read ({reason})", place) from None
    if len(raw) > _MAX_BYTES:
        raise _refusal(f"must be at most {_MAX_BYTES // 1024} KiB, but is larger; is it a configuration?", place)
    return parse_document(text, str(path))


def parse_document(text: str, source: str) -> Document:
    """Parse YAML text whose top level is a mapping; `source` names it in messages."""
    node = _compose(text, lambda line, column: Place(source=source, line=line + 1, column=column + 1))
    if node is None:
        raise _refusal("is empty; `autotune init` writes a configuration to start from", Place(source=source))
    document = Document(data={}, root=_place(source, node.start_mark))
    data = _Builder(document, lambda mark: _place(source, mark)).build(node, ())
    if not isinstance(data, dict):
        raise _refusal(f"the top level must be a mapping (key: value), but is a {_kind(data)}", document.root)
    document.data = data
    return document


def apply_override(document: Document, override: str) -> None:
    """Put `a.b=c` into a document; c is YAML, missing mappings are created.

    Raises:
        ConfigError: the override is malformed.
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
            document.keys[path[:depth]] = document.values[path[:depth]] = place
        parent = parent[key]
        if not isinstance(parent, dict):
            raise _refusal(f"must be a mapping to be set in part, but is a {_kind(parent)}", place, path[:depth])
    for places in (document.values, document.keys):
        for old in [old for old in places if old[: len(path)] == path]:
            del places[old]
    node = _compose(text, lambda _line, _column: place)
    document.keys[path] = document.values[path] = place
    parent[path[-1]] = None if node is None else _Builder(document, lambda _mark: place).build(node, path)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's plain scalars and an end to nesting."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 -- pyyaml's own attribute, filled below
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            problem = f"values are nested deeper than {_MAX_DEPTH} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _name, _pattern in (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$")),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")),
    ("int", re.compile(rf"^(?:{_INT.pattern})$")),
    ("float", re.compile(rf"^(?:{_FLOAT.pattern}|{_SPECIAL.pattern})$")),
):
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, None)


def _compose(text: str, place: Callable[[int, int], Place]) -> yaml.Node | None:
    """The node tree of a text, aliases not yet expanded."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position].split("\n")
        at = place(len(before) - 1, len(before[-1]))
        text = f"not valid YAML: the character U+{ord(text[error.position]):04X} is not allowed"
        raise _refusal(text, at) from None
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = place(mark.line, mark.column) if mark else place(loader.line, loader.column)
        detail = f"{error.problem or error.context}" + (
            f" ({error.context})" if error.problem and error.context else ""
        )
        remedy = "; indent with spaces, not tabs" if "\\t" in detail else ""
        raise _refusal(f"not valid YAML: {detail}{remedy}", at) from None
    except (ValueError, OverflowError):  # pyyaml hands an escape such as "\U00110000" to chr() unchecked
        at = place(loader.line, loader.column)
        raise _refusal("not valid YAML: an escape names no character", at) from None
    finally:
        loader.dispose()


def _refusal(text: str, place: Place, path: KeyPath = ()) -> ConfigError:
    return ConfigError(str(Problem(text=text, path=path, place=place)))


def _place(source: str, mark: Any) -> Place:
    return Place(source=source, line=mark.line + 1, column=mark.column + 1)


class _Builder:
    """Turns nodes into plain data and notes the place of each in the document."""

    def __init__(self, document: Document, place: Callable[[Any], Place]) -> None:
        self._document = document
        self._place = place
        self._count = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        place = self._document.values[path] = self._place(node.start_mark)
        self._count += 1
        if self._count > _MAX_NODES:
            raise _refusal(f"must hold at most {_MAX_NODES} values, aliases expanded, but holds more; use fewer", place)
        if len(path) > _MAX_DEPTH:
            raise _refusal(f"values are nested deeper than {_MAX_DEPTH} levels, aliases expanded", place)
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.build(one, (*path, index)) for index, one in enumerate(node.value)]
        try:
            return _scalar(node)
        except ValueError as error:
            self._report(str(error), path)
            self._document.broken.add(path)
            return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{_TAG}str":
                text = f"a key must be a text, but got {_source_of(key_node)}"
                self._document.problems.append(Problem(text=text, path=path, place=self._place(key_node.start_mark)))
                continue
            key: str = key_node.value
            inner = (*path, key)
            place = self._place(key_node.start_mark)
            if key in found:
                text = f"is given twice, first in line {self._document.keys[inner].line}; keep one"
                self._document.problems.append(Problem(text=text, path=inner, place=place))
                continue
            self._document.keys[inner] = place
            found[key] = self.build(value_node, inner)
        return found

    def _report(self, text: str, path: KeyPath) -> None:
        self._document.problems.append(self._document.problem(text, path))


def _scalar(node: yaml.Node) -> str | int | float | bool | None:
    value = node.value
    match node.tag.removeprefix(_TAG):
        case "str" if isinstance(value, str):
            return value
        case "null" if value in {"~", "null", "Null", "NULL", ""}:
            return None
        case "bool" if str(value).lower() in {"true", "false"}:
            return bool(value.lower() == "true")
        case "int" if isinstance(value, str) and _INT.fullmatch(value):
            return _int(value)
        case "float" if isinstance(value, str) and (_FLOAT.fullmatch(value) or _SPECIAL.fullmatch(value)):
            return float(value if _FLOAT.fullmatch(value) else value.replace(".", ""))
    raise ValueError(f"must be plain data, but got {_source_of(node)} with the tag {node.tag}; leave the tag out")


def _int(text: str) -> int:
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    # More digits than 64 bits can have would make int() slow, or fail.
    value = int(text, base) if len(text) <= 66 else _MAX_INT
    if abs(value) >= _MAX_INT:
        raise ValueError(f"a whole number must lie within 64 bits, but got {text[:30]}")
    return value


def _source_of(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value if len(node.value) <= 60 else f"{node.value[:57]}...")
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


def _kind(value: object) -> str:
    return "list" if isinstance(value, list) else "single value"
