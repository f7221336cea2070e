"""The exceptions of autotune, the exit code of each, and words for the rules that pydantic checks.

    AutotuneError                     1  the search failed
    ├── InputError                    2  something that the caller gave is wrong
    │   ├── ConfigError                  a YAML file, a mapping or an argument breaks a rule
    │   ├── WorkloadError                the user's code fails, or can't be sent to a trial
    │   ├── StudyMismatchError           the run folder has a study of something else
    │   └── RunFolderError               the run folder can't be written, is full, or is in use
    ├── NothingFeasibleError          3  no configuration meets the memory limit
    ├── RepeatedFailureError          1  the same exception ended three different configurations
    └── LauncherError                 1  trials can't be started on this machine, or can't describe it

A message has the rule, the value seen and the remedy. Nothing above this module is imported.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_LONGEST = 1000  # characters of a sentence; our convention
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


class AutotuneError(Exception):
    r"""Base class of all exceptions that autotune raises on purpose.

    Characters that can't be printed become escapes such as \x1b in its message.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(_printable(message, spared="\n\t"))


class InputError(AutotuneError):
    """Something that the caller gave can't be used; the message has the remedy."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration file, a mapping or an argument breaks a rule.

    Attributes:
        problems: One sentence for each broken rule, on one line of at most about 1,000 characters.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(_cut(_printable(problem)) for problem in problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, ...]]:
        return type(self), self.problems


class WorkloadError(InputError):
    """The user's code fails, or can't be sent to a trial.

    Attributes:
        remote_traceback: The user's frames of the traceback in the trial, or "".
    """

    def __init__(self, message: str, *, remote_traceback: str = "") -> None:
        super().__init__(f"{message}\n\n{remote_traceback}".rstrip())
        self.remote_traceback = remote_traceback


class StudyMismatchError(InputError):
    """The run folder has a study of another workload, space or device."""


class RunFolderError(InputError):
    """The run folder can't be written, its disk is full, or another search uses it."""


class NothingFeasibleError(AutotuneError):
    """All configurations exceed the memory limit or fail; the message names the closest one."""

    exit_code = 3


class RepeatedFailureError(AutotuneError):
    """The same exception at the same place ended three different configurations."""


class LauncherError(AutotuneError):
    """A trial's process can't be started, its server is gone, or it can't describe the machine."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type's name if that is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def rule_of(detail: ErrorDetails) -> str:
    """Return the rule that pydantic found broken, for people: "must be a whole number"."""
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


def _printable(text: str, spared: str = "") -> str:
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in spared else repr(char)[1:-1] for char in text
    )


def _cut(sentence: str) -> str:
    """Cut the middle out of a sentence with a very long value."""
    left_out = len(sentence) - _LONGEST
    if left_out <= 0:
        return sentence
    half = _LONGEST // 2
    return f"{sentence[:half]} ({left_out:,} characters left out) {sentence[-half:]}"
