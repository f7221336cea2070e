"""A framework's own configuration file as the baseline: what one trains with today.

Comes in: the kind of the file and its path. Goes out: a Today, which fills what a plan's document leaves open below
`baseline`, each value with its place in the framework's file; and by name what could not be read over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.files.yaml_document import Document, KeyPath, Place, parse_document, read_text
from autotune.messages.framework_files import ddp_without_ranks, keys_not_used, not_read, taken_by_default
from autotune.note import Note
from autotune.settings.contradictions import NEUTRAL_WITHOUT_WORKERS
from autotune.settings.exports.reading import Reading
from autotune.settings.exports.registry import READERS, read_settings
from autotune.settings.plan import Plan, ReadOver

__all__ = ["Today", "begin_with", "notes_of", "read_today"]

_JSON = frozenset({"hf", "deepspeed"})
"""Kinds that their frameworks read as JSON; the others as YAML."""
_TITLES = {"hf": "transformers", "axolotl": "axolotl", "accelerate": "accelerate", "deepspeed": "DeepSpeed"}
_DDP = "ddp."


@dataclass(frozen=True, slots=True, kw_only=True)
class Today:
    """What a framework's own file says of the settings of today."""

    kind: str
    path: Path
    reading: Reading
    places: Mapping[str, Place]
    """Where each setting stands in the file; for what the file leaves out, the file itself."""


def read_today(kind: str, path: Path) -> Today:
    """Read a framework's own file.

    Args:
        kind: One of hf, accelerate, deepspeed and axolotl.
        path: The file.

    Raises:
        ConfigError: there is no such kind, or the file can't be read: rule, value, remedy.
    """
    if kind not in READERS:
        raise ConfigError(f"a kind of file must be one of {', '.join(READERS)}, but got {kind!r:.80}; check the name")
    if kind == "hf" and path.suffix == ".bin":
        rule = "must be TrainingArguments as JSON, but a .bin is a pickle, which could run anything"
        raise ConfigError(f"{path}: {rule}; write args.to_json_string() into a file")
    text = read_text(path)
    document = _json_document(text, path) if kind in _JSON else parse_document(text, str(path))
    if document.problems:
        raise ConfigError(*map(str, document.problems))
    reading = read_settings(kind, document.data)
    places = {setting: _place(document, reading.origins.get(setting, ""), path) for setting in reading.baseline}
    return Today(kind=kind, path=path, reading=reading, places=places)


def begin_with(document: Document, today: Today) -> dict[str, ReadOver]:
    """Fill what a plan's document leaves open below `baseline`: what stands there was said, and wins.

    Returns:
        What was filled with something that stands in the file, but for DistributedDataParallel's arguments.
    """
    read_over: dict[str, ReadOver] = {}
    if document.data.get("baseline") is None:
        document.data["baseline"] = {}
    own = document.data["baseline"]
    if not isinstance(own, dict):
        return read_over  # wrong itself, which the plan's parser tells
    idle = _without_meaning(document, own)
    for setting, value in today.reading.baseline.items():
        if not (setting in own or setting.startswith(_DDP) or setting in idle):
            own[setting] = value
            _locate(document, ("baseline", setting), today.places[setting])
            if setting in today.reading.origins:
                read_over[setting] = ReadOver(today.reading.origins[setting], today.reading.optimizer)
    if own.get("strategy") != "ddp" or not isinstance(own.get("ddp", {}), dict):
        return read_over  # DistributedDataParallel's arguments have no meaning; notes_of tells it
    for setting, value in today.reading.baseline.items():
        if setting.startswith(_DDP):
            inner = own.setdefault("ddp", {})
            if (name := setting.removeprefix(_DDP)) not in inner:
                inner[name] = value
                _locate(document, ("baseline", "ddp", name), today.places[setting])
    return read_over


def _without_meaning(document: Document, own: Mapping[str, Any]) -> set[str]:
    """Settings of a framework's file that what the plan says leaves without a meaning."""
    idle: set[str] = set()
    if own.get("num_workers") == 0 and isinstance(own.get("num_workers"), int):
        idle |= NEUTRAL_WITHOUT_WORKERS.keys()
    if own.get("compile") is False:
        idle.add("compile_mode")
    workload = document.data.get("workload")
    if not isinstance(workload, Mapping) or workload.get("optimizer") is None:
        idle.add("fused")  # the file's is of its own optimizer, and trials take another
    return idle


def notes_of(today: Today, plan: Plan) -> Iterator[Note]:
    """What could not be read over, and what was taken from the framework's own defaults."""
    reading, path = today.reading, str(today.path)
    for name, reason in reading.unread:
        yield not_read(path, name, reason)
    idle = [reading.origins[name] for name in reading.baseline if name.startswith(_DDP) and name in reading.origins]
    if idle and plan.baseline.strategy != "ddp":
        yield ddp_without_ranks(path, names=idle)
    taken = [
        f"{name}={value}" for name, value in reading.assumed.items() if getattr(plan.baseline, name, None) == value
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
        raise ConfigError(f"{path}: must hold an object of settings, but holds {type(data).__name__}; check the file")
    return Document(root=Place(source=str(path)), data=data)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} is given twice")
        found[name] = value
    return found


def _place(document: Document, name: str, path: Path) -> Place:
    """Where a name of the framework's stands: by line in YAML, by itself in JSON."""
    own: KeyPath = (name,)
    return document.values.get(own) or Place(source=f"{path}: {name}" if name else str(path))


def _locate(document: Document, path: KeyPath, place: Place) -> None:
    document.values[path] = document.keys[path] = place
