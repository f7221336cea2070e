"""Write recommended.patch: a diff that sets the recommended loader settings in the user's DataLoader call.

In: the script, the line that makes its training loader, the wanted settings. Out: a unified diff
for the user to review. The script is read and never written.

Only literals are changed: a literal argument, a missing argument whose default is known, or a
constant of the module that only this call reads.
"""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import takewhile
from operator import itemgetter
from pathlib import Path

from autotune.config.training_config import (
    LOADER_ARGUMENTS,
    NEUTRAL_WITHOUT_WORKERS,
    TORCH_PREFETCH_FACTOR,
    TrainingConfig,
)
from autotune.settings_table import SETTINGS

# Editing: set arguments of one call in a script's text, and make the diff. The changed text is
# parsed again, and used only if exactly these arguments differ.


_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""A line as Python counts them; str.splitlines splits at more characters."""
_ROW_END = re.compile(r"[\r\n]")
_SIGN = re.compile(r"#[^\r\n]*|([(),])")
_Edit = tuple[int, int, str]
"""Start offset, end offset, and the text that replaces what is between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A parsed script with its exact text."""

    source: Path
    raw: bytes
    encoding: str
    text: str
    lines: Sequence[str]
    """Lines of the text, with their line ends."""
    tree: ast.Module


def _read_script(source: Path) -> Script | None:
    """Return the script; None if it can't be read or parsed."""
    try:
        raw = source.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
        is_kept = text.encode(encoding) == raw
    except (OSError, SyntaxError, ValueError):
        return None
    tree = _parsed(text) if is_kept else None
    if tree is None:
        return None
    return Script(
        source=source, raw=raw, encoding=encoding, text=text, lines=_LINE.findall(text), tree=tree
    )


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as for invalid escapes in the script
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _diff(script: Script, text: str) -> bytes:
    """Return the unified diff to a changed text.

    The path in it is relative to the current folder, or the file name alone if the script is
    outside of it.
    """
    real = script.source.resolve()
    here = Path.cwd()
    name = real.relative_to(here).as_posix() if real.is_relative_to(here) else real.name
    rows = unified_diff(
        _rows(script.raw),
        _rows(text.encode(script.encoding)),
        _header("a", name),
        _header("b", name),
    )
    diff = ""
    for row in rows:
        diff += row
        if not row.endswith("\n"):
            diff += "\n\\ No newline at end of file\n"
    return diff.encode("utf-8", "surrogateescape")


def _edits(script: Script, call: LoaderCall, changes: Mapping[str, object]) -> Iterator[_Edit]:
    """Yield the edits that change arguments of a call.

    An argument that the call has is replaced where its value is written; a missing one is added at
    the end of the call.
    """
    added = []
    for keyword, value in changes.items():
        if keyword in call.given:
            node = _standing(call, keyword)
            yield _offset(script, node.lineno, node.col_offset), _end(script, node), repr(value)
        else:
            added.append(f"{keyword}={value!r}")
    if added:
        yield from _additions(script, call.node, added)


def _additions(script: Script, call: ast.Call, added: Sequence[str]) -> Iterator[_Edit]:
    """Yield the edits that add arguments at the end of a call, in the layout of its own."""
    # Find the last sign, "(" or ",", behind the last argument. No string can be there.
    here = max(_end(script, node) for node in (call.func, *_arguments(call)))
    end = _end(script, call) - 1
    signs = [sign for sign in _SIGN.finditer(script.text, here, end) if sign[1]]
    last = signs[-1][1] if signs else ""
    if signs:
        here = signs[-1].end()
    closing = "," if last == "," else ""
    indent = _indent(script, call)
    # All arguments are on one line: go on there.
    if indent is None:
        opening = {",": " ", "(": ""}.get(last, ", ")
        yield here, here, f"{opening}{', '.join(added)}{closing}"
        return
    # One argument per line: add lines, after a comment that may follow the last argument.
    first = script.lines[call.lineno - 1]
    line_end = first[len(first.rstrip("\r\n")) :]
    yield here, here, "" if closing else ","
    if row_end := _ROW_END.search(script.text, here, end):
        here = row_end.start()
    rows = f",{line_end}".join(indent + argument for argument in added)
    yield here, here, f"{line_end}{rows}{closing}"


