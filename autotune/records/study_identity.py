"""Which search a study belongs to, as texts that can be compared: a study is resumed by the same search alone.

Comes in: a Plan and its ResolvedSpace. Goes out: a short text for each part of the search, equal in
another run of the same program. The user's objects are only described, without torch; of the user's
code only __len__ runs.

A digest of the payload, cloudpickle's bytes, can't take the place of the descriptions. In a second
run of an unchanged script 4 of 11 kinds of workload have other bytes: a class of __main__ and its
objects (cloudpickle gives it a random id), modules, and data sets of tensors. After a comment is
added 10 of 11 have, since the code holds line numbers.
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

_DEPTH = 4  # of objects, closures and called functions within each other: our convention
_PLAIN = (bool, int, float, complex, str, bytes, PurePath, Enum, type(None))
"""Types whose values are compared as they are."""
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
_CODE = (".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg")
"""How the names of files of code and of settings end: our convention."""
_MOST_CODE = 2**20
"""Bytes of a file that is compared by its content; a larger one is taken for data: our convention."""
_MOST_ITEMS = 100  # of a container among arguments; a longer one is taken for data: our convention


def identify(plan: Plan, space: ResolvedSpace) -> dict[str, str]:
    """What must be equal for a study to go on, by name. Budget and run folder may change."""
    workload = plan.workload
    return {
        **parts_of(workload),
        "sampling": f"shuffle={workload.shuffle}, drop_last={workload.drop_last}",
        "space": _digest(repr([(name, repr(domain)) for name, domain in space.given.items()])),
        "baseline": plan.baseline.model_dump_json(exclude_defaults=True),
        "objective": plan.objective.model_dump_json(exclude={"larger_batch_gain"}),
        "seed": str(plan.seed),
        **{
            COMPARED[name]: _in_words(value)
            for name, value in space.environment.comparable().items()
        },
        **_layout(plan, space),
    }


def parts_of(workload: Workload) -> dict[str, str]:
    """Describe the parts of a workload, each by a text that is equal in another run of the same program."""
    if workload.command is not None:
        return {"command": _describe_command(workload.command)}
    parts = {name: getattr(workload, name) for name in PARTS}
    return {name: describe_part(part) for name, part in parts.items() if part is not None}


def _layout(plan: Plan, space: ResolvedSpace) -> dict[str, str]:
    """How groups lie on hosts, where they may span them; else nothing.

    The hosts decide which numbers of ranks are tried by default, and a group's rate depends on how
    it is spread over them.
    """
    environment = space.environment
    sizes = whole_numbers(space.domains["world_size"])
    has_groups = max(*sizes, plan.baseline.process_count) > 1
    is_decisive = environment.is_spread or "world_size" not in space.given
    if environment.hosts == 1 or not (has_groups and is_decisive):
        return {}
    how = "spread over" if environment.is_spread else "packed on"
    return {"ranks": f"{', '.join(map(str, sizes))} {how} {environment.hosts} hosts"}


def _in_words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)


def describe_part(part: Any) -> str:
    """A short text that is equal for the same model, dataset or function in another run of the same program.

    Compared are the code of functions and classes, and of those of the user's that they name, four
    calls deep; the arguments of partials, a closure's variables, parameters' shapes, the dataset's
    length, and public attributes that are plain values. Not compared are the content of the data,
    random weights and installed packages.
    """
    if isinstance(part, Ref):
        return _describe_ref(part)
    if isinstance(part, str):
        return part
    name = getattr(part, "__qualname__", None) or type(part).__qualname__
    digest = (
        "" if isinstance(part, _CONTAINERS) else f"#{_digest(_text(part, _DEPTH))}"
    )  # a container is data
    return f"{name}{digest}{_length(part)}"


def _describe_command(command: Sequence[str]) -> str:
    """The words, and the content of each that is code or settings; other files may be what the training writes."""
    start = python_start(command)
    words = [word for word in command if word.endswith(_CODE)]
    words += _module_files(start.target) if start is not None and start.kind == "module" else []
    digests = [digest for word in words for digest in _digest_of_file(word)]
    return "#".join([shlex.join(without_secrets(command)), *digests])


def _describe_ref(ref: Ref) -> str:
    place = ref.target.rpartition(":")[0]
    modules = [place] if place.endswith(".py") else _module_files(place)
    digests = (
        _digest_of_file(f"{folder}/{module}") for folder in ref.folders for module in modules
    )
    return "#".join([ref.target, *next(filter(None, digests), ())])


def _module_files(name: str) -> list[str]:
    """Where a module or a package may lie, from a folder of the search path."""
    stem = name.replace(".", "/")
    return [f"{stem}.py", f"{stem}/__main__.py", f"{stem}/__init__.py"]


def _digest_of_file(name: str) -> list[str]:
    """The digest of a file of code or of settings; none of what is no file, or too large for one: data."""
    try:
        if not isfile(name) or getsize(name) > _MOST_CODE:  # noqa: PTH113, PTH202 - no error for any name
            return []
        return [_digest(Path(name).read_text(errors="replace"))]
    except (OSError, ValueError):  # it may not be read, or its name is no path
        return []


def _text(value: Any, depth: int) -> str:
    """A value as text without addresses; at depth 0, and of a long container, its class's name and length alone."""
    if depth == 0 or (isinstance(value, _CONTAINERS) and len(value) > _MOST_ITEMS):
        return (
            repr(value)
            if isinstance(value, _PLAIN)
            else f"{type(value).__qualname__}{_length(value)}"
        )
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
            text = repr(value) if isinstance(value, _PLAIN) else _object_text(value, depth)
    return text


