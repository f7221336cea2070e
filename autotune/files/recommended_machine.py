"""What recommended.yaml says of the machine that it was found on: written, read back, and compared with another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.files.yaml_document import read_document
from autotune.settings.environment import COMPARED, Environment

__all__ = ["describe_machine", "differing_fields", "read_machine"]

_KEYS = {"device_name": "name", "device_count": "devices"}
"""What the file calls the fields by which machines are compared, where that is another name."""


def describe_machine(environment: Environment) -> dict[str, object]:
    """What the file says of a machine: the fields by which two machines are compared, device, Python, fingerprint."""
    compared = {_KEYS.get(name, name): value for name, value in environment.comparable().items()}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in compared.items()}
    return {"device": environment.device, **plain, "python": environment.python, "fingerprint": environment.fingerprint}


def read_machine(path: Path) -> dict[str, object]:
    """What a recommended.yaml says of the machine that it was found on; empty where it says nothing."""
    machine = read_document(path).data.get("machine")
    return dict(machine) if isinstance(machine, dict) else {}


def differing_fields(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """Describe each field in which two machines differ, of those that both have: "driver 550 there, 570 here".

    Args:
        there: As a file describes it, which may hold anything.
        here: As `describe_machine` does, or a part of that.
    """
    keys = ((name, _KEYS.get(name, name)) for name in COMPARED)
    return [
        f"{COMPARED[name]} {_shown(there[key])} there, {_shown(here[key])} here"
        for name, key in keys
        if key in there and key in here and there[key] != here[key]
    ]


def _shown(value: object) -> str:
    """A value of a file, which may hold anything, in a few printable characters."""
    text = "none" if value is None else str(value)
    return "".join(character if character.isprintable() else "?" for character in text[:60])