def _indent(script: Script, call: ast.Call) -> str | None:
    """Return the indentation of the last argument that starts a line; None if none does."""
    arguments = sorted(_arguments(call), key=lambda node: (node.lineno, node.col_offset))
    for argument in reversed(arguments):
        before = _before(script, argument.lineno, argument.col_offset)
        if argument.lineno > (call.func.end_lineno or 0) and not before.strip(" \t\f("):
            return before[: len(before) - len(before.lstrip())]
    return None


def _arguments(call: ast.Call) -> list[ast.expr | ast.keyword]:
    return [*call.args, *call.keywords]


def _before(script: Script, row: int, byte: int) -> str:
    """Return the text before a place in its line; ast counts in bytes."""
    return script.lines[row - 1].encode()[:byte].decode()


def _offset(script: Script, row: int, byte: int) -> int:
    return sum(map(len, script.lines[: row - 1])) + len(_before(script, row, byte))


def _end(script: Script, node: ast.expr | ast.keyword) -> int:
    assert node.end_lineno is not None, "parsed nodes have positions"  # noqa: S101 -- a bug of ours
    assert node.end_col_offset is not None, "parsed nodes have positions"  # noqa: S101 -- as above
    return _offset(script, node.end_lineno, node.end_col_offset)


def _edited(text: str, edits: Iterable[_Edit]) -> str:
    pieces = []
    done = 0
    # The sort is stable: two edits at one place keep their order.
    for start, end, new in sorted(edits, key=itemgetter(0)):
        pieces += [text[done:start], new]
        done = end
    return "".join([*pieces, text[done:]])


def _is_as_meant(
    script: Script, call: LoaderCall, text: str, changes: Mapping[str, object]
) -> bool:
    """Return True if the text parses to the script with exactly these arguments of the call changed."""
    tree = _parsed(text)
    if tree is None:
        return False
    # Compare with the old tree, in which the changed nodes are exchanged.
    new: dict[ast.AST, ast.AST] = {}
    added = []
    for keyword, value in changes.items():
        if keyword in call.given:
            new[_standing(call, keyword)] = _expression(value)
        else:
            added.append(ast.keyword(keyword, _expression(value)))
    new[call.node] = ast.Call(call.node.func, call.node.args, [*call.node.keywords, *added])
    if list(_shape(script.tree, new)) != list(_shape(tree, {})):
        return False
    # The loader must get the values, also through constants.
    number = _calls(script.tree).index(call.node)
    changed = _loader_call(_calls(tree)[number], _names(tree))
    return all(
        repr(_value_of(changed, keyword)) == repr(value) for keyword, value in changes.items()
    )


def _expression(value: object) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def _shape(tree: ast.AST, new: Mapping[ast.AST, ast.AST]) -> Iterator[object]:
    """Yield the contents of a tree with some nodes exchanged, without recursion, unlike ast.dump."""
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
    """Split into lines as git and patch do: at line feeds only."""
    return re.findall(r"[^\n]*\n|[^\n]+", raw.decode("utf-8", "surrogateescape"))


def _header(side: str, name: str) -> str:
    """Return a path as git writes it: followed by a tab if it has spaces, quoted if it has control characters."""
    path = f"{side}/{name}"
    if any(char in '"\\' or ord(char) < ord(" ") for char in path):
        escaped = ""
        for byte in os.fsencode(path):
            is_plain = 32 <= byte < 127 and chr(byte) not in '"\\'
            escaped += chr(byte) if is_plain else f"\\{byte:03o}"
        return f'"{escaped}"'
    return f"{path}\t" if " " in path else path


# Finding the call that makes the loader, and the values of its arguments. Names are followed
# through imports, plain subclasses and constants of the module.


