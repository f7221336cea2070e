"""The call in a training script that makes its loader, and what it gives the loader.

Comes in: a script's syntax tree, the line of the call. Goes out: the call with its arguments by keyword, and their
values where the script alone tells them. Names are followed through imports, plain subclasses and a module's constants.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from autotune.settings.training_config import LOADER_ARGUMENTS
from autotune.settings_table import SETTINGS

__all__ = ["UNKNOWN", "LoaderCall", "find_call", "is_read_elsewhere", "numbered_call", "standing", "value_of"]

UNKNOWN = object()
"""The value of what the script alone doesn't tell."""

_PARAMETERS = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
)
"""Positional parameters of torch.utils.data.DataLoader; torchdata's StatefulDataLoader has the same."""
_DEFAULTS: dict[str, object] = {
    "batch_size": 1,
    "batch_sampler": None,
    "timeout": 0,
    "multiprocessing_context": None,
    **{setting.name: setting.neutral for setting in SETTINGS if setting.is_loader_argument},
}
_LOADER_MODULES = {
    "DataLoader": ("torch.utils.data", "torch.utils.data.dataloader"),
    "StatefulDataLoader": ("torchdata.stateful_dataloader", "torchdata.stateful_dataloader.stateful_dataloader"),
}
_LOADERS = frozenset(f"{module}.{name}" for name, modules in _LOADER_MODULES.items() for module in modules)
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

    Calls that look like a loader's come first; of these those that begin at the line, which is the one that Python
    gives of a call; then the likelier names; then the innermost.
    """
    names = _names(tree)
    calls = _calls(tree)
    ranks: dict[ast.Call, tuple[bool, bool, int]] = {}
    for call in calls:
        if call.lineno <= line <= (call.end_lineno or 0) and (rank := _unlikeness(call, names)) < _NO_LOADER:
            ranks[call] = (rank == _OTHER_NAME, line not in {call.lineno, call.func.end_lineno}, rank)
    if not ranks:
        return "no_call"
    pool = {call for call, rank in ranks.items() if rank == min(ranks.values())}
    inner = [call for call in pool if all(node is call or node not in pool for node in ast.walk(call))]
    return _loader_call(inner[0], calls.index(inner[0]), names) if len(inner) == 1 else "ambiguous_call"


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
    is_starred = any(isinstance(arg, ast.Starred) for arg in node.args) or any(not word.arg for word in node.keywords)
    return LoaderCall(node=node, number=number, is_torch=is_torch, is_starred=is_starred, given=given, names=names)


def _unlikeness(call: ast.Call, names: _Names) -> int:
    """How little a call looks like one that makes a loader, from 0 to _NO_LOADER.

    A call of any name, such as of a functools.partial or of super().__init__, makes one if it has a loader's keywords.
    """
    dotted = _dotted(call.func)
    if _is_torch_loader(dotted, names):
        return 0
    if dotted.endswith("Loader"):
        return 1 if dotted.endswith("DataLoader") else 2
    return _NO_LOADER if _SETTINGS.isdisjoint(keyword.arg or "" for keyword in call.keywords) else _OTHER_NAME


def _is_torch_loader(dotted: str, names: _Names, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a name of the script is torch's loader, wherever the script binds it."""
    head, _, rest = dotted.partition(".")
    imports = [f"{name}.{rest}" if rest else name for name in names.imports.get(head, ())]
    bases = [] if rest else names.bases.get(head, ())
    if head in seen or len(imports) + len(bases) != names.bound[head]:
        return False
    if not names.bound[head]:
        return not _LOADERS.isdisjoint(f"{star.removesuffix('*')}{dotted}" for star in names.imports.get("*", ()))
    return _LOADERS.issuperset(imports) and all(_is_torch_loader(base, names, seen | {head}) for base in bases)


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
            case ast.ClassDef(name=name, bases=[base], keywords=[], decorator_list=[]) if not _has_constructor(node):
                bases[name].append(_dotted(base))
    constants = {name: value for name, value in _assigned(tree) if bound[name] == 1 and not _DYNAMIC & read.keys()}
    return _Names(bound=bound, read=read, imports=imports, bases=bases, constants=constants)


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a node binds, or says to be another scope's."""
    match node:
        case ast.alias(name=name, asname=other):
            yield other or name.partition(".")[0]
        case ast.Name(ctx=ast.Load()) | ast.Constant() | ast.Attribute() | ast.keyword() | ast.ImportFrom():
            return
        case _:
            for _, value in ast.iter_fields(node):
                yield from (name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str))


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """The names that an import binds, and the full names of what they stand for."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{'.' * node.level}{node.module}.{alias.name}"
        else:
            top = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (top, top)


def _has_constructor(node: ast.ClassDef) -> bool:
    return not {"__init__", "__new__"}.isdisjoint(name for item in node.body for name in _bound(item))


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The module's names that are given a literal."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _literal(value) is not UNKNOWN:
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if _literal(value) is not UNKNOWN:
                yield name, value


def _literal(node: ast.expr) -> object:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return UNKNOWN
    return value if value is None or isinstance(value, int | float | str) else UNKNOWN
