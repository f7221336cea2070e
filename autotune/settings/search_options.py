"""How a search proceeds: what proposes its trials, and what it starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from autotune.frozen import FrozenModel

__all__ = ["Method", "SearchOptions", "checked_path"]

Method = Literal["model", "tpe", "gp", "random", "grid"]


def checked_path(value: object, what: str) -> str | Path:
    """A path that a file system can take.

    Raises:
        ValueError: it is none; `what` should be given.
    """
    if not isinstance(value, str | Path) or value == "" or "\0" in str(value):
        raise ValueError(f"must be {what}, but got {value!r}")
    return value


def _check_source(value: object) -> object:
    return None if value is None else checked_path(value, "the path of a run folder or of a recommended.yaml")


class SearchOptions(FrozenModel):
    """What proposes trials, and what the search starts from."""

    method: Method = "model"
    """model: a model of this machine, learned during the search, with Optuna's TPE where it does not explain the
    measurements; trials that fall behind are stopped early. tpe, gp, random: Optuna's sampler of that name, tpe and gp
    after an expert's guesses. grid: every combination, in random order, of 20,000 at the most. With these each trial is
    measured to its end."""
    warm_start: Annotated[Path | None, BeforeValidator(_check_source)] = None
    """A run folder, or a recommended.yaml, of the same workload on another machine or of a similar one: what it found
    best is tried right after the baseline."""
