"""Make a Plan: from a YAML file with overrides, a typed command, or a Python call's arguments.

All three share one parser, which returns a Plan or raises a ConfigError with everything that is
wrong. References are checked for their form, files and programs for existence; a trial finds out
if a module has the name.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
    WITH_A_COMMAND,
    ExecutorKind,
    Plan,
    ReadOver,
    Ref,
    Workload,
)
from autotune.config.training_config import NEUTRAL_WITHOUT_WORKERS
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

# Validation by pydantic, whose errors become messages: rule, value, remedy


_Model = TypeVar("_Model")

_BOOLEAN_WORDS = {
    "yes": "true",
    "on": "true",
    "y": "true",
    "no": "false",
    "off": "false",
    "n": "false",
}
_SHORT_VALUE = Repr()
_SHORT_VALUE.maxstring = _SHORT_VALUE.maxother = 80
_SHORT_VALUE.maxdict = _SHORT_VALUE.maxlist = 6

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
"""Rules by pydantic's kind of error, or by its first word: "int" for "int_parsing"."""
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
        found = [_problem(detail, model_type, data) for detail in error.errors(include_url=False)]
        return None, list(dict.fromkeys(found))


def must_be_given(model_type: Any, name: str) -> str:
    """Return the message for a missing key, with its description."""
    description = _keys(model_type)[name].description
    return "must be given" + (f": {description}" if description else "")


def _problem(detail: ErrorDetails, model_type: type, data: object) -> Problem:
    is_about_key = detail["type"] in _UNKNOWN_KEY
    path = detail["loc"]
    if not is_about_key and detail["type"] != "missing":
        path = _existing(path, data)
    return Problem(path=path, text=_sentence(detail, model_type), is_about_key=is_about_key)


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
    value = detail["input"]
    context = detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind in _UNKNOWN_KEY:
        return f"unknown key; {_nearest(detail['loc'], model_type)}"
    if kind == "missing":
        return must_be_given(_model_at(model_type, detail["loc"][:-1]), str(detail["loc"][-1]))
    template = _RULES.get(kind) or _RULES.get(kind.partition("_")[0])
    rule = template.format(**context) if template else detail["msg"]
    return f"{rule}, but got {_SHORT_VALUE.repr(value)}{_remedy(kind, value, context)}"


def _remedy(kind: str, value: object, context: Mapping[str, Any]) -> str:
    if kind == "bool_type" and str(value).lower() in _BOOLEAN_WORDS:
        return f"; write {_BOOLEAN_WORDS[str(value).lower()]}"
    if kind == "int_type" and isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
        return f"; write {value} without quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind == "literal_error" and isinstance(value, str):
        near = get_close_matches(
            value, re.findall(r"'([^']*)'", context["expected"]), n=1, cutoff=0.5
        )
        return f"; did you mean {near[0]!r}?" if near else ""
    return ""


def _nearest(loc: KeyPath, model_type: type) -> str:
    """Return the remedy for an unknown key: its section, the nearest name, or all allowed names."""
    name = str(loc[-1])
    owner = _model_at(model_type, loc[:-1])
    homes = [*_homes(name, model_type, ()), *_homes(name, owner, loc[:-1])]
    if homes:
        return f"it belongs below {' or '.join(dict.fromkeys(homes))}"
    allowed = list(_keys(owner))
    near = get_close_matches(name.lower(), allowed, n=1)
    return f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(allowed)}"


def _homes(name: str, model_type: type | None, path: KeyPath) -> list[str]:
    """Return the paths of the sections below `path` that have a key of this name."""
    found = []
    for section, field in _keys(model_type).items():
        models = _models_of(field)
        # A field with several models (a domain) is no section.
        if len(models) == 1 and name in _keys(models[0]):
            found.append(".".join(map(str, (*path, section))))
    return found


def _model_at(model_type: type, path: KeyPath) -> type | None:
    """Return the model at a path, or None."""
    owner: type | None = model_type
    for key in path:
        field = _keys(owner).get(str(key))
        owner = next(iter(_models_of(field)), None) if field is not None else None
    return owner


def _models_of(field: FieldInfo) -> list[type]:
    return [choice for choice in (field.annotation, *get_args(field.annotation)) if _keys(choice)]


def _keys(model_type: Any) -> dict[str, FieldInfo]:
    """Return the keys of a model or a pydantic dataclass; none for anything else."""
    fields: dict[str, FieldInfo] = getattr(model_type, "__pydantic_fields__", {})
    return {name: field for name, field in fields.items() if not field.exclude}


