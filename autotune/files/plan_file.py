"""Make a Plan: from a YAML file with overrides, a typed command, or a Python call's arguments.

All three share one parser, which returns a Plan or raises a ConfigError with everything that is
wrong. References are checked for their form, files and programs for existence; a trial finds out
if a module has the name.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from os.path import exists, isfile
from pathlib import Path
from reprlib import Repr
from typing import Any, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from autotune.config.command import command_name, is_python, python_start
from autotune.config.plan import (
    READ_PART,
    ExecutorKind,
    Plan,
    ReadOver,
    Ref,
    Workload,
)
from autotune.config.rules import remedy_of, rule_of
from autotune.errors import ConfigError
from autotune.export.registry import READERS
from autotune.export.table import Reading
from autotune.files.yaml_document import (
    Document,
    KeyPath,
    Place,
    Problem,
    apply_override,
    parse_document,
    read_document,
    read_text,
)
from autotune.messages.space import ddp_without_ranks, keys_not_used, not_read, taken_by_default
from autotune.note import Note
from autotune.protocol.attach import with_own_python
from autotune.settings_table import DDP_PREFIX, SETTINGS

# Validation by pydantic, whose errors become messages: rule, value, remedy


_Model = TypeVar("_Model")

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxdict = _SHORT.maxlist = 6

_UNKNOWN_KEY = {"extra_forbidden", "unexpected_keyword_argument"}  # of a model, of a dataclass


def validated(
    model_type: type[_Model], data: Mapping[str, Any], context: dict[str, Any] | None = None
) -> tuple[_Model | None, list[Problem]]:
    """Validate data with pydantic.

    Returns:
        The model or None, and a Problem without a place for every broken rule.
    """
    try:
        return TypeAdapter(model_type).validate_python(data, context=context), []
    except ValidationError as error:
        found = []
        for detail in error.errors(include_url=False):
            path = detail["loc"]
            if detail["type"] not in {"missing", *_UNKNOWN_KEY}:
                path = _existing(path, data)
            found.append(Problem(path=path, text=_sentence(detail, model_type)))
        return None, list(dict.fromkeys(found))


def _must_be_given(fields: Mapping[str, FieldInfo], name: str) -> str:
    """Return the message for a missing key, with its description."""
    description = fields[name].description if name in fields else None
    return "must be given" + (f": {description}" if description else "")


def _existing(loc: KeyPath, data: Any) -> KeyPath:
    """Return the part of a location that is in the data, without pydantic's names of validators and unions."""
    for index, key in enumerate(loc):
        try:
            data = data[key]
        except (LookupError, TypeError):
            return loc[:index]
    return loc


def _sentence(detail: ErrorDetails, model_type: type) -> str:
    kind = detail["type"]
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind in _UNKNOWN_KEY:
        return f"unknown key; {_nearest(detail['loc'], model_type)}"
    if kind == "missing":
        *above, name = map(str, detail["loc"])
        return _must_be_given(dict(_sections(model_type)).get((*above,), {}), name)
    return f"{rule_of(detail)}, but got {_SHORT.repr(detail['input'])}{remedy_of(detail)}"


def _nearest(loc: KeyPath, model_type: type) -> str:
    """Return the remedy for an unknown key: its section, the nearest name, or all allowed names."""
    *above, name = map(str, loc)
    sections = dict(_sections(model_type))
    homes = [".".join(path) for path, fields in sections.items() if name in fields and path]
    if homes:
        return f"it belongs below {' or '.join(homes)}"
    allowed = sections.get((*above,), {})
    near = get_close_matches(name.lower(), allowed, n=1)
    return f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(allowed)}"


def _sections(
    model_type: object, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, FieldInfo]]]:
    """Yield the path of each section of a model, with the fields that a user may give."""
    fields = {name: field for name, field in _fields(model_type).items() if not field.exclude}
    yield path, fields
    for name, field in fields.items():
        models = list(filter(_fields, (field.annotation, *get_args(field.annotation))))
        # A field with several models (a domain) is no section.
        if len(models) == 1:
            yield from _sections(models[0], (*path, name))


def _fields(kind: object) -> dict[str, FieldInfo]:
    """Return the fields of a model or a pydantic dataclass; none for anything else."""
    return getattr(kind, "__pydantic_fields__", {})


# A framework's configuration file as the baseline


_JSON = {"hf", "deepspeed"}
"""Kinds of file in JSON; the others are YAML."""
_TITLES = {"hf": "transformers", "deepspeed": "DeepSpeed"}
"""Frameworks with another name than their kind of file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentSettings:
    """A framework's configuration file, read as the current settings."""

    kind: str
    path: Path
    reading: Reading
    places: Mapping[str, Place]
    """Place of each setting in the file; the file itself for a default."""


