"""Counts a script's optimizer steps and times them; stands first on the PYTHONPATH of an unwatched run.

From the first step on it lets UNWATCHED_SKIP_S seconds pass, then counts steps for UNWATCHED_S seconds; then the
process ends. Seconds in which the script evaluates, from Module.eval to Module.train, do not count: it is the rate of
training that is compared. A counter and a clock a step are all that it adds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import perf_counter
from typing import Any

_SKIP_S = float(os.environ.get("UNWATCHED_SKIP_S", "3"))
_LONG_S = float(os.environ.get("UNWATCHED_S", "6"))


class _Counter:
    """What is known of a run: the steps of each optimizer, and of those that count their number and their seconds."""

    def __init__(self, module: Any) -> None:
        self.module, self.train, self.eval = module, module.train, module.eval
        self.of_each: dict[int, int] = {}
        self.first: float | None = None
        self.last = 0.0
        self.steps = 0
        self.seconds = 0.0
        self.evaluates_since: float | None = None
        self.evaluated_s = 0.0
        """Since the last step."""

    def on_step(self, optimizer: object, *_: object) -> None:
        """Count a step of the optimizer that makes most; end the process when there have been enough."""
        now, most, count = (
            perf_counter(),
            max(self.of_each.values(), default=0),
            self.of_each.get(id(optimizer), 0) + 1,
        )
        self.of_each[id(optimizer)] = count
        if count <= most or os.environ.get("RANK", "0") != "0":
            return
        self.first = now if self.first is None else self.first
        if self.last - self.first >= _SKIP_S:
            self.steps += 1
            self.seconds += now - self.last - self.evaluated_s
        self.last, self.evaluated_s = now, 0.0
        if (
            self.evaluates_since is not None
        ):  # a part of the model is kept so; it trains all the same
            self._ends_evaluating()
        if self.seconds >= _LONG_S:
            noted = {"steps": self.steps, "seconds": self.seconds}
            file = Path(os.environ["UNWATCHED_FILE"])
            file.with_suffix(".part").write_text(json.dumps(noted))
            file.with_suffix(".part").rename(file)
            os._exit(0)

    def on_eval(self, module: Any) -> Any:
        """In place of Module.eval."""
        if self.evaluates_since is None:
            self.evaluates_since, self.module.train = (
                perf_counter(),
                lambda part, mode=True: self.on_train(part, mode),
            )
        return self.eval(module)

    def on_train(self, module: Any, mode: bool = True) -> Any:
        """In place of Module.train while the script evaluates."""
        if mode and self.evaluates_since is not None:
            self.evaluated_s += perf_counter() - self.evaluates_since
            self._ends_evaluating()
        return self.train(module, mode)

    def _ends_evaluating(self) -> None:
        self.evaluates_since, self.module.train = None, self.train


def _watch(_module: object) -> None:
    from torch.nn import Module
    from torch.optim.optimizer import register_optimizer_step_post_hook

    counter = _Counter(Module)

    def noted_eval(module: Any) -> Any:
        return counter.on_eval(module)

    Module.eval = noted_eval  # type: ignore[method-assign, assignment]
    register_optimizer_step_post_hook(counter.on_step)


if "UNWATCHED_FILE" in os.environ:
    # Imports neither torch nor anything that watches
    from autotune.worker.script.patching import after_import

    after_import("torch", _watch)
