"""The border through which every Plan comes in: a YAML file with its overrides, or the arguments of a Python call.

Comes in: a path, or the arguments by the file's own names. Goes out: a Plan; or a ConfigError with all that is wrong.
References are checked for their form, and .py files for being there; whether a module holds the name is found out in a
trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from os.path import isfile
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.files.validation import validated
from autotune.files.yaml_document import Document, Problem, apply_override, read_document
from autotune.settings.executor import ExecutorKind
from autotune.settings.plan import Plan
from autotune.settings.workload import READ_PART, Ref

__all__ = ["parse_plan", "read_plan"]


def parse_plan(arguments: Mapping[str, Any], *, name: str) -> Plan:
    """The Plan of a Python call; an argument that is None is left out.

    Raises:
        ConfigError: arguments break rules; all that is wrong, a sentence each.
    """
    plan, problems = _validate(arguments, name, {})
    if plan is None:
        raise ConfigError(*map(str, problems))
    return plan


def read_plan(path: Path, overrides: Sequence[str] = (), *, executor: ExecutorKind | None = None) -> Plan:
    """Read a configuration file; each override is `a.b=c`, with c in YAML.

    `executor` replaces the file's kind of executor, before the overrides; its address and ranks stay where the kind
    does.

    Raises:
        ConfigError: the file can't be read, or breaks rules; all that is wrong, a sentence each.
    """
    document = read_document(path)
    malformed: list[str] = []
    for override in (*_chosen(executor, document), *overrides):
        try:
            apply_override(document, override)
        except ConfigError as error:
            malformed.extend(error.problems)
    folders = (str(path.parent.resolve()), str(Path.cwd()))
    plan, broken = _validate(document.data, path.stem, {READ_PART: partial(_reference, folders=folders)})
    problems = sorted([*document.problems, *document.placed(broken)], key=_reading_order)
    if plan is None or problems or malformed:
        raise ConfigError(*map(str, problems), *malformed)
    return plan


def _validate(sections: Mapping[str, Any], name: str, context: dict[str, Any]) -> tuple[Plan | None, list[Problem]]:
    """The one parser of both borders. A section that is None ("space:") is left out."""
    given = {key: value for key, value in sections.items() if value is not None}
    unknown = Problem(path=("name",), text="unknown key; a plan is named by its file", is_about_key=True)
    problems = [unknown] if "name" in given else []
    plan, broken = validated(Plan, {**given, "name": name}, context)
    return plan, [*problems, *broken]


def _chosen(executor: ExecutorKind | None, document: Document) -> Iterator[str]:
    """The override that a kind of executor stands for: in the file's own mapping, unless that is of another kind."""
    if executor is not None:
        own = document.data.get("executor")
        is_alike = isinstance(own, dict) and own.get("kind", executor) == executor
        yield f"executor.kind={executor}" if is_alike else f"executor={{kind: {executor}}}"


def _reference(value: object, folders: tuple[str, ...]) -> Ref:
    code, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    is_path = code.endswith(".py")
    if not (colon and _is_dotted(name) and (is_path or _is_dotted(code))):
        raise ValueError(f"a reference must be 'package.module:name' or 'path/to/file.py:name', but got {value!r:.80}")
    if is_path and not any(isfile(Path(folder, code)) for folder in folders):  # noqa: PTH113 - no error for any name
        places = " or ".join(dict.fromkeys(folders))
        raise ValueError(f"the file of a reference must exist, but {code!r} is not in {places}; check the path")
    return Ref(target=f"{code}:{name}", folders=folders)


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _reading_order(problem: Problem) -> tuple[bool, int, int]:
    place = problem.place
    return (True, 0, 0) if place is None or not place.line else (False, place.line, place.column)
