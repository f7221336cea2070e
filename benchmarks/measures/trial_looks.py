"""Short looks at the machine's speed from inside a trial, right before it is built and right after its window.

`looked_at` gives a Case whose trials append their looks, a line of JSON each, to a file: its model's builder runs in
the trial's process, where it puts a look behind the function that measures the window. Nothing of it is in the product.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from autotune.worker import trial
from autotune.worker import window as loop
from benchmarks.cases.cpu import Case
from benchmarks.quietness import look_at_speeds

__all__ = ["looked_at"]

_PROBE_S, _FLOATS = 0.01, 2 * 2**20
"""Of each of three kinds; a copy of 8 MiB takes a few milliseconds."""


def looked_at(case: Case, notes: Path) -> Case:
    """The case, whose trials note {"before": speeds, "after": speeds}."""
    return replace(case, model=_Looking(case.model, notes))


@dataclass(frozen=True, slots=True)
class _Looking:
    build: Callable[[], nn.Module]
    notes: Path

    def __call__(self) -> nn.Module:
        before, measure = look_at_speeds(_PROBE_S, _FLOATS), loop.measure_window

        def measure_and_look(*arguments: Any) -> Any:
            window = measure(*arguments)
            with self.notes.open("a") as file:
                file.write(
                    json.dumps({"before": before, "after": look_at_speeds(_PROBE_S, _FLOATS)})
                    + "\n"
                )
            return window

        vars(trial)[loop.measure_window.__name__] = measure_and_look
        return self.build()
