"""Reads a training script, sets arguments of one call in its text, all else left as it was, and makes the unified diff.

The changed text is parsed again, and returned only if exactly these arguments differ.
"""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from operator import itemgetter
from pathlib import Path

from autotune.files.script_call import LoaderCall, numbered_call, standing, value_of

__all__ = ["Script", "read_script", "script_diff", "with_arguments"]

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""A line as Python counts them: str.splitlines knows more ends."""
_ROW_END = re.compile(r"[\r\n]")
_SIGN = re.compile(r"#[^\r\n]*|([(),])")
_Edit = tuple[int, int, str]
"""Text to stand in place of what lies between two offsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script that was read."""

    source: Path
    raw: bytes
    encoding: str
    text: str
    lines: Sequence[str]
    """With their ends."""
    tree: ast.Module


def read_script(source: Path) -> Script | str:
    """Return the script, or "unreadable" or "unparsable"."""
    try:
        raw = source.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
        is_kept = text.encode(encoding) == raw
    except (OSError, SyntaxError, ValueError):
        return "unreadable"
    tree = _parsed(text)
    if not is_kept or tree is None:
        return "unparsable" if is_kept else "unreadable"
    return Script(source=source, raw=raw, encoding=encoding, text=text, lines=_LINE.findall(text), tree=tree)


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of invalid escapes, which are the script's
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def with_arguments(script: Script, call: LoaderCall, changes: Mapping[str, object]) -> str | None:
    """Return the text with these arguments of a call set, by keyword; None where the result isn't what was meant.

    An argument that is given is replaced where its value stands; one that is missing is added at the call's end.
    """
    text = _edited(script.text, _edits(script, call, changes))
    return text if _is_as_meant(script, call, text, changes) else None


def script_diff(script: Script, text: str) -> str:
    """Return a unified diff to a changed text, for `patch -p1` and `git apply`.

    Bytes that are no UTF-8 are surrogates in it. Its path is the script's as seen from the current folder; the name
    alone where the script lies elsewhere.
    """
    name = _shown(script.source)
    rows = unified_diff(_rows(script.raw), _rows(text.encode(script.encoding)), _header("a", name), _header("b", name))
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)


def _edits(script: Script, call: LoaderCall, changes: Mapping[str, object]) -> Iterator[_Edit]:
    for keyword, value in changes.items():
        if keyword in call.given:
            node = standing(call, keyword)
            yield _offset(script, node.lineno, node.col_offset), _end(script, node), repr(value)
    added = [f"{keyword}={value!r}" for keyword, value in changes.items() if keyword not in call.given]
    if added:
        yield from _additions(script, call.node, added)


def _additions(script: Script, call: ast.Call, added: Sequence[str]) -> Iterator[_Edit]:
    """Yield new arguments at the end of a call, in the form of those that it has."""
    # What lies between the last argument and the parenthesis that ends the call holds no string.
    here, end = max(_end(script, node) for node in (call.func, *_arguments(call))), _end(script, call) - 1
    signs = [sign for sign in _SIGN.finditer(script.text, here, end) if sign[1]]
    last = signs[-1][1] if signs else ""
    if signs:
        here = signs[-1].end()
    closing = "," if last == "," else ""
    indent = _indent(script, call)
    if indent is None:
        opening = {",": " ", "(": ""}.get(last, ", ")
        yield here, here, f"{opening}{', '.join(added)}{closing}"
        return
    first = script.lines[call.lineno - 1]
    line_end = first[len(first.rstrip("\r\n")) :]
    yield here, here, "" if closing else ","
    if row_end := _ROW_END.search(script.text, here, end):  # a comment may follow the last argument
        here = row_end.start()
    rows = f",{line_end}".join(indent + argument for argument in added)
    yield here, here, f"{line_end}{rows}{closing}"


def _indent(script: Script, call: ast.Call) -> str | None:
    """Return what stands before the last argument that has a line of its own; None where none has."""
    for argument in sorted(_arguments(call), key=lambda node: (node.lineno, node.col_offset), reverse=True):
        before = _before(script, argument.lineno, argument.col_offset)
        if argument.lineno > (call.func.end_lineno or 0) and not before.strip(" \t\f("):
            return before[: len(before) - len(before.lstrip())]
    return None


def _arguments(call: ast.Call) -> list[ast.expr | ast.keyword]:
    return [*call.args, *call.keywords]


def _before(script: Script, row: int, byte: int) -> str:
    """Return what stands before a place in its line; ast counts bytes."""
    return script.lines[row - 1].encode()[:byte].decode()


def _offset(script: Script, row: int, byte: int) -> int:
    return sum(map(len, script.lines[: row - 1])) + len(_before(script, row, byte))


def _end(script: Script, node: ast.expr | ast.keyword) -> int:
    assert node.end_lineno is not None, "what was parsed has its places"  # noqa: S101 -- a bug of ours
    assert node.end_col_offset is not None, "what was parsed has its places"  # noqa: S101 -- as above
    return _offset(script, node.end_lineno, node.end_col_offset)


def _edited(text: str, edits: Iterable[_Edit]) -> str:
    pieces = []
    done = 0
    for start, end, new in sorted(edits, key=itemgetter(0)):  # stable: of two at one place the first stays the first
        pieces += [text[done:start], new]
        done = end
    return "".join([*pieces, text[done:]])


def _is_as_meant(script: Script, call: LoaderCall, text: str, changes: Mapping[str, object]) -> bool:
    """Return whether the text, parsed again, is the script with these arguments of the call changed, and no others."""
    tree = _parsed(text)
    if tree is None:
        return False
    new: dict[ast.AST, ast.AST] = {
        standing(call, keyword): _expression(value) for keyword, value in changes.items() if keyword in call.given
    }
    added = [ast.keyword(word, _expression(value)) for word, value in changes.items() if word not in call.given]
    new[call.node] = ast.Call(call.node.func, call.node.args, [*call.node.keywords, *added])
    if list(_shape(script.tree, new)) != list(_shape(tree, {})):
        return False
    changed = numbered_call(tree, call.number)
    return all(repr(value_of(changed, keyword)) == repr(value) for keyword, value in changes.items())


def _expression(value: object) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def _shape(tree: ast.AST, new: Mapping[ast.AST, ast.AST]) -> Iterator[object]:
    """Yield all that a tree holds, some of its nodes exchanged; ast.dump would recurse."""
    todo = deque([tree])
    while todo:
        first = todo.popleft()
        node = new.get(first, first)
        todo.extend(ast.iter_child_nodes(node))
        yield type(node), [(name, _leaf(value)) for name, value in ast.iter_fields(node)]


def _leaf(value: object) -> object:
    if isinstance(value, list):
        return [_leaf(item) for item in value]
    return ast.AST if isinstance(value, ast.AST) else (type(value), value)


def _rows(raw: bytes) -> list[str]:
    """Split lines as git and patch do: at line feeds alone."""
    return re.findall(r"[^\n]*\n|[^\n]+", raw.decode("utf-8", "surrogateescape"))


def _header(side: str, name: str) -> str:
    """Return a name as git writes it: with a tab behind one that has blanks, and in quotes where it has worse."""
    path = f"{side}/{name}"
    if any(char in '"\\' or ord(char) < ord(" ") for char in path):
        escaped = (
            f"\\{byte:03o}" if chr(byte) in '"\\' or not 32 <= byte < 127 else chr(byte) for byte in os.fsencode(path)
        )
        return f'"{"".join(escaped)}"'
    return f"{path}\t" if " " in path else path


def _shown(source: Path) -> str:
    """Return the script as seen from the current folder; its name alone where it lies elsewhere."""
    real = source.resolve()
    here = Path.cwd()
    return real.relative_to(here).as_posix() if real.is_relative_to(here) else real.name
