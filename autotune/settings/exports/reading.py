"""A framework's own file read into the settings of today, by the table that exports are written by.

Comes in: what the file holds, as plain data. Goes out: a Reading: values for the baseline, and by name what could not
be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from autotune.settings.exports.table import Table

__all__ = ["Reading", "Unread", "file_value", "is_off", "reading", "with_fused"]

_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
"""What YAML 1.1, which the frameworks read, takes for a flag, and YAML 1.2 for a text."""

_FUSED_OPTIMIZERS = {"adamw_torch_fused": "AdamW"}
"""What transformers calls torch's AdamW with fused=True, and its class.

Source: transformers/training_args.py, OptimizerNames.
"""


class Unread(NamedTuple):
    """A name of a framework's file that did not become a part of the baseline."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a framework's own file says of the settings of today."""

    baseline: Mapping[str, Any]
    """Values by our names, those of DDP as "ddp.bucket_cap_mb"."""
    origins: Mapping[str, str]
    """The file's own name for each; none for what the file leaves out, and has the target's own default."""
    unread: tuple[Unread, ...]
    others: tuple[str, ...]
    """Further names that the file sets and that mean nothing here."""
    optimizer: str | None = None
    """The class of the optimizer that the file's `fused` is of; None: not known."""

    @property
    def assumed(self) -> Mapping[str, Any]:
        """The settings that the file leaves out, with the target's own defaults."""
        return {setting: value for setting, value in self.baseline.items() if setting not in self.origins}


def reading(given: Mapping[str, Any], table: Table) -> Reading:
    """What a file of the target says, as plain data with dots in the names of what lies deeper."""
    baseline: dict[str, Any] = {}
    origins: dict[str, str] = {}
    unread: dict[str, str] = {}
    for setting, name in table.names.items():
        value = given.get(name.name)
        if value == "auto":
            unread[name.name] = "auto is decided when training starts; set baseline." + setting
        elif value is not None:
            baseline[setting], origins[setting] = file_value(value, name.kind), name.name
        elif name.own is not None:
            baseline[setting] = name.own
    known = {name.name for name in table.names.values()} | {name for own in table.precisions.values() for name in own}
    precisions = {name: given[name] for name in known if name in given and name in _precision_names(table)}
    amp_dtype = _read_precision(precisions, table)
    if amp_dtype is not None:
        baseline["amp_dtype"], origins["amp_dtype"] = amp_dtype, next(iter(precisions))
    unread |= _unread_precisions(precisions, amp_dtype, table)
    rest = {name: value for name, value in given.items() if name not in known and value}
    unread |= {name: table.unread[name] for name in rest if name in table.unread}
    others = tuple(name for name in rest if name not in {*table.unread, *table.is_silent_on})
    found = tuple(Unread(name, reason) for name, reason in unread.items())
    return Reading(baseline=baseline, origins=origins, unread=found, others=others)


def with_fused(found: Reading, name: str, value: object) -> Reading:
    """A reading of which a name says that the optimizer is the fused one, where it does.

    The trials' optimizer is the one of the workload, of which the file's own name for it tells nothing else.
    """
    if str(value) not in _FUSED_OPTIMIZERS:
        return found
    baseline, origins = {**found.baseline, "fused": True}, {**found.origins, "fused": name}
    return replace(found, baseline=baseline, origins=origins, optimizer=_FUSED_OPTIMIZERS[str(value)])


def file_value(value: Any, kind: str) -> Any:
    """A value as the framework takes it that reads YAML 1.1: yes is a flag, 1e-5 in quotes a number."""
    if isinstance(value, str) and kind == "flag":
        return _WORDS.get(value.lower(), value)
    if isinstance(value, str) and kind == "number":
        try:
            return float(value)
        except ValueError:
            return value  # refused where the baseline is parsed
    return value


def is_off(value: object) -> bool:
    """Whether a switch is off, or not set."""
    return value is None or file_value(value, "flag") is False


def _precision_names(table: Table) -> set[str]:
    return {name for own in table.precisions.values() for name in own}


def _read_precision(given: Mapping[str, Any], table: Table) -> str | None:
    """The amp_dtype of a file's own names: the one all of whose marks are there; None where that can't be told."""
    if not given:
        return None
    for amp_dtype in ("bfloat16", "float16", "tf32", "float32"):
        marks = {name: value for name, value in table.precisions.get(amp_dtype, {}).items() if value is not False}
        if amp_dtype in table.precisions and all(_alike(given.get(name), value) for name, value in marks.items()):
            return amp_dtype if marks or all(is_off(value) for value in given.values()) else None
    return None


def _alike(given: object, value: object) -> bool:
    return file_value(given, "flag") == value if isinstance(value, bool) else str(given).lower() == str(value).lower()


def _unread_precisions(given: Mapping[str, Any], amp_dtype: str | None, table: Table) -> dict[str, str]:
    """Of a file's own names of precisions, what the amp_dtype that was read does not tell."""
    told = table.precisions.get(amp_dtype or "", {})
    left = {name: value for name, value in given.items() if not is_off(value)}
    return {
        name: f"{value!r} has no amp_dtype here; set baseline.amp_dtype"
        if amp_dtype is None
        else f"{value!r} is set beside {amp_dtype}, which is taken"
        for name, value in left.items()
        if amp_dtype is None or not _alike(value, told.get(name, False))
    }