def read_current(kind: str, path: Path) -> CurrentSettings:
    """Read a framework's own file.

    Args:
        kind: One of hf, accelerate, deepspeed and axolotl.
        path: The file.

    Raises:
        ConfigError: The file can't be read.
    """
    if kind == "hf" and path.suffix == ".bin":
        rule = "must be TrainingArguments as JSON, but a .bin is a pickle, which could run anything"
        raise ConfigError(f"{path}: {rule}; write args.to_json_string() into a file")
    text = read_text(path)
    document = _json_document(text, path) if kind in _JSON else parse_document(text, str(path))
    if document.problems:
        raise ConfigError(*map(str, document.problems))
    reading = READERS[kind](document.data)
    places = {}
    for setting in reading.baseline:
        name = reading.origins.get(setting, "")
        places[setting] = document.places.get(tuple(name.split(".")), document.root)
    return CurrentSettings(kind=kind, path=path, reading=reading, places=places)


def _json_document(text: str, path: Path) -> Document:
    """Parse JSON.

    Raises:
        ConfigError: It is not JSON, or has no object.
    """
    try:
        data = json.loads(text, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ConfigError(f"{path}: must not be nested so deeply; is it a configuration?") from None
    except ValueError as error:
        raise ConfigError(f"{path}: must be JSON, but is not: {error}; check the file") from None
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise ConfigError(
            f"{path}: must hold an object of settings, but holds {kind}; check the file"
        )
    document = Document(root=Place(source=str(path)), data=data)
    # Most JSON is YAML too, except for tabs, and its parser knows the places
    with suppress(ConfigError):
        document.places = parse_document(text.replace("\t", " "), str(path)).places
    return document


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} is given twice")
        found[name] = value
    return found


def begin_with(document: Document, current: CurrentSettings) -> dict[str, ReadOver]:
    """Add a framework's settings to a document's baseline, unless the document has its own.

    Returns:
        The origins of the settings that were added and that the file contains.
    """
    read_over: dict[str, ReadOver] = {}
    if document.data.get("baseline") is None:
        document.data["baseline"] = {}
    own = document.data["baseline"]
    if not isinstance(own, dict):
        return read_over  # invalid, which the parser reports
    idle = {setting.name for setting in SETTINGS if setting.needs in own and not own[setting.needs]}
    workload = document.data.get("workload")
    if not isinstance(workload, Mapping) or workload.get("optimizer") is None:
        idle.add("fused")  # it belongs to the file's optimizer, and trials use another
    for setting in sorted(current.reading.baseline, key=lambda name: name.startswith(DDP_PREFIX)):
        *section, name = setting.split(".")
        inner = own
        if section:
            if own.get("strategy") != "ddp":
                continue  # DDP's arguments have no meaning, which notes_of reports
            inner = own.setdefault("ddp", {})
        if not isinstance(inner, dict) or name in inner or setting in idle:
            continue
        inner[name] = current.reading.baseline[setting]
        document.places["baseline", *section, name] = current.places[setting]
        if setting in current.reading.origins:
            origin = current.reading.origins[setting]
            read_over[setting] = ReadOver(origin, current.reading.optimizer)
    return read_over


def notes_of(current: CurrentSettings, plan: Plan) -> Iterator[Note]:
    """Yield notes on keys that could not be read, and on defaults of the framework that were used."""
    reading = current.reading
    path = str(current.path)
    for name, reason in reading.unread.items():
        yield not_read(path, name, reason)
    idle = [name for setting, name in reading.origins.items() if setting.startswith(DDP_PREFIX)]
    if idle and not plan.baseline.is_ddp:
        yield ddp_without_ranks(path, names=idle)
    taken = [
        f"{name}={value}"
        for name, value in reading.assumed.items()
        if getattr(plan.baseline, name, None) == value
    ]
    if taken:
        title = _TITLES.get(current.kind, current.kind)
        yield taken_by_default(path, title=title, values=taken)
    if reading.others:
        yield keys_not_used(path, names=list(reading.others))


# The parser


_MAX_TYPED = 80
"""Most characters of a command in a message. Source: our convention."""
FROM_NEEDS_NO_COMMAND = (
    "--from can't be combined with a command, whose own settings are the baseline"
)