_UNKNOWN = object()
"""Value of an argument that can't be read from the script."""

_PARAMETERS = (
    "dataset",
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
)
"""Positional parameters of torch.utils.data.DataLoader, and of torchdata's StatefulDataLoader."""
_DEFAULTS: dict[str, object] = {
    "batch_size": 1,
    "batch_sampler": None,
    "timeout": 0,
    **{setting.name: setting.neutral for setting in SETTINGS if setting.is_loader_argument},
}
_LOADERS = frozenset(
    {
        "torch.utils.data.DataLoader",
        "torch.utils.data.dataloader.DataLoader",
        "torchdata.stateful_dataloader.StatefulDataLoader",
        "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader",
    }
)
"""Full names of torch's loader classes."""
_DYNAMIC = frozenset({"eval", "exec", "globals", "locals"})
"""Functions by which a script may set or read its constants by their names."""
_OTHER_NAME = 3
_NO_LOADER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """The names that a script defines, with their meanings."""

    bound: Counter[str]
    """Number of times that each is assigned, in any scope."""
    read: Counter[str]
    """Number of times that each is read, or is the text of a string."""
    imports: Mapping[str, Sequence[str]]
    """Full names of the objects that imports bind to each."""
    bases: Mapping[str, Sequence[str]]
    """The base of each class that has a single one and no constructor, as the script names it."""
    constants: Mapping[str, ast.expr]
    """Literals of the names that the module assigns once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCall:
    """The call that makes the loader."""

    node: ast.Call
    is_torch: bool
    """True if it calls torch's class; otherwise only its keyword arguments are known."""
    is_starred: bool
    """True if `*` or `**` in the call may carry arguments."""
    given: Mapping[str, ast.expr]
    """Its arguments, by keyword."""
    names: _Names


def _find_call(tree: ast.Module, line: int) -> LoaderCall | None:
    """Return the call at a line that makes the loader; None if there is none, or more than one.

    Calls that look like a loader's win; among these, those that begin at the line, as Python
    reports it; then those with likelier names; then the innermost.
    """
    names = _names(tree)
    ranks: dict[ast.Call, tuple[bool, bool, int]] = {}
    for call in _calls(tree):
        if not call.lineno <= line <= (call.end_lineno or 0):
            continue
        rank = _unlikeness(call, names)
        if rank < _NO_LOADER:
            is_other_line = line not in {call.lineno, call.func.end_lineno}
            ranks[call] = (rank == _OTHER_NAME, is_other_line, rank)
    best = min(ranks.values(), default=None)
    pool = {call for call, rank in ranks.items() if rank == best}
    inner = [
        call for call in pool if all(node is call or node not in pool for node in ast.walk(call))
    ]
    if len(inner) != 1:
        return None
    return _loader_call(inner[0], names)


def _standing(call: LoaderCall, keyword: str) -> ast.expr:
    """Return the node of an argument's value: in the call, or where its constant is assigned."""
    node = call.given[keyword]
    return call.names.constants.get(node.id, node) if isinstance(node, ast.Name) else node


def _value_of(call: LoaderCall, keyword: str) -> object:
    """Return the value that the loader gets for an argument, or _UNKNOWN."""
    if keyword in call.given:
        return _literal(_standing(call, keyword))
    return _DEFAULTS[keyword] if call.is_torch and not call.is_starred else _UNKNOWN


