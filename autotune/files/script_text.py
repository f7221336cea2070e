"""The text of a training script: read, given other arguments in one call, and compared.

Comes in: the script's path, a call in it, arguments to set. Goes out: the changed text, all else in it as it was, and
the unified diff. What was written is parsed again: it is handed on only if exactly these arguments differ.
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
from itertools import takewhile
from pathlib import Path

from autotune.files.script_call import LoaderCall, numbered_call, standing, value_of

__all__ = ["Script", "read_script", "script_diff", "with_arguments"]

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""A line as Python counts them: str.splitlines knows more ends."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edit:
    """Text to stand in place of what lies between two offsets."""

    start: int
    end: int
    text: str


def read_script(source: Path) -> Script | str:
    """The script, or "unreadable" or "unparsable"."""
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
    """The text with these arguments of a call set, by keyword; None where the result isn't what was meant.

    An argument that is given is replaced where its value stands; one that is missing is added at the call's end.
    """
    text = _edited(script.text, _edits(script, call, changes))
    return text if _is_as_meant(script, call, text, changes) else None


def script_diff(script: Script, text: str) -> str:
    """A unified diff to a changed text, for `patch -p1` and `git apply`; bytes that are no UTF-8 are surrogates in it.

    Its path is the script's as seen from the current folder; the name alone where the script lies elsewhere.
    """
    name = _shown(script.source)
    rows = unified_diff(_rows(script.raw), _rows(text.encode(script.encoding)), _header("a", name), _header("b", name))
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)


def _edits(script: Script, call: LoaderCall, changes: Mapping[str, object]) -> Iterator[_Edit]:
    for keyword, value in changes.items():
        if keyword in call.given:
            node = standing(call, keyword)
            start = _offset(script, *_place(script, node.lineno, node.col_offset))
            end = _offset(script, *_place(script, node.end_lineno, node.end_col_offset))
            yield _Edit(start=start, end=end, text=repr(value))
    added = [f"{keyword}={value!r}" for keyword, value in changes.items() if keyword not in call.given]
    if added:
        yield from _additions(script, call.node, added)


def _additions(script: Script, call: ast.Call, added: Sequence[str]) -> Iterator[_Edit]:
    """New arguments at the end of a call, in the form of those that it has."""
    last = _last_token(script, call)
    row, column = last.end
    here = _offset(script, row, column)
    closing = "," if last.string == "," else ""
    indent = _indent(script, call)
    if indent is None:
        opening = {",": " ", "(": ""}.get(last.string, ", ")
        yield _Edit(start=here, end=here, text=f"{opening}{', '.join(added)}{closing}")
        return
    first = script.lines[call.lineno - 1]
    line_end = first[len(first.rstrip("\r\n")) :]
    yield _Edit(start=here, end=here, text="" if closing else ",")
    if row != call.end_lineno:  # a comment may follow the last argument
        here = _offset(script, row, len(script.lines[row - 1].rstrip("\r\n")))
    rows = f",{line_end}".join(indent + argument for argument in added)
    yield _Edit(start=here, end=here, text=f"{line_end}{rows}{closing}")


def _last_token(script: Script, call: ast.Call) -> tokenize.TokenInfo:
    """What stands before the parenthesis that ends a call."""
    end = _place(script, call.end_lineno, call.end_col_offset)
    lines = iter([line.rstrip("\r\n") + "\n" for line in script.lines])
    tokens = tokenize.generate_tokens(lambda: next(lines, ""))
    before = takewhile(lambda token: token.end < end, tokens)
    *_, last = (token for token in before if token.type not in {tokenize.COMMENT, tokenize.NL})
    return last


def _indent(script: Script, call: ast.Call) -> str | None:
    """What stands before an argument that has a line of its own, the last of them; None where none has."""
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    places = [_place(script, argument.lineno, argument.col_offset) for argument in arguments]
    for row, column in sorted(places, reverse=True):
        before = script.lines[row - 1][:column]
        if row > (call.func.end_lineno or 0) and not before.strip(" \t\f("):
            return before[: len(before) - len(before.lstrip())]
    return None


def _place(script: Script, row: int | None, byte: int | None) -> tuple[int, int]:
    """A line and a character of it; ast counts bytes."""
    assert row is not None, "what was parsed has its places"  # noqa: S101 -- a bug of ours
    return row, len(script.lines[row - 1].encode()[:byte].decode())


def _offset(script: Script, row: int, column: int) -> int:
    return sum(map(len, script.lines[: row - 1])) + column


def _edited(text: str, edits: Iterable[_Edit]) -> str:
    pieces = []
    done = 0
    for edit in sorted(edits, key=lambda edit: edit.start):  # stable: of two at one place the first stays the first
        pieces += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join([*pieces, text[done:]])


def _is_as_meant(script: Script, call: LoaderCall, text: str, changes: Mapping[str, object]) -> bool:
    """Whether the text, parsed again, is the script with these arguments of this call changed, and nothing else."""
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
    """All that a tree holds, some of its nodes exchanged; ast.dump would recurse."""
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
    """Lines as git and patch part them: at line feeds alone."""
    return re.findall(r"[^\n]*\n|[^\n]+", raw.decode("utf-8", "surrogateescape"))


def _header(side: str, name: str) -> str:
    """A name as git writes it: with a tab behind one that has blanks, and in quotes where it has worse."""
    path = f"{side}/{name}"
    if any(char in '"\\' or ord(char) < ord(" ") for char in path):
        escaped = (
            f"\\{byte:03o}" if chr(byte) in '"\\' or not 32 <= byte < 127 else chr(byte) for byte in os.fsencode(path)
        )
        return f'"{"".join(escaped)}"'
    return f"{path}\t" if " " in path else path


def _shown(source: Path) -> str:
    """The script as seen from the current folder; its name alone where it lies elsewhere."""
    real = source.resolve()
    here = Path.cwd()
    return real.relative_to(here).as_posix() if real.is_relative_to(here) else real.name
