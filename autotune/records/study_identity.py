"""Which search a study belongs to, in words that can be compared: so that nothing is resumed with something else.

Looks at the user's objects from outside, without torch: a model by its class and its parameters' shapes, a dataset by
its class and length, a function by its name and code. Random initial weights do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import Any

from autotune.settings.environment import COMPARED, Environment
from autotune.settings.plan import Plan
from autotune.settings.workload import PARTS, Ref

__all__ = ["describe_part", "identify"]


def identify(plan: Plan, environment: Environment) -> dict[str, str]:
    """What must be equal for a study to go on, by name. Budget and run folder may change."""
    workload = plan.workload
    parts = {name: getattr(workload, name) for name in PARTS if getattr(workload, name) is not None}
    return {
        **{name: describe_part(part) for name, part in parts.items()},
        "sampling": f"shuffle={workload.shuffle}, drop_last={workload.drop_last}",
        "space": _digest(repr(sorted((name, repr(domain)) for name, domain in plan.space.given().items()))),
        "baseline": plan.baseline.model_dump_json(exclude_defaults=True),
        "objective": plan.objective.model_dump_json(),
        "seed": str(plan.seed),
        **_machine(environment),
    }


def _machine(environment: Environment) -> dict[str, str]:
    """What is compared of a machine, by the words that a message uses for it."""
    return {COMPARED[name]: _in_words(value) for name, value in environment.comparable().items()}


def _in_words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)


def describe_part(part: Any) -> str:
    """A short text that is equal for the same model, dataset or function in another run of the same program."""
    if isinstance(part, Ref):
        return _describe_ref(part)
    if isinstance(part, str):
        return part
    name = getattr(part, "__qualname__", None) or type(part).__qualname__
    if isinstance(part, partial):
        keywords = sorted(part.keywords.items())
        return f"partial({describe_part(part.func)}, {part.args!r}, {keywords!r})"
    code = getattr(part, "__code__", None)
    if isinstance(code, CodeType):
        return f"{name}#{_digest(_code_text(code))}"
    named_parameters = getattr(part, "named_parameters", None)
    if named_parameters is not None and not isinstance(part, type):
        shapes = [(key, _shape(value)) for key, value in named_parameters()]
        return f"{name}#{_digest(repr(shapes))}"
    return f"{name}{_length(part)}"


def _describe_ref(ref: Ref) -> str:
    place = ref.target.rpartition(":")[0]
    for folder in ref.folders:
        path = Path(folder, place)
        if place.endswith(".py") and path.is_file():
            return f"{ref.target}#{_digest(path.read_text(errors='replace'))}"
    return ref.target


def _code_text(code: CodeType) -> str:
    return f"{code.co_code.hex()}{code.co_names}{[_constant_text(one) for one in code.co_consts]}"


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
