"""Write recommended.patch: the recommended loader settings as a diff of the user's own DataLoader call."""

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

# Reads a training script, sets arguments of one call in its text, all else left as it was, and
# makes the unified diff.
#
# The changed text is parsed again, and returned only if exactly these arguments differ.


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
    return Script(
        source=source, raw=raw, encoding=encoding, text=text, lines=_LINE.findall(text), tree=tree
    )


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of invalid escapes, which are the script's
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def with_arguments(script: Script, call: LoaderCall, changes: Mapping[str, object]) -> str | None:
    """Return the text with these arguments of a call set, by keyword; None where the result isn't what was meant.

    An argument that is given is replaced where its value stands; one that is missing is added at
    the call's end.
    """
    text = _edited(script.text, _edits(script, call, changes))
    return text if _is_as_meant(script, call, text, changes) else None


def script_diff(script: Script, text: str) -> str:
    """Return a unified diff to a changed text, for `patch -p1` and `git apply`.

    Bytes that are no UTF-8 are surrogates in it. Its path is the script's as seen from the current
    folder; the name alone where the script lies elsewhere.
    """
    name = _shown(script.source)
    rows = unified_diff(
        _rows(script.raw),
        _rows(text.encode(script.encoding)),
        _header("a", name),
        _header("b", name),
    )
    return "".join(
        row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows
    )


def _edits(script: Script, call: LoaderCall, changes: Mapping[str, object]) -> Iterator[_Edit]:
    for keyword, value in changes.items():
        if keyword in call.given:
            node = standing(call, keyword)
            yield _offset(script, node.lineno, node.col_offset), _end(script, node), repr(value)
    added = [
        f"{keyword}={value!r}" for keyword, value in changes.items() if keyword not in call.given
    ]
    if added:
        yield from _additions(script, call.node, added)


def _additions(script: Script, call: ast.Call, added: Sequence[str]) -> Iterator[_Edit]:
    """Yield new arguments at the end of a call, in the form of those that it has."""
    # What lies between the last argument and the parenthesis that ends the call holds no string.
    here = max(_end(script, node) for node in (call.func, *_arguments(call)))
    end = _end(script, call) - 1
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
    for argument in sorted(
        _arguments(call), key=lambda node: (node.lineno, node.col_offset), reverse=True
    ):
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
    for start, end, new in sorted(
        edits, key=itemgetter(0)
    ):  # stable: of two at one place the first stays the first
        pieces += [text[done:start], new]
        done = end
    return "".join([*pieces, text[done:]])


def _is_as_meant(
    script: Script, call: LoaderCall, text: str, changes: Mapping[str, object]
) -> bool:
    """Return whether the text, parsed again, is the script with these arguments of the call changed, and no others."""
    tree = _parsed(text)
    if tree is None:
        return False
    new: dict[ast.AST, ast.AST] = {
        standing(call, keyword): _expression(value)
        for keyword, value in changes.items()
        if keyword in call.given
    }
    added = [
        ast.keyword(word, _expression(value))
        for word, value in changes.items()
        if word not in call.given
    ]
    new[call.node] = ast.Call(call.node.func, call.node.args, [*call.node.keywords, *added])
    if list(_shape(script.tree, new)) != list(_shape(tree, {})):
        return False
    changed = numbered_call(tree, call.number)
    return all(
        repr(value_of(changed, keyword)) == repr(value) for keyword, value in changes.items()
    )


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
            f"\\{byte:03o}" if chr(byte) in '"\\' or not 32 <= byte < 127 else chr(byte)
            for byte in os.fsencode(path)
        )
        return f'"{"".join(escaped)}"'
    return f"{path}\t" if " " in path else path


def _shown(source: Path) -> str:
    """Return the script as seen from the current folder; its name alone where it lies elsewhere."""
    real = source.resolve()
    here = Path.cwd()
    return real.relative_to(here).as_posix() if real.is_relative_to(here) else real.name


# The call in a training script that makes its loader, and what it gives the loader.
#
# Comes in: a script's syntax tree, the line of the call. Goes out: the call with its arguments by
# keyword, and their values where the script alone tells them. Names are followed through imports,
# plain subclasses and a module's constants.


UNKNOWN = object()
"""The value of what the script alone doesn't tell."""

