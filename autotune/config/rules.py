"""Word pydantic's errors for people who write YAML: the rule that is broken, and a remedy."""

from __future__ import annotations

import re
from difflib import get_close_matches

from pydantic_core import ErrorDetails

_RULES = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be a text",
    "tuple": "must be a list",
    "model": "must be a mapping of settings",
    "dataclass": "must be a mapping of settings",
    "missing": "must be given",
}
"""Rules by the first word of pydantic's kind of error, such as "int" for "int_parsing"; the others
have words that fit."""
_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
"""Booleans of YAML 1.1, which are texts here."""


def rule_of(detail: ErrorDetails) -> str:
    """Return the broken rule: "must be a whole number"."""
    kind = detail["type"].partition("_")[0]
    return _RULES.get(kind) or detail["msg"].replace("Input should", "must")


def remedy_of(detail: ErrorDetails) -> str:
    """Return what to write instead, as the end of a sentence: "; write true"; "" if unknown."""
    kind = detail["type"].partition("_")[0]
    value = detail["input"]
    if kind == "bool" and str(value).lower() in _BOOLEANS:
        return f"; write {_BOOLEANS[str(value).lower()]}"
    if kind == "int" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if not isinstance(value, str):
        return ""
    if kind in {"int", "float"} and re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,18})?", value):
        return f"; write {value} without quotes"
    if kind == "literal":
        names = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
        near = get_close_matches(value, names, n=1, cutoff=0.5)
        return f"; did you mean {near[0]!r}?" if near else ""
    return ""
