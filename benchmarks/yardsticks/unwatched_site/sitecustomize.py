"""Counts a script's optimizer steps, and notes two times; stands first on the PYTHONPATH of an unwatched run.

From the first step on it lets UNWATCHED_SKIP_S seconds pass, then notes the step and the time, and again UNWATCHED_S
seconds later; then the process ends. A counter and a clock a step are all that it adds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import perf_counter

_SKIP_S = float(os.environ.get("UNWATCHED_SKIP_S", "3"))
_LONG_S = float(os.environ.get("UNWATCHED_S", "6"))


def _watch(_module: object) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps: dict[int, int] = {}
    noted: list[tuple[float, int]] = []

    def on_step(optimizer: object, *_: object) -> None:
        now, count = perf_counter(), steps.get(id(optimizer), 0) + 1
        steps[id(optimizer)] = count
        if count < max(steps.values()) or os.environ.get("RANK", "0") != "0":
            return
        if not noted or (len(noted) == 1 and now - noted[0][0] >= _SKIP_S):
            noted.append((now, count))
        elif len(noted) == 2 and now - noted[1][0] >= _LONG_S:
            seconds, taken = now - noted[1][0], count - noted[1][1]
            Path(os.environ["UNWATCHED_FILE"]).write_text(json.dumps({"steps": taken, "seconds": seconds}))
            os._exit(0)

    register_optimizer_step_post_hook(on_step)


if "UNWATCHED_FILE" in os.environ:
    from autotune.worker.attach.seams.imports import after_import  # imports neither torch nor anything that watches

    after_import("torch", _watch)