_PARAMETERS = (
    *(
        "dataset",
        "batch_size",
        "shuffle",
        "sampler",
        "batch_sampler",
        "num_workers",
        "collate_fn",
        "pin_memory",
    ),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
)
"""Positional parameters of torch.utils.data.DataLoader; torchdata's StatefulDataLoader has the
same."""
_DEFAULTS: dict[str, object] = {
    "batch_size": 1,
    "batch_sampler": None,
    "timeout": 0,
    "multiprocessing_context": None,
    **{setting.name: setting.neutral for setting in SETTINGS if setting.is_loader_argument},
}
_LOADER_MODULES = {
    "DataLoader": ("torch.utils.data", "torch.utils.data.dataloader"),
    "StatefulDataLoader": (
        "torchdata.stateful_dataloader",
        "torchdata.stateful_dataloader.stateful_dataloader",
    ),
}
_LOADERS = frozenset(
    f"{module}.{name}" for name, modules in _LOADER_MODULES.items() for module in modules
)
_SETTINGS = frozenset({"batch_size", *LOADER_ARGUMENTS})
_DYNAMIC = frozenset({"eval", "exec", "globals", "locals"})
"""A script that uses these may set or read its constants by text."""
_OTHER_NAME = 3
_NO_LOADER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What a script's own names stand for."""

    bound: Counter[str]
    """How often each is given a value, in any scope."""
    read: Counter[str]
    """How often each is read, strings of that text among them."""
    imports: Mapping[str, Sequence[str]]
    """The full names of what imports bind to each."""
    bases: Mapping[str, Sequence[str]]
    """Of a class that makes its objects as its one base does: that base, as the script names it."""
    constants: Mapping[str, ast.expr]
    """The literals of names that the module gives a value once and for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCall:
    """The call that makes the loader."""

    node: ast.Call
    number: int
    """Which of the script's calls it is, in the order of ast.walk."""
    is_torch: bool
    """Parameters and defaults are those of torch's class; otherwise only its keywords are known."""
    is_starred: bool
    """`*` or `**` in the call may carry arguments."""
    given: Mapping[str, ast.expr]
    """Its arguments, by keyword."""
    names: _Names


def find_call(tree: ast.Module, line: int) -> LoaderCall | str:
    """The call at a line that makes the loader, or "no_call" or "ambiguous_call".

    Calls that look like a loader's come first; of these those that begin at the line, which is the
    one that Python gives of a call; then the likelier names; then the innermost.
    """
    names = _names(tree)
    calls = _calls(tree)
    ranks: dict[ast.Call, tuple[bool, bool, int]] = {}
    for call in calls:
        if (
            call.lineno <= line <= (call.end_lineno or 0)
            and (rank := _unlikeness(call, names)) < _NO_LOADER
        ):
            ranks[call] = (
                rank == _OTHER_NAME,
                line not in {call.lineno, call.func.end_lineno},
                rank,
            )
    if not ranks:
        return "no_call"
    pool = {call for call, rank in ranks.items() if rank == min(ranks.values())}
    inner = [
        call for call in pool if all(node is call or node not in pool for node in ast.walk(call))
    ]
    return (
        _loader_call(inner[0], calls.index(inner[0]), names)
        if len(inner) == 1
        else "ambiguous_call"
    )


def numbered_call(tree: ast.Module, number: int) -> LoaderCall:
    """A call by its number."""
    return _loader_call(_calls(tree)[number], number, _names(tree))


def standing(call: LoaderCall, keyword: str) -> ast.expr:
    """Where the value of an argument stands: in the call, or where its constant is assigned."""
    node = call.given[keyword]
    return call.names.constants.get(node.id, node) if isinstance(node, ast.Name) else node


def value_of(call: LoaderCall, keyword: str) -> object:
    """What the loader gets for a setting, or for an argument that settings touch."""
    if keyword in call.given:
        return _literal(standing(call, keyword))
    return _DEFAULTS[keyword] if call.is_torch and not call.is_starred else UNKNOWN


def is_read_elsewhere(call: LoaderCall, keyword: str) -> bool:
    """Whether an argument that is given is a name that the script reads in other places too."""
    node = call.given[keyword]
    return isinstance(node, ast.Name) and call.names.read[node.id] > 1


