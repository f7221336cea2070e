"""Plain data checked by pydantic, whose errors become sentences: rule, value, remedy.

Comes in: a model and the plain data for it. Goes out: what was made of the data, and Problems, each with the path of
its value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from autotune.files.yaml_document import KeyPath, Problem

__all__ = ["must_be_given", "validated"]

_Model = TypeVar("_Model")

_BOOLEAN_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxdict = _SHORT.maxlist = 6

_RULES = {
    "int": "must be a whole number",
    "float": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "model": "must be a mapping of settings",
    "dataclass": "must be a mapping of settings",
    "invalid_key": "a key must be a text",
}
"""By pydantic's kind of error, or by the type that it names first: "int" of "int_parsing"."""
_UNKNOWN_KEY = {"extra_forbidden", "unexpected_keyword_argument"}  # of a model, of a dataclass


def validated(
    model_type: type[_Model], data: Mapping[str, Any], context: dict[str, Any] | None = None
) -> tuple[_Model | None, list[Problem]]:
    """The model of some data, or None; and every rule that pydantic found to be broken, none placed yet."""
    try:
        return TypeAdapter(model_type).validate_python(data, context=context), []
    except ValidationError as error:
        found = [_problem(detail, model_type, data) for detail in error.errors(include_url=False)]
        return None, list(dict.fromkeys(found))


def must_be_given(model_type: Any, name: str) -> str:
    """That a key is missing, with the words that describe it."""
    description = _keys(model_type)[name].description
    return "must be given" + (f": {description}" if description else "")


def _problem(detail: ErrorDetails, model_type: type, data: object) -> Problem:
    is_about_key = detail["type"] in _UNKNOWN_KEY
    path = detail["loc"] if is_about_key or detail["type"] == "missing" else _existing(detail["loc"], data)
    return Problem(path=path, text=_sentence(detail, model_type), is_about_key=is_about_key)


def _existing(loc: KeyPath, data: Any) -> KeyPath:
    """The part of a location that is in the data: pydantic adds the names of validators and of union members."""
    for index, key in enumerate(loc):
        try:
            data = data[key]
        except (LookupError, TypeError):
            return loc[:index]
    return loc


def _sentence(detail: ErrorDetails, model_type: type) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind in _UNKNOWN_KEY:
        return f"unknown key; {_nearest(detail['loc'], model_type)}"
    if kind == "missing":
        return must_be_given(_model_at(model_type, detail["loc"][:-1]), str(detail["loc"][-1]))
    template = _RULES.get(kind) or _RULES.get(kind.partition("_")[0])
    rule = template.format(**context) if template else detail["msg"]
    return f"{rule}, but got {_SHORT.repr(value)}{_remedy(kind, value, context)}"


def _remedy(kind: str, value: object, context: Mapping[str, Any]) -> str:
    if kind == "bool_type" and str(value).lower() in _BOOLEAN_WORDS:
        return f"; write {_BOOLEAN_WORDS[str(value).lower()]}"
    if kind == "int_type" and isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
        return f"; write {value} without quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind == "literal_error" and isinstance(value, str):
        near = get_close_matches(value, re.findall(r"'([^']*)'", context["expected"]), n=1, cutoff=0.5)
        return f"; did you mean {near[0]!r}?" if near else ""
    return ""


def _nearest(loc: KeyPath, model_type: type) -> str:
    """The remedy for an unknown key: where it belongs, the name that is nearest, or all that are allowed."""
    name, owner = str(loc[-1]), _model_at(model_type, loc[:-1])
    homes = [*_homes(name, model_type, ()), *_homes(name, owner, loc[:-1])]
    if homes:
        return f"it belongs below {' or '.join(dict.fromkeys(homes))}"
    allowed = list(_keys(owner))
    near = get_close_matches(name.lower(), allowed, n=1)
    return f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(allowed)}"


def _homes(name: str, model_type: type | None, path: KeyPath) -> list[str]:
    """The sections of the model at a path that have a key of this name, each by its own path.

    A field with a choice of models (a domain's) is no section.
    """
    inner = {section: _models_of(field) for section, field in _keys(model_type).items()}
    found = [section for section, models in inner.items() if len(models) == 1 and name in _keys(models[0])]
    return [".".join(map(str, (*path, section))) for section in found]


def _model_at(model_type: type, path: KeyPath) -> type | None:
    """The model that holds the value at a path; None where that is no model."""
    owner: type | None = model_type
    for key in path:
        field = _keys(owner).get(str(key))
        owner = next(iter(_models_of(field)), None) if field is not None else None
    return owner


def _models_of(field: FieldInfo) -> list[type]:
    return [choice for choice in (field.annotation, *get_args(field.annotation)) if _keys(choice)]


def _keys(model_type: Any) -> dict[str, FieldInfo]:
    """The keys of a model or of a pydantic dataclass; none of anything else."""
    fields: dict[str, FieldInfo] = getattr(model_type, "__pydantic_fields__", {})
    return {name: field for name, field in fields.items() if not field.exclude}
