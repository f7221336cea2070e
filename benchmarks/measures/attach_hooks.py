"""What watching adds to a step: the same tiny loop with the hooks and without, in turns, in processes of their own.

The loop loads ready tensors and steps an optimizer over four numbers, so that little beside the hooks differs. While a
window is timed the conductor hands each batch over by two switches of greenlets, which is part of what is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any

from benchmarks import ROOT

__all__ = ["measure_hooks"]

_LOOP = """
import sys, json, torch
from time import perf_counter
from torch.utils.data import DataLoader, TensorDataset

attached = sys.argv[1] == "attached"
spent = []

if attached:
    from types import SimpleNamespace
    from pathlib import Path
    from autotune.protocol.disk import TrialFolder
    from autotune.config.training_config import TrainingConfig
    from autotune.worker.script.session import Session
    from autotune.worker.script.hooks import install
    from autotune.worker.script.overrides import Overrides
    from autotune.worker.place import Place

    def drive(scene):
        while True:
            scene.trainer.train(scene.feed.take().batch)

    job = SimpleNamespace(script=None, process=SimpleNamespace(limit_bytes=None))
    install(Session(job, Overrides(TrainingConfig(), None), Place(TrialFolder(Path("/nowhere")), 0, 0), drive))

torch.set_num_threads(1)
data = TensorDataset(torch.randn(3000, 1))
loader = DataLoader(data, batch_size=1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for epoch in range(4):
    begun = perf_counter()
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    spent.append((perf_counter() - begun) / len(loader))
print(json.dumps(min(spent[1:])), flush=True)
import os; os._exit(0)
"""


def measure_hooks(*, rounds: int) -> dict[str, Any]:
    """Microseconds a step of either loop, and what watching adds, as medians over rounds."""
    seen: dict[str, list[float]] = {"plain": [], "attached": []}
    for number in range(rounds):
        for kind in ("plain", "attached") if number % 2 == 0 else ("attached", "plain"):
            done = subprocess.run(
                [sys.executable, "-c", _LOOP, kind],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
                timeout=120,
            )
            seen[kind].append(1e6 * json.loads(done.stdout.splitlines()[-1]))
    added = [
        watched - plain for watched, plain in zip(seen["attached"], seen["plain"], strict=True)
    ]
    return {"plain_us": median(seen["plain"]), "attached_us": median(seen["attached"]), "added_us": median(added),
            "rounds": seen}  # fmt: skip