def _calls(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _loader_call(node: ast.Call, number: int, names: _Names) -> LoaderCall:
    is_torch = _is_torch_loader(_dotted(node.func), names)
    placed = takewhile(lambda arg: not isinstance(arg, ast.Starred), node.args if is_torch else ())
    given = dict(zip(_PARAMETERS, placed, strict=False))
    given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    is_starred = any(isinstance(arg, ast.Starred) for arg in node.args) or any(
        not word.arg for word in node.keywords
    )
    return LoaderCall(
        node=node, number=number, is_torch=is_torch, is_starred=is_starred, given=given, names=names
    )


def _unlikeness(call: ast.Call, names: _Names) -> int:
    """How little a call looks like one that makes a loader, from 0 to _NO_LOADER.

    A call of any name, such as of a functools.partial or of super().__init__, makes one if it has a
    loader's keywords.
    """
    dotted = _dotted(call.func)
    if _is_torch_loader(dotted, names):
        return 0
    if dotted.endswith("Loader"):
        return 1 if dotted.endswith("DataLoader") else 2
    return (
        _NO_LOADER
        if _SETTINGS.isdisjoint(keyword.arg or "" for keyword in call.keywords)
        else _OTHER_NAME
    )


def _is_torch_loader(dotted: str, names: _Names, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a name of the script is torch's loader, wherever the script binds it."""
    head, _, rest = dotted.partition(".")
    imports = [f"{name}.{rest}" if rest else name for name in names.imports.get(head, ())]
    bases = [] if rest else names.bases.get(head, ())
    if head in seen or len(imports) + len(bases) != names.bound[head]:
        return False
    if not names.bound[head]:
        return not _LOADERS.isdisjoint(
            f"{star.removesuffix('*')}{dotted}" for star in names.imports.get("*", ())
        )
    return _LOADERS.issuperset(imports) and all(
        _is_torch_loader(base, names, seen | {head}) for base in bases
    )


def _dotted(node: ast.expr) -> str:
    """A name with its attributes; "?" stands for what is no name."""
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
    """The names that a node binds, or says to be another scope's."""
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
                yield from (
                    name
                    for name in (value if isinstance(value, list) else [value])
                    if isinstance(name, str)
                )


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """The names that an import binds, and the full names of what they stand for."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{'.' * node.level}{node.module}.{alias.name}"
        else:
            top = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (top, top)


def _has_constructor(node: ast.ClassDef) -> bool:
    return not {"__init__", "__new__"}.isdisjoint(
        name for item in node.body for name in _bound(item)
    )


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The module's names that are given a literal."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if (
                _literal(value) is not UNKNOWN
            ):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if (
                _literal(value) is not UNKNOWN
            ):
                yield name, value


def _literal(node: ast.expr) -> object:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return UNKNOWN
    return value if value is None or isinstance(value, int | float | str) else UNKNOWN


# A diff of a training script that sets the recommended loader settings in its own call, for the
# user to review.
#
# Comes in: the script, the line that makes its training loader, the settings that are wanted. Goes
# out: a unified diff, what it sets, and why the rest was left. The script is read and never
# written.
#
# Only what stands literally is changed: a literal argument, a missing one whose default is known, a
# module's constant that the call alone reads.


_KEYWORDS = {"micro_batch_size": "batch_size", **{name: name for name in LOADER_ARGUMENTS}}
"""Settings that a loader's call can carry, in the order in which they are added, and their
keywords."""
_WORKERS_ALONE = [
    name for name in LOADER_ARGUMENTS if name in NEUTRAL_WITHOUT_WORKERS and name != "in_order"
]
"""Settings that torch refuses without workers, unless they are neutral (DataLoader.__init__);
in_order it ignores."""
_REFUSED_ARGUMENTS = {"timeout": 0, "multiprocessing_context": None}
"""Other arguments that torch then takes at these values alone (DataLoader and its single-process
iterator)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPatch:
    """What can be written into a script, and what can't."""

    diff: str
    """A unified diff for `patch -p1` and `git apply`; "" where nothing can be changed, or nothing
    need be. Bytes that are no UTF-8 stand in it as surrogates: a file must hold `content`."""
    settings: tuple[str, ...]
    """Settings that the diff gives the call, or that it had already."""
    left: Mapping[str, str]
    """Wanted settings that the call can't be given, each with a code that says why."""

    @property
    def content(self) -> bytes:
        """The diff as a file must hold it, in the script's own encoding and line ends."""
        return self.diff.encode("utf-8", "surrogateescape")


def patch_script(
    source: Path, line: int, config: TrainingConfig, wanted: Collection[str]
) -> ScriptPatch:
    """The change to a script that gives its training loader these settings.

    The codes in `left`: "not_literal", a name or an expression gives it; "read_elsewhere", a
    constant gives it that is read in other places too; "starred", `*` or `**` in the call may carry
    it; "unknown_callee", it is no keyword of a call that isn't known to be torch's own class;
    "batch_sampler" and "batching_off" (`batch_size=None`), the loader has no batch size;
    "needs_num_workers", torch refuses it without workers, which aren't known to be set;
    "beside_<keyword>", no workers are wanted, and that argument, which torch then refuses, can't be
    changed; "worker_init_fn", the script must hand it the one of `config.dataloader_kwargs()`,
    which is no literal. For all settings at once: "unreadable" and "unparsable", the file;
    "no_call" and "ambiguous_call", the line; "unverified", the result did not parse to what was
    meant.

    Args:
        source: The script.
        line: The line, from 1, that Python gives of the frame that makes the loader; any line of
            the call will do.
        config: The settings.
        wanted: Those to set, of LOADER_SETTINGS and micro_batch_size. What is not wanted is taken
            to be as in `config` unless the call tells otherwise; it is changed only where torch
            would refuse it without workers.
    """
    script = read_script(source)
    call = script if isinstance(script, str) else find_call(script.tree, line)
    if isinstance(script, str) or isinstance(call, str):
        return _nothing(wanted, str(call))
    targets, left = _targets(call, config, wanted)
    if "worker_threads" in wanted and config.worker_threads is not None:
        left["worker_threads"] = "worker_init_fn"
    changes = {
        keyword: value
        for keyword, value in targets.items()
        if not _has(call, keyword, value, config)
    }
    text = with_arguments(script, call, changes)
    if text is None:
        return _nothing(wanted, "unverified")
    return ScriptPatch(
        diff=script_diff(script, text) if changes else "",
        settings=tuple(
            name
            for name, word in _KEYWORDS.items()
            if word in changes or (name in wanted and word in targets)
        ),
        left=left,
    )


def _nothing(wanted: Collection[str], reason: str) -> ScriptPatch:
    return ScriptPatch(
        diff="", settings=(), left={name: reason for name in _KEYWORDS if name in wanted}
    )


def _is_same(one: object, other: object) -> bool:
    return one == other and not isinstance(one, float)


def _has(call: LoaderCall, keyword: str, value: object, config: TrainingConfig) -> bool:
    """Whether the loader gets this value as it is; where workers load, torch's own prefetch_factor has a number."""
    known = value_of(call, keyword)
    if keyword == "prefetch_factor" and config.num_workers:
        known, value = (TORCH_PREFETCH_FACTOR if one is None else one for one in (known, value))
    return _is_same(known, value)


def _targets(
    call: LoaderCall, config: TrainingConfig, wanted: Collection[str]
) -> tuple[dict[str, object], dict[str, str]]:
    """The values that the call shall have, by keyword, and the settings that are left, with their codes."""
    values: dict[str, object] = {"batch_size": config.loader_batch_size, **config.loader_settings}
    reasons = {
        name: _hindrance(call, word, values[word], config)
        for name, word in _KEYWORDS.items()
        if name in wanted
    }
    left = {name: reason for name, reason in reasons.items() if reason is not None}
    targets = {
        word: values[word]
        for name, word in _KEYWORDS.items()
        if name in reasons.keys() - left.keys()
    }
    if targets.get("num_workers") == 0 and value_of(call, "num_workers") != 0:
        if reason := _hindrance_to_none(call, config):
            left["num_workers"] = reason
            del targets["num_workers"]
        else:
            targets |= {word: NEUTRAL_WITHOUT_WORKERS[word] for word in _WORKERS_ALONE}
    if not _has_workers(
        call, config, is_wanted="num_workers" in wanted, is_set="num_workers" in targets
    ):
        for word in _WORKERS_ALONE:
            if targets.get(word) and not _is_same(value_of(call, word), targets[word]):
                left[word] = "needs_num_workers"
                del targets[word]
    return targets, left


def _hindrance(call: LoaderCall, keyword: str, value: object, config: TrainingConfig) -> str | None:
    """Why the call can't be given this value, by its own text."""
    if (
        keyword == "batch_size"
        and "batch_sampler" in call.given
        and value_of(call, "batch_sampler") is not None
    ):
        return "batch_sampler"
    if keyword == "batch_size" and value_of(call, keyword) is None:
        return "batching_off"
    if _has(call, keyword, value, config):
        return None
    if keyword not in call.given:
        return "starred" if call.is_starred else None if call.is_torch else "unknown_callee"
    if value_of(call, keyword) is UNKNOWN:
        return "not_literal"
    return "read_elsewhere" if is_read_elsewhere(call, keyword) else None


def _hindrance_to_none(call: LoaderCall, config: TrainingConfig) -> str | None:
    """Why the call can't do without workers, for the other arguments that it has."""
    if call.is_starred or not call.is_torch:
        return "starred" if call.is_starred else "unknown_callee"
    for keyword in _WORKERS_ALONE:
        if _hindrance(call, keyword, NEUTRAL_WITHOUT_WORKERS[keyword], config) is not None:
            return f"beside_{keyword}"
    for keyword, neutral in _REFUSED_ARGUMENTS.items():
        if value_of(call, keyword) != neutral:
            return f"beside_{keyword}"
    return None


def _has_workers(
    call: LoaderCall, config: TrainingConfig, *, is_wanted: bool, is_set: bool
) -> bool:
    """Whether the changed script is known to load in workers."""
    known = value_of(call, "num_workers")
    if is_set or (known is UNKNOWN and not is_wanted):
        return config.num_workers > 0
    return known is not UNKNOWN and bool(known)