def _calls(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _loader_call(node: ast.Call, names: _Names) -> LoaderCall:
    is_torch = _is_torch_loader(_dotted(node.func), names)
    placed = takewhile(lambda arg: not isinstance(arg, ast.Starred), node.args if is_torch else ())
    given = dict(zip(_PARAMETERS, placed, strict=False))
    given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    is_starred = any(isinstance(arg, ast.Starred) for arg in node.args)
    is_starred |= any(word.arg is None for word in node.keywords)
    return LoaderCall(node=node, is_torch=is_torch, is_starred=is_starred, given=given, names=names)


def _unlikeness(call: ast.Call, names: _Names) -> int:
    """Rank how unlike a loader's a call is, from 0 to _NO_LOADER.

    A call of any name, such as a functools.partial or super().__init__, is taken for a loader's if
    it has a loader's keywords.
    """
    dotted = _dotted(call.func)
    if _is_torch_loader(dotted, names):
        return 0
    if dotted.endswith("DataLoader"):
        return 1
    if dotted.endswith("Loader"):
        return 2
    has_keyword = any(keyword.arg in {"batch_size", *LOADER_ARGUMENTS} for keyword in call.keywords)
    return _OTHER_NAME if has_keyword else _NO_LOADER


def _is_torch_loader(dotted: str, names: _Names, seen: frozenset[str] = frozenset()) -> bool:
    """Return True if a name of the script always means torch's loader or a plain subclass of it."""
    head, _, rest = dotted.partition(".")
    imports = [f"{name}.{rest}" if rest else name for name in names.imports.get(head, ())]
    bases = [] if rest else names.bases.get(head, ())
    if head in seen or len(imports) + len(bases) != names.bound[head]:
        return False
    if not names.bound[head]:  # it may come from an `import *`
        stars = names.imports.get("*", ())
        return any(f"{star.removesuffix('*')}{dotted}" in _LOADERS for star in stars)
    return _LOADERS.issuperset(imports) and all(
        _is_torch_loader(base, names, seen | {head}) for base in bases
    )


def _dotted(node: ast.expr) -> str:
    """Return a name with its attributes, such as "data.DataLoader"; "?" for other expressions."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id if isinstance(node, ast.Name) else "?"]))


def _names(tree: ast.Module) -> _Names:
    bound: Counter[str] = Counter()
    read: Counter[str] = Counter()
    imports: defaultdict[str, list[str]] = defaultdict(list)
    bases: defaultdict[str, list[str]] = defaultdict(list)
    for node in ast.walk(tree):
        bound.update(_bound(node))
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Constant(value=str(name)):
                read[name] += 1
            case ast.Import() | ast.ImportFrom():
                for name, full in _imported(node):
                    imports[name].append(full)
            case ast.ClassDef(name=name, bases=[base], keywords=[], decorator_list=[]) if (
                not _has_constructor(node)
            ):
                bases[name].append(_dotted(base))
    constants = {
        name: value
        for name, value in _assigned(tree)
        if bound[name] == 1 and not _DYNAMIC & read.keys()
    }
    return _Names(bound=bound, read=read, imports=imports, bases=bases, constants=constants)


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds, or declares as global or nonlocal."""
    match node:
        case ast.alias(name=name, asname=other):
            yield other or name.partition(".")[0]
        case (
            ast.Name(ctx=ast.Load())
            | ast.Constant()
            | ast.Attribute()
            | ast.keyword()
            | ast.ImportFrom()
        ):
            return
        case _:
            for _, value in ast.iter_fields(node):
                values = value if isinstance(value, list) else [value]
                yield from (name for name in values if isinstance(name, str))


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield the names that an import binds, each with the full name of its object."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{'.' * node.level}{node.module}.{alias.name}"
        elif alias.asname:
            yield alias.asname, alias.name
        else:
            top = alias.name.partition(".")[0]
            yield top, top


def _has_constructor(node: ast.ClassDef) -> bool:
    return any({"__init__", "__new__"} & set(_bound(item)) for item in node.body)


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the module's names that are assigned a literal."""
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                if _literal(value) is not _UNKNOWN:
                    yield name, value


def _literal(node: ast.expr) -> object:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _UNKNOWN
    return value if value is None or isinstance(value, int | float | str) else _UNKNOWN


# Deciding which settings the call can be given.


_WORKERS_ALONE = [
    name for name in LOADER_ARGUMENTS if name in NEUTRAL_WITHOUT_WORKERS and name != "in_order"
]
"""Settings that torch refuses without workers unless they are neutral; it ignores in_order.
Source: DataLoader.__init__."""


def patch_script(source: Path, line: int, config: TrainingConfig, wanted: Collection[str]) -> bytes:
    """Return the change to a script that gives its training loader these settings.

    A setting is left as it is if a name or an expression gives it, if its constant is read in other
    places too, if `*` or `**` in the call may carry it, and if the call lacks it and isn't known to
    be torch's class; the batch size also if the loader has none. Workers are removed only if torch
    then accepts the call, and what needs workers is set only if they are known to be there.

    Args:
        source: The script.
        line: Line of the frame that makes the loader, from 1; any line of the call will do.
        config: The settings.
        wanted: Names of those to set, of LOADER_SETTINGS and BATCH_SETTINGS. The others are
            changed only if torch would refuse them without workers.

    Returns:
        A unified diff for `patch -p1` and `git apply`, in the script's encoding and with its line
        ends; empty if nothing can or need be changed.
    """
    script = _read_script(source)
    call = None if script is None else _find_call(script.tree, line)
    if script is None or call is None:
        return b""
    changes = _changes(call, config, wanted)
    text = _edited(script.text, _edits(script, call, changes))
    if not changes or not _is_as_meant(script, call, text, changes):
        return b""
    return _diff(script, text)


def _changes(
    call: LoaderCall, config: TrainingConfig, wanted: Collection[str]
) -> dict[str, object]:
    """Return the values to give to the call, by keyword."""
    values = {name: value for name, value in config.loader_settings.items() if name in wanted}
    if "micro_batch_size" in wanted and _takes_batch_size(call):
        values = {"batch_size": config.loader_batch_size, **values}
    changes = {
        keyword: value
        for keyword, value in _differing(call, values, config).items()
        if _can_be_given(call, keyword)
    }
    # Removing the workers also resets what torch refuses without them.
    if changes.get("num_workers") == 0:
        neutral = {name: NEUTRAL_WITHOUT_WORKERS[name] for name in _WORKERS_ALONE}
        resets = _differing(call, neutral, config)
        is_known = call.is_torch and not call.is_starred and _value_of(call, "timeout") == 0
        if is_known and all(_can_be_given(call, keyword) for keyword in resets):
            changes |= resets
        else:
            del changes["num_workers"]
    # What needs workers is set only if they are known to be there.
    workers = changes.get("num_workers", _value_of(call, "num_workers"))
    has_workers = workers is not _UNKNOWN and bool(workers)
    return {
        keyword: value
        for keyword, value in changes.items()
        if has_workers or not value or keyword not in _WORKERS_ALONE
    }


def _differing(
    call: LoaderCall, values: Mapping[str, object], config: TrainingConfig
) -> dict[str, object]:
    """Return the values that the loader does not get already."""
    differing = {}
    for keyword, value in values.items():
        known = _value_of(call, keyword)
        wanted = value
        if keyword == "prefetch_factor" and config.num_workers:  # None is torch's default then
            known = TORCH_PREFETCH_FACTOR if known is None else known
            wanted = TORCH_PREFETCH_FACTOR if value is None else value
        if known != wanted or isinstance(known, float):
            differing[keyword] = value
    return differing


def _takes_batch_size(call: LoaderCall) -> bool:
    """Return False if the loader has a batch sampler, or makes no batches (`batch_size=None`)."""
    has_sampler = "batch_sampler" in call.given and _value_of(call, "batch_sampler") is not None
    return not has_sampler and _value_of(call, "batch_size") is not None


def _can_be_given(call: LoaderCall, keyword: str) -> bool:
    """Return whether the value of an argument can be changed in the script."""
    node = call.given.get(keyword)
    if node is None:
        return call.is_torch and not call.is_starred
    is_read_elsewhere = isinstance(node, ast.Name) and call.names.read[node.id] > 1
    return _value_of(call, keyword) is not _UNKNOWN and not is_read_elsewhere