def parse_plan(arguments: Mapping[str, Any], *, name: str) -> Plan:
    """Return the Plan of a Python call; arguments that are None are left out.

    Raises:
        ConfigError: Arguments break rules; one sentence for each.
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
    current: CurrentSettings | None = None,
) -> Plan:
    """Read a Plan from a configuration file.

    Args:
        path: The YAML file.
        overrides: Values to set, each as `a.b=c` with c in YAML.
        executor: Replaces the file's kind of executor, before the overrides.
        current: A framework's settings, for what file and overrides leave out of the baseline.

    Raises:
        ConfigError: The file can't be read, or breaks rules; one sentence for each.
    """
    folders = (str(path.parent.resolve()), str(Path.cwd()))
    return _plan_of(
        read_document(path), overrides, executor, name=path.stem, folders=folders, current=current
    )


def command_plan(
    command: Sequence[str], overrides: Sequence[str] = (), *, executor: ExecutorKind | None = None
) -> Plan:
    """Return the Plan of a typed command, with defaults and overrides for everything else.

    Raises:
        ConfigError: The command or an override breaks rules; one sentence for each.
    """
    typed = shlex.join(command)
    if len(typed) > _MAX_TYPED:
        typed = f"{typed[: _MAX_TYPED - 3]}..."
    place = Place(source=f"-- {typed}")
    document = Document(
        root=place,
        data={"workload": {"command": list(command)}},
        places={("workload", "command"): place},
    )
    name = command_name(command) if command else ""
    return _plan_of(document, overrides, executor, name=name, folders=(str(Path.cwd()),))


def _plan_of(
    document: Document,
    overrides: Sequence[str],
    executor: ExecutorKind | None,
    *,
    name: str,
    folders: tuple[str, ...],
    current: CurrentSettings | None = None,
) -> Plan:
    """Return the Plan of a document with its overrides."""
    malformed: list[str] = []
    for override in (*_chosen(executor, document), *overrides):
        try:
            apply_override(document, override)
        except ConfigError as error:
            malformed.extend(error.problems)
    read_over = {} if current is None else begin_with(document, current)
    plan, broken = _validate(document.data, name, {READ_PART: partial(_reference, folders=folders)})
    command = None if plan is None else plan.workload.command
    if command is not None:
        path = ("workload", "command")
        absent = _absent(command)
        if absent is not None:
            broken.append(Problem(path=path, text=absent))
        if current is not None:
            text = f"{FROM_NEEDS_NO_COMMAND}; leave --from out"
            broken.append(Problem(path=path, text=text))
    problems = sorted([*document.problems, *document.placed(broken)], key=_reading_order)
    if plan is None or problems or malformed:
        raise ConfigError(*map(str, problems), *malformed)
    return replace(plan, read_over=read_over)


def _validate(
    sections: Mapping[str, Any], name: str, context: dict[str, Any]
) -> tuple[Plan | None, list[Problem]]:
    """Parse the sections of a file or a call; a section that is None ("space:") is left out."""
    given = {key: value for key, value in sections.items() if value is not None}
    problems = [
        Problem(path=(key,), text="unknown key; autotune sets it itself")
        for key, field in _fields(Plan).items()
        if field.exclude and key in given
    ]
    workload = given.get("workload")
    # Anything else than a mapping is wrong, or a Workload that is made already.
    if isinstance(workload, Mapping) and workload.get("command") is None:
        parts = [part for part in ("model", "dataset") if workload.get(part) is None]
        instead = "; or workload.command in their place" if len(parts) > 1 else ""
        for part in parts:
            text = _must_be_given(_fields(Workload), part) + instead
            problems.append(Problem(path=("workload", part), text=text))
    plan, broken = validated(Plan, {**given, "name": name}, context)
    if plan is not None and plan.workload.command is not None and plan.executor.kind != "local":
        text = (
            "must be local with workload.command, whose script runs only on this machine, but got "
            f"{plan.executor.kind!r}; leave executor out, or give a model and a dataset"
        )
        problems.append(Problem(path=("executor",), text=text))
    return plan, [*problems, *broken]


def _absent(command: tuple[str, ...]) -> str | None:
    """Return why a command can't be started in the working directory, or None."""
    start = python_start(command)
    if (
        start is not None
        and start.kind == "script"
        and "{" not in start.target
        and not exists(start.target)  # noqa: PTH110 - no error for any name
    ):
        rule = "the script of a command must exist"
        return f"{rule}, but {_SHORT.repr(start.target)} is not in {Path.cwd()}; check the path"
    if not is_python(command[0]) and shutil.which(with_own_python(command)[0]) is None:
        rule = f"the program of a command must be on PATH, or be a path to a program, but got {_SHORT.repr(command[0])}"
        if isfile(command[0]):  # noqa: PTH113 - no error for any name
            return f"{rule}, which may not be run; write bash before it, or make it executable"
        return f"{rule}; {'write its words apart' if ' ' in command[0] else 'check its name'}"
    return None


def _chosen(executor: ExecutorKind | None, document: Document) -> Iterator[str]:
    """Yield the override for a kind of executor; it keeps the file's other keys if the kind is the same."""
    if executor is not None:
        own = document.data.get("executor")
        is_alike = isinstance(own, dict) and own.get("kind", executor) == executor
        yield f"executor.kind={executor}" if is_alike else f"executor={{kind: {executor}}}"


def _reference(value: object, folders: tuple[str, ...]) -> Ref:
    code, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    is_path = code.endswith(".py")
    if not (colon and _is_dotted(name) and (is_path or _is_dotted(code))):
        raise ValueError(
            f"a reference must be 'package.module:name' or 'path/to/file.py:name', but got "
            f"{value!r:.80}"
        )
    if is_path and not any(isfile(Path(folder, code)) for folder in folders):  # noqa: PTH113 - no error for any name
        places = " or ".join(dict.fromkeys(folders))
        raise ValueError(
            f"the file of a reference must exist, but {code!r} is not in {places}; check the path"
        )
    return Ref(target=f"{code}:{name}", folders=folders)


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _reading_order(problem: Problem) -> tuple[bool, int, int]:
    """Return the position in the file; overrides, which have no line, come last."""
    place = problem.place or Place(source="")
    return (not place.line, place.line, place.column)
