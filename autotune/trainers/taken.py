"""What is taken from a framework's objects, whichever framework it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.messages.workload import beside_training
from autotune.note import Note

__all__ = ["Taken", "note_beside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a workload is made of, by the names of `search`, and what is to be said of it."""

    name: str
    """The model's class."""
    model: Any
    dataset: Any
    """A DataLoader, or what was given."""
    optimizer: Any
    step: Callable[..., Any] | None
    baseline: Mapping[str, Any]
    """Settings of a TrainingConfig, by name."""
    notes: tuple[Note, ...] = ()


def note_beside(framework: str, names: list[str]) -> tuple[Note, ...]:
    """What a trainer does beside the step that does not run in trials."""
    return (beside_training(framework, [*dict.fromkeys(names)]),) if names else ()