# A framework's configuration file as the baseline


_JSON = frozenset({"hf", "deepspeed"})
"""Kinds of file in JSON; the others are YAML."""
_TITLES = {
    "hf": "transformers",
    "axolotl": "axolotl",
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed",
}
_DDP = "ddp."


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
        ConfigError: There is no such kind, or the file can't be read.
    """
    if kind not in READERS:
        raise ConfigError(
            f"a kind of file must be one of {', '.join(READERS)}, but got {kind!r:.80}; check the "
            f"name"
        )
    if kind == "hf" and path.suffix == ".bin":
        rule = "must be TrainingArguments as JSON, but a .bin is a pickle, which could run anything"
        raise ConfigError(f"{path}: {rule}; write args.to_json_string() into a file")
    text = read_text(path)
    document = _json_document(text, path) if kind in _JSON else parse_document(text, str(path))
    if document.problems:
        raise ConfigError(*map(str, document.problems))
    reading = READERS[kind](document.data)
    places = {
        setting: _place(document, reading.origins.get(setting, ""), path)
        for setting in reading.baseline
    }
    return CurrentSettings(kind=kind, path=path, reading=reading, places=places)


def begin_with(document: Document, today: CurrentSettings) -> dict[str, ReadOver]:
    """Add a framework's settings to a document's baseline, unless the document has its own.

    Returns:
        The origins of the settings that were added and that the file contains, without those of
        DistributedDataParallel.
    """
    read_over: dict[str, ReadOver] = {}
    if document.data.get("baseline") is None:
        document.data["baseline"] = {}
    own = document.data["baseline"]
    if not isinstance(own, dict):
        return read_over  # invalid, which the parser reports
    idle = _without_meaning(document, own)
    for setting, value in today.reading.baseline.items():
        if not (setting in own or setting.startswith(_DDP) or setting in idle):
            own[setting] = value
            _locate(document, ("baseline", setting), today.places[setting])
            if setting in today.reading.origins:
                read_over[setting] = ReadOver(
                    today.reading.origins[setting], today.reading.optimizer
                )
    if own.get("strategy") != "ddp" or not isinstance(own.get("ddp", {}), dict):
        return read_over  # DDP's arguments have no meaning, which notes_of reports
    for setting, value in today.reading.baseline.items():
        if setting.startswith(_DDP):
            inner = own.setdefault("ddp", {})
            if (name := setting.removeprefix(_DDP)) not in inner:
                inner[name] = value
                _locate(document, ("baseline", "ddp", name), today.places[setting])
    return read_over


def _without_meaning(document: Document, own: Mapping[str, Any]) -> set[str]:
    """Return the settings of a framework's file that have no meaning with the plan's own values."""
    idle: set[str] = set()
    if own.get("num_workers") == 0 and isinstance(own.get("num_workers"), int):
        idle |= NEUTRAL_WITHOUT_WORKERS.keys()
    if own.get("compile") is False:
        idle.add("compile_mode")
    workload = document.data.get("workload")
    if not isinstance(workload, Mapping) or workload.get("optimizer") is None:
        idle.add("fused")  # it belongs to the file's optimizer, and trials use another
    return idle


def notes_of(today: CurrentSettings, plan: Plan) -> Iterator[Note]:
    """Yield notes on keys that could not be read, and on defaults of the framework that were used."""
    reading = today.reading
    path = str(today.path)
    for name, reason in reading.unread.items():
        yield not_read(path, name, reason)
    idle = [
        reading.origins[name]
        for name in reading.baseline
        if name.startswith(_DDP) and name in reading.origins
    ]
    if idle and plan.baseline.strategy != "ddp":
        yield ddp_without_ranks(path, names=idle)
    taken = [
        f"{name}={value}"
        for name, value in reading.assumed.items()
        if getattr(plan.baseline, name, None) == value
    ]
    if taken:
        yield taken_by_default(path, title=_TITLES[today.kind], values=taken)
    if reading.others:
        yield keys_not_used(path, names=list(reading.others))


def _json_document(text: str, path: Path) -> Document:
    try:
        data = json.loads(text, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ConfigError(f"{path}: must not be nested so deeply; is it a configuration?") from None
    except ValueError as error:
        raise ConfigError(f"{path}: must be JSON, but is not: {error}; check the file") from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: must hold an object of settings, but holds {type(data).__name__}; check the "
            f"file"
        )
    return Document(root=Place(source=str(path)), data=data)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} is given twice")
        found[name] = value
    return found


def _place(document: Document, name: str, path: Path) -> Place:
    """Return the place of a key: its line in YAML, its name in JSON."""
    own: KeyPath = (name,)
    return document.values.get(own) or Place(source=f"{path}: {name}" if name else str(path))


def _locate(document: Document, path: KeyPath, place: Place) -> None:
    document.values[path] = document.keys[path] = place


# The parser


FROM_NEEDS_NO_COMMAND = (
    "--from can't be combined with a command, whose baseline is what the script itself is seen to do, "
    "its framework's "
    "file among it"
)

_MAX_TYPED = 80
"""Most characters of a command in a message."""
_SHORT = Repr()
_SHORT.maxstring = _MAX_TYPED
_NOT_WRITTEN = {
    "name": "unknown key; a plan is named by its file",
    "notes": "unknown key; what can't be taken over is told by autotune",
    "read_over": "unknown key; what is read from a framework's own file is told by autotune",
    "policy": "unknown key; the thresholds of a search are no settings",
}
"""Fields of a Plan that can't be given, each with its message."""
_IDLE_WITH_A_COMMAND = frozenset(field.name for field in fields(Workload)) - {"command"}


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
    today: CurrentSettings | None = None,
) -> Plan:
    """Read a Plan from a configuration file.

    Args:
        path: The YAML file.
        overrides: Values to set, each as `a.b=c` with c in YAML.
        executor: Replaces the file's kind of executor, before the overrides.
        today: A framework's settings, for what file and overrides leave out of the baseline.

    Raises:
        ConfigError: The file can't be read, or breaks rules; one sentence for each.
    """
    folders = (str(path.parent.resolve()), str(Path.cwd()))
    return _plan_of(
        read_document(path), overrides, executor, name=path.stem, folders=folders, today=today
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
    workload = {"command": list(command)}
    values: dict[KeyPath, Place] = {("workload",): place, ("workload", "command"): place}
    document = Document(
        root=place, data={"workload": workload}, values=dict(values), keys=dict(values)
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
    today: CurrentSettings | None = None,
) -> Plan:
    """Return the Plan of a document with its overrides."""
    malformed: list[str] = []
    for override in (*_chosen(executor, document), *overrides):
        try:
            apply_override(document, override)
        except ConfigError as error:
            malformed.extend(error.problems)
    read_over = {} if today is None else begin_with(document, today)
    plan, broken = _validate(document.data, name, {READ_PART: partial(_reference, folders=folders)})
    command = None if plan is None else plan.workload.command
    if command is not None:
        path = ("workload", "command")
        absent = _absent(command)
        if absent is not None:
            broken.append(Problem(path=path, text=absent))
        if today is not None:
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
        Problem(path=(key,), text=text, is_about_key=True)
        for key, text in _NOT_WRITTEN.items()
        if key in given
    ]
    workload = given.get("workload")
    if isinstance(workload, Mapping):  # else it is wrong, or a Workload that is made already
        problems += _one_way_to_train(workload)
        if workload.get("command") is not None:
            given["workload"] = {
                key: value for key, value in workload.items() if key not in _IDLE_WITH_A_COMMAND
            }
    plan, broken = validated(Plan, {**given, "name": name}, context)
    if plan is not None and plan.workload.command is not None and plan.executor.kind != "local":
        rule = "must be local beside workload.command, whose script runs on this machine alone"
        remedy = "leave executor out, or give a model and a dataset"
        problems.append(
            Problem(path=("executor",), text=f"{rule}, but got {plan.executor.kind!r}; {remedy}")
        )
    return plan, [*problems, *broken]


def _one_way_to_train(workload: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of a workload that is not either a model and a dataset, or only a command."""
    if workload.get("command") is not None:
        for part in workload:
            if part in _IDLE_WITH_A_COMMAND and workload[part] is not None:
                yield Problem(
                    path=("workload", part),
                    text=f"{WITH_A_COMMAND}; leave it out, or the command",
                )
        return
    parts = [part for part in ("model", "dataset") if workload.get(part) is None]
    instead = (
        "; or workload.command in their place: what you type to train" if len(parts) > 1 else ""
    )
    for part in parts:
        yield Problem(path=("workload", part), text=must_be_given(Workload, part) + instead)


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
    place = problem.place
    return (True, 0, 0) if place is None or not place.line else (False, place.line, place.column)