def _texts(values: Iterable[Any], depth: int) -> str:
    return str([_text(value, depth) for value in values])


def _object_text(value: Any, depth: int) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _shape(value)
    if hasattr(value, "named_parameters"):
        kinds = sorted({_class_text(type(module), depth) for module in value.modules()})
        more = _text(
            getattr(value, "autotune_identity", None), depth
        )  # of what is no module: see trainers.steps
        return f"{kinds}{[(name, _shape(parameter)) for name, parameter in value.named_parameters()]}{more}"
    if hasattr(
        value, "param_groups"
    ):  # an optimizer: whose its parameters are is the model's to say
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
    """The code and plain values of a class and its bases; installed packages are known by their names."""
    return f"{kind.__qualname__}{[sorted(_member_texts(base, depth - 1)) for base in kind.__mro__ if _is_own(base)]}"


def _member_texts(kind: type, depth: int) -> Iterator[str]:
    for name, member in vars(kind).items():
        if isinstance(member, _PLAIN) and not name.startswith("__"):
            yield f"{name}={member!r}"
        for attribute in (
            "__func__",
            "__wrapped__",
            "func",
            "fget",
        ):  # of static, cached and class methods, properties
            member = getattr(member, attribute, member)  # noqa: PLW2901 - down to the function
        if isinstance(member, FunctionType):
            yield f"{name}:{_text(member, depth)}"


def _is_own(code: FunctionType | type) -> bool:
    """Whether code is the user's: neither Python's nor an installed package's."""
    root = code.__module__.partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return root not in sys.stdlib_module_names - {"__main__"} and not INSTALLED & set(
        Path(file).parts
    )


def _content(cell: CellType) -> Any:
    """The value of a closure's variable; None where it has none yet."""
    with suppress(ValueError):
        return cell.cell_contents
    return None


def _code_text(code: CodeType) -> str:
    return f"{code.co_code.hex()}{code.co_names}{[_constant_text(constant) for constant in code.co_consts]}"


def _constant_text(constant: object) -> str:
    """Equal in every process: a set's own order depends on the hash seed."""
    if isinstance(constant, CodeType):
        return _code_text(constant)
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def _shape(parameter: Any) -> str:
    """A parameter's shape and dtype; a lazy one has no shape before its first batch."""
    with suppress(RuntimeError):
        return f"{tuple(parameter.shape)} {parameter.dtype}"
    return "lazy"


def _length(part: Any) -> str:
    if isinstance(part, type | Mapping):
        return ""
    try:
        return f"[{len(part)}]"
    except (TypeError, NotImplementedError):
        return ""


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:12]
