"""From data to the core's models, and from pydantic's errors to sentences: rule, value seen, remedy.

Comes in: plain data (a Document's or a Python mapping). Goes out: a model, or what is wrong with the data, each with
the path of the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from autotune.errors import ConfigError
from autotune.files.yaml_document import KeyPath, Problem

__all__ = ["Issue", "issues_of", "parse_model"]

_Model = TypeVar("_Model", bound=BaseModel)
_BOOLEAN_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxdict = _SHORT.maxlist = 6

_RULES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "model_type": "must be a mapping of settings",
    "model_attributes_type": "must be a mapping of settings",
    "invalid_key": "a key must be a text",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """What is wrong with a value, or with its key."""

    path: KeyPath
    text: str
    is_about_key: bool


def parse_model(model_type: type[_Model], value: object, where: str) -> _Model:
    """A model from a Python mapping (a model is handed back as it is); `where` names the argument in messages.

    Raises:
        ConfigError: the mapping breaks a rule; all that is wrong, a sentence each.
    """
    if isinstance(value, model_type):
        return value
    data = dict(value) if isinstance(value, Mapping) else value
    try:
        return model_type.model_validate(data)
    except ValidationError as error:
        issues = issues_of(error, model_type, data)
    raise ConfigError(*(str(Problem(text=one.text, path=(where, *one.path))) for one in issues))


def issues_of(error: ValidationError, model_type: type[BaseModel], data: object) -> list[Issue]:
    """Every broken rule that pydantic found in data for a model."""
    found = []
    for detail in error.errors(include_url=False):
        is_about_key = detail["type"] == "extra_forbidden"
        path = detail["loc"] if is_about_key or detail["type"] == "missing" else _existing(detail["loc"], data)
        found.append(Issue(path=path, text=_sentence(detail, model_type), is_about_key=is_about_key))
    return list(dict.fromkeys(found))


def _existing(loc: KeyPath, data: Any) -> KeyPath:
    """The part of a location that is in the data: pydantic adds the names of validators and of union members."""
    for index, key in enumerate(loc):
        try:
            data = data[key]
        except (LookupError, TypeError):
            return loc[:index]
    return loc


def _sentence(detail: ErrorDetails, model_type: type[BaseModel]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "extra_forbidden":
        return f"unknown key; {_nearest(detail['loc'], model_type)}"
    if kind == "missing":
        owner = _model_at(model_type, detail["loc"][:-1])
        description = None if owner is None else owner.model_fields[str(detail["loc"][-1])].description
        return "must be given" + (f": {description}" if description else "")
    rule = _RULES[kind].format(**context) if kind in _RULES else detail["msg"]
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


def _nearest(loc: KeyPath, model_type: type[BaseModel]) -> str:
    """The remedy for an unknown key: where it belongs, the name that is nearest, or all that are allowed."""
    name, owner = str(loc[-1]), _model_at(model_type, loc[:-1])
    homes = _homes(name, model_type, ()) + ([] if owner is None else _homes(name, owner, loc[:-1]))
    if homes:
        return f"it belongs below {' or '.join(dict.fromkeys(homes))}"
    allowed = [] if owner is None else list(owner.model_fields)
    near = get_close_matches(name.lower(), allowed, n=1)
    return f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(allowed)}"


def _homes(name: str, model_type: type[BaseModel], path: KeyPath) -> list[str]:
    """The sections of the model at a path that have a key of this name, each by its own path."""
    found = [section for section, inner in _sections(model_type) if name in inner.model_fields]
    return [".".join(map(str, (*path, section))) for section in found]


def _sections(model_type: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The fields that hold a model; a field with a choice of models (a domain's) is no section."""
    for name, field in model_type.model_fields.items():
        inner = _models_of(field)
        if len(inner) == 1:
            yield name, inner[0]


def _model_at(model_type: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The model that holds the value at a path; None where that is no model."""
    for key in path:
        field = model_type.model_fields.get(str(key))
        inner = [] if field is None else _models_of(field)
        if not inner:
            return None
        model_type = inner[0]
    return model_type


def _models_of(field: FieldInfo) -> list[type[BaseModel]]:
    annotation = field.annotation
    return [one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and issubclass(one, BaseModel)]
