"""Describe the search that a study belongs to, as comparable texts: only the same search may resume it.

Comes in: a `Plan` and its `ResolvedSpace`. Goes out: a short text for each part of the search,
equal in another run of the same program. User objects are only described, without torch; of user
code, only __len__ runs.

A digest of the payload, cloudpickle's bytes, can't replace the descriptions. In a second run of an
unchanged script, 4 of 11 kinds of workload have different bytes: a class of __main__ and its
objects (cloudpickle gives it a random id), modules, and data sets of tensors. After adding a
comment, 10 of 11 do, since code objects contain line numbers.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from hashlib import sha256
from os.path import getsize, isfile
from pathlib import Path, PurePath
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from autotune.config.command import python_start, without_secrets
from autotune.config.environment import COMPARED
from autotune.config.plan import INSTALLED, PARTS, Plan, Ref, Workload
from autotune.space.ranges import whole_numbers
from autotune.space.space import ResolvedSpace

_DEPTH = 4
"""Levels of nested objects, closures and called functions: our convention."""
_PLAIN = (bool, int, float, complex, str, bytes, PurePath, Enum, type(None))
"""Types compared by value."""
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
_CODE = (".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg")
"""Suffixes of files with code or settings: our convention."""
_MOST_CODE = 2**20
"""Most bytes of a file compared by content; a larger one counts as data. Our convention."""
_MOST_ITEMS = 100
"""Most items of a container among arguments; a longer one counts as data. Our convention."""


def identify(plan: Plan, space: ResolvedSpace) -> dict[str, str]:
    """Return what must be equal for a study to be resumed, by name.

    Budget and run folder may change.

    Args:
        plan: Plan of the search.
        space: Its resolved space.
    """
    workload = plan.workload
    compared = space.environment.comparable()
    return {
        **parts_of(workload),
        "sampling": f"shuffle={workload.shuffle}, drop_last={workload.drop_last}",
        "space": _digest(repr([(name, repr(domain)) for name, domain in space.given.items()])),
        "baseline": plan.baseline.model_dump_json(exclude_defaults=True),
        "objective": plan.objective.model_dump_json(exclude={"larger_batch_gain"}),
        "seed": str(plan.seed),
        **{COMPARED[name]: _in_words(value) for name, value in compared.items()},
        **_layout(plan, space),
    }


def parts_of(workload: Workload) -> dict[str, str]:
    """Describe the parts of a workload, each by a text that is equal in another run of the same program."""
    if workload.command is not None:
        return {"command": _describe_command(workload.command)}
    parts = {name: getattr(workload, name) for name in PARTS}
    return {name: describe_part(part) for name, part in parts.items() if part is not None}


def _layout(plan: Plan, space: ResolvedSpace) -> dict[str, str]:
    """Describe how groups are placed on hosts, if they may span several; otherwise return nothing.

    The hosts decide which numbers of ranks are tried by default, and a group's throughput depends
    on its placement.
    """
    environment = space.environment
    sizes = whole_numbers(space.domains["world_size"])
    has_groups = max(*sizes, plan.baseline.process_count) > 1
    if environment.hosts == 1 or not has_groups:
        return {}
    if "world_size" in space.given and not environment.is_spread:
        return {}
    how = "spread over" if environment.is_spread else "packed on"
    return {"ranks": f"{', '.join(map(str, sizes))} {how} {environment.hosts} hosts"}


def _in_words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)


def describe_part(part: Any) -> str:
    """Return a short text that is equal for the same object in another run of the same program.

    Compared are the code of functions and classes, and of the user code that they name, four calls
    deep; the arguments of partials, a closure's variables, parameters' shapes, the dataset's
    length, and public attributes with plain values. Not compared are the content of the data,
    random weights and installed packages.

    Args:
        part: A model, a dataset, a function, or a `Ref` to one.
    """
    if isinstance(part, Ref):
        return _describe_ref(part)
    if isinstance(part, str):
        return part
    name = getattr(part, "__qualname__", None) or type(part).__qualname__
    if isinstance(part, _CONTAINERS):  # data
        return f"{name}{_length(part)}"
    return f"{name}#{_digest(_text(part, _DEPTH))}{_length(part)}"


def _describe_command(command: Sequence[str]) -> str:
    """Describe a command by its words and the content of files with code or settings; others may be outputs."""
    start = python_start(command)
    words = [word for word in command if word.endswith(_CODE)]
    if start is not None and start.kind == "module":
        words += _module_files(start.target)
    digests = filter(None, map(_digest_of_file, words))
    return "#".join([shlex.join(without_secrets(command)), *digests])


def _describe_ref(ref: Ref) -> str:
    place = ref.target.rpartition(":")[0]
    modules = [place] if place.endswith(".py") else _module_files(place)
    for folder in ref.folders:
        for module in modules:
            digest = _digest_of_file(f"{folder}/{module}")
            if digest:
                return f"{ref.target}#{digest}"
    return ref.target


def _module_files(name: str) -> list[str]:
    """Return the possible files of a module or package, relative to a folder of the search path."""
    stem = name.replace(".", "/")
    return [f"{stem}.py", f"{stem}/__main__.py", f"{stem}/__init__.py"]


def _digest_of_file(name: str) -> str:
    """Return the digest of a file of code or settings; "" if it is no file, or so large that it is data."""
    with suppress(OSError, ValueError):  # it may not be read, or its name is no path
        if isfile(name) and getsize(name) <= _MOST_CODE:  # noqa: PTH113, PTH202 - no error for any name
            return _digest(Path(name).read_text(errors="replace"))
    return ""


def _text(value: Any, depth: int) -> str:
    """Describe a value without addresses; at depth 0, and for long containers, by class name and length only."""
    is_plain = isinstance(value, _PLAIN)
    if depth == 0 or (isinstance(value, _CONTAINERS) and len(value) > _MOST_ITEMS):
        return repr(value) if is_plain else f"{type(value).__qualname__}{_length(value)}"
    match value:
        case partial():
            text = f"partial{_texts((value.func, value.args, value.keywords), depth)}"
        case list() | tuple():
            text = _texts(value, depth)
        case Mapping() | set() | frozenset():  # a set's own order depends on the hash seed
            items = value.items() if isinstance(value, Mapping) else value
            text = str(sorted(_text(item, depth) for item in items))
        case type():
            text = _class_text(value, depth)
        case MethodType():
            text = _texts((value.__func__, value.__self__), depth)
        case FunctionType():
            closure = [_content(cell) for cell in value.__closure__ or ()]
            called = [value.__globals__.get(name) for name in value.__code__.co_names]
            own = [
                code for code in called if isinstance(code, FunctionType | type) and _is_own(code)
            ]
            parts = (value.__defaults__, value.__kwdefaults__, closure, own)
            text = _code_text(value.__code__) + _texts(parts, depth - 1)
        case _:
            text = repr(value) if is_plain else _object_text(value, depth)
    return text


def _texts(values: Iterable[Any], depth: int) -> str:
    return str([_text(value, depth) for value in values])


def _object_text(value: Any, depth: int) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _shape(value)
    if hasattr(value, "named_parameters"):
        kinds = sorted({_class_text(type(module), depth) for module in value.modules()})
        shapes = [(name, _shape(parameter)) for name, parameter in value.named_parameters()]
        # Parts outside of modules, see trainers.steps
        more = _text(getattr(value, "autotune_identity", None), depth)
        return f"{kinds}{shapes}{more}"
    if hasattr(value, "param_groups"):  # an optimizer, whose parameters the model describes
        groups = [
            {name: own for name, own in group.items() if name != "params"}
            for group in value.param_groups
        ]
        return f"{_class_text(type(value), depth)}{_texts(groups, depth)}"
    own_attributes = dict(getattr(value, "__dict__", {}))
    if is_dataclass(value):
        own_attributes |= {field.name: getattr(value, field.name, None) for field in fields(value)}
    attributes = {
        name: _text(own, depth - 1)
        for name, own in sorted(own_attributes.items())
        if not name.startswith("_") and not isinstance(own, _CONTAINERS)
    }
    return f"{_class_text(type(value), depth)}{attributes}"


def _class_text(kind: type, depth: int) -> str:
    """Describe the code and plain values of a class and its bases; installed packages by name."""
    own_bases = [base for base in kind.__mro__ if _is_own(base)]
    members = [sorted(_member_texts(base, depth - 1)) for base in own_bases]
    return f"{kind.__qualname__}{members}"


def _member_texts(kind: type, depth: int) -> Iterator[str]:
    for name, member in vars(kind).items():
        if isinstance(member, _PLAIN) and not name.startswith("__"):
            yield f"{name}={member!r}"
        # Static, class and cached methods, and properties: down to the function
        for attribute in ("__func__", "__wrapped__", "func", "fget"):
            member = getattr(member, attribute, member)  # noqa: PLW2901 - unwrapped step by step
        if isinstance(member, FunctionType):
            yield f"{name}:{_text(member, depth)}"


def _is_own(code: FunctionType | type) -> bool:
    """Return whether code is the user's: neither Python's nor an installed package's."""
    root = code.__module__.partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    is_stdlib = root in sys.stdlib_module_names and root != "__main__"
    return not is_stdlib and not INSTALLED & set(Path(file).parts)


def _content(cell: CellType) -> Any:
    """Return the value of a closure's variable; None if it has none yet."""
    with suppress(ValueError):
        return cell.cell_contents
    return None


def _code_text(code: CodeType) -> str:
    constants = [_constant_text(constant) for constant in code.co_consts]
    return f"{code.co_code.hex()}{code.co_names}{constants}"


def _constant_text(constant: object) -> str:
    """Describe a constant, equally in every process: a set's order depends on the hash seed."""
    if isinstance(constant, CodeType):
        return _code_text(constant)
    if isinstance(constant, frozenset):
        return repr(sorted(map(repr, constant)))
    return repr(constant)


def _shape(parameter: Any) -> str:
    """Describe a parameter by shape and dtype; a lazy one has no shape before its first batch."""
    with suppress(RuntimeError):
        return f"{tuple(parameter.shape)} {parameter.dtype}"
    return "lazy"


def _length(part: Any) -> str:
    if not isinstance(part, type | Mapping):
        with suppress(TypeError, NotImplementedError):
            return f"[{len(part)}]"
    return ""


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:12]
