"""The border through which every Plan comes in: a YAML file or a command with overrides, or a Python call's arguments.

Comes in: a path, or the words of a command, or the arguments by the file's own names. Goes out: a Plan; or a
ConfigError with all that is wrong. What is written as text is checked for its form, and files and programs for being
there; whether a module holds the name is found out in a trial.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from os.path import exists, isfile
from pathlib import Path
from reprlib import Repr
from typing import Any

from autotune.errors import ConfigError
from autotune.files.framework_file import Today, begin_with
from autotune.files.validation import must_be_given, validated
from autotune.files.yaml_document import Document, KeyPath, Place, Problem, apply_override, read_document
from autotune.protocol.attach import with_own_python
from autotune.settings.command import command_name, is_python, python_start
from autotune.settings.executor import ExecutorKind
from autotune.settings.plan import Plan
from autotune.settings.workload import BESIDE_A_COMMAND, READ_PART, Ref, Workload

__all__ = ["FROM_BESIDE_A_COMMAND", "command_plan", "parse_plan", "read_plan"]

FROM_BESIDE_A_COMMAND = (
    "--from can't stand beside a command, whose baseline is what the script itself is seen to do, its framework's "
    "file among it"
)

_MAX_TYPED = 80
"""Characters of a command that a message shows."""
_SHORT = Repr()
_SHORT.maxstring = _MAX_TYPED
_NOT_WRITTEN = {
    "name": "unknown key; a plan is named by its file",
    "notes": "unknown key; what can't be taken over is told by autotune",
    "read_over": "unknown key; what is read from a framework's own file is told by autotune",
    "policy": "unknown key; the thresholds of a search are no settings",
}
"""Fields of a Plan that no file and no call gives."""
_IDLE_BESIDE_A_COMMAND = frozenset(field.name for field in fields(Workload)) - {"command"}


def parse_plan(arguments: Mapping[str, Any], *, name: str) -> Plan:
    """The Plan of a Python call; an argument that is None is left out.

    Raises:
        ConfigError: arguments break rules; all that is wrong, a sentence each.
    """
    plan, problems = _validate(arguments, name, {})
    if plan is None or problems:
        raise ConfigError(*map(str, problems))
    return plan


def read_plan(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    executor: ExecutorKind | None = None,
    today: Today | None = None,
) -> Plan:
    """Read a configuration file; each override is `a.b=c`, with c in YAML.

    `executor` replaces the file's kind of executor, before the overrides; its address and ranks stay where the kind
    does. `today` stands below the file and the overrides: it fills what they leave open of the baseline.

    Raises:
        ConfigError: the file can't be read, or breaks rules; all that is wrong, a sentence each.
    """
    folders = (str(path.parent.resolve()), str(Path.cwd()))
    return _plan_of(read_document(path), overrides, executor, name=path.stem, folders=folders, today=today)


def command_plan(
    command: Sequence[str], overrides: Sequence[str] = (), *, executor: ExecutorKind | None = None
) -> Plan:
    """The Plan of a command that was typed, its words as they came; everything else is a default or an override's.

    Raises:
        ConfigError: the command or an override breaks rules; all that is wrong, a sentence each.
    """
    typed = shlex.join(command)
    place = Place(source=f"-- {typed if len(typed) <= _MAX_TYPED else f'{typed[: _MAX_TYPED - 3]}...'}")
    workload = {"command": list(command)}
    values: dict[KeyPath, Place] = {("workload",): place, ("workload", "command"): place}
    document = Document(root=place, data={"workload": workload}, values=dict(values), keys=dict(values))
    name = command_name(command) if command else ""
    return _plan_of(document, overrides, executor, name=name, folders=(str(Path.cwd()),))


def _plan_of(
    document: Document,
    overrides: Sequence[str],
    executor: ExecutorKind | None,
    *,
    name: str,
    folders: tuple[str, ...],
    today: Today | None = None,
) -> Plan:
    """The Plan of a document with its overrides."""
    malformed: list[str] = []
    for override in (*_chosen(executor, document), *overrides):
        try:
            apply_override(document, override)
        except ConfigError as error:
            malformed.extend(error.problems)
    read_over = {} if today is None else begin_with(document, today)
    plan, broken = _validate(document.data, name, {READ_PART: partial(_reference, folders=folders)})
    absent = None if plan is None or plan.workload.command is None else _absent(plan.workload.command)
    if absent is not None:
        broken.append(Problem(path=("workload", "command"), text=absent))
    if today is not None and plan is not None and plan.workload.command is not None:
        broken.append(Problem(path=("workload", "command"), text=f"{FROM_BESIDE_A_COMMAND}; leave --from out"))
    problems = sorted([*document.problems, *document.placed(broken)], key=_reading_order)
    if plan is None or problems or malformed:
        raise ConfigError(*map(str, problems), *malformed)
    return replace(plan, read_over=read_over)


def _validate(sections: Mapping[str, Any], name: str, context: dict[str, Any]) -> tuple[Plan | None, list[Problem]]:
    """The one parser of both borders. A section that is None ("space:") is left out."""
    given = {key: value for key, value in sections.items() if value is not None}
    problems = [
        Problem(path=(key,), text=text, is_about_key=True) for key, text in _NOT_WRITTEN.items() if key in given
    ]
    workload = given.get("workload")
    if isinstance(workload, Mapping):  # else it is wrong, or a Workload that is made already
        problems += _one_way_to_train(workload)
        if workload.get("command") is not None:
            given["workload"] = {key: value for key, value in workload.items() if key not in _IDLE_BESIDE_A_COMMAND}
    plan, broken = validated(Plan, {**given, "name": name}, context)
    if plan is not None and plan.workload.command is not None and plan.executor.kind != "local":
        rule = "must be local beside workload.command, whose script runs on this machine alone"
        remedy = "leave executor out, or give a model and a dataset"
        problems.append(Problem(path=("executor",), text=f"{rule}, but got {plan.executor.kind!r}; {remedy}"))
    return plan, [*problems, *broken]


def _one_way_to_train(workload: Mapping[str, Any]) -> Iterator[Problem]:
    """What breaks the rule that a workload is either a model and a dataset or a command alone."""
    if workload.get("command") is not None:
        for part in workload:
            if part in _IDLE_BESIDE_A_COMMAND and workload[part] is not None:
                yield Problem(path=("workload", part), text=f"{BESIDE_A_COMMAND}; leave it out, or the command")
        return
    parts = [part for part in ("model", "dataset") if workload.get(part) is None]
    instead = "; or workload.command in their place: what you type to train" if len(parts) > 1 else ""
    for part in parts:
        yield Problem(path=("workload", part), text=must_be_given(Workload, part) + instead)


def _absent(command: tuple[str, ...]) -> str | None:
    """That a command starts what is not there, from the working directory; its Python may be our own."""
    start = python_start(command)
    if start is not None and start.kind == "script" and "{" not in start.target and not exists(start.target):  # noqa: PTH110 - no error for any name
        rule = "the script of a command must exist"
        return f"{rule}, but {_SHORT.repr(start.target)} is not in {Path.cwd()}; check the path"
    if not is_python(command[0]) and shutil.which(with_own_python(command)[0]) is None:
        rule = f"the program of a command must be on PATH, or be a path to a program, but got {_SHORT.repr(command[0])}"
        if isfile(command[0]):  # noqa: PTH113 - no error for any name
            return f"{rule}, which may not be run; write bash before it, or make it executable"
        return f"{rule}; {'write its words apart' if ' ' in command[0] else 'check its name'}"
    return None


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
