"""What a case of benchmarks/settings.py is: a job on which a setting wins, loses or does nothing.

The cases stand in settings_loader.py, settings_step.py and settings_binding.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.cases.cpu import Case

__all__ = ["Effect", "SettingCase"]

Effect = Literal["wins", "nothing", "loses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingCase:
    """A job, and what a setting should do to its rate."""

    case: Case | None
    """The job, with what is run today in its `settings`; None: on paper, see settings_paper.py."""
    setting: str
    """By TrainingConfig's name."""
    value: Any
    """What is tried in place of today's."""
    expects: Effect
    where: Literal["here", "paper"]
    """On this machine, or on a simulated one."""
    why: str
    """Why, in a sentence."""
