"""Classes and lambdas of a script without a `__main__` guard reach trials, and loader workers that are not forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import threading
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.launch.local import LocalLauncher
from autotune.launch.runner import TrialRunner
from autotune.policy import WindowRules
from autotune.protocol.payload import write_payload

with open("starts", "a") as file:
    print("started", file=file)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        return self.layer(x)

class Data(Dataset):
    def __init__(self):
        self.x, self.scale = torch.randn(5000, 4), lambda x: x * 2
    def __len__(self):
        return 64
    def __getitem__(self, i):
        maps = open("/proc/self/maps").read()
        assert get_worker_info() is None or "/bytes" in maps, "the tensor is mapped, not copied"
        return self.scale(self.x[i]), i % 2

def collate(items):
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])

here = Path.cwd()
launcher = LocalLauncher(here / "server.log")
config = TrainingConfig(micro_batch_size=32, num_workers=1, persistent_workers=True)
window = WindowRules(max_s=0.2, precision=10.0, block_s=0.01)
for method in ("fork", "spawn", "forkserver"):
    workload = Workload(
        model=Net(), dataset=Data(), collate_fn=lambda items: collate(items),
        loss=lambda o, y: nn.functional.cross_entropy(o, y), optimizer=lambda p, lr: torch.optim.SGD(p, lr),
        worker_init_fn=lambda number: Path(f"{method}-{number}").touch(),
        multiprocessing_context=method,
    )
    payload = here / f"payload-{method}"
    write_payload(workload, payload)
    runner = TrialRunner(launcher=launcher, payload=payload, scratch=here, logs=here, device="cpu", seed=0)
    result = runner.run(config, name=method, deadline_s=100, window=window)
    print(method, result.outcome, result.reason)
launcher.close()
"""


@pytest.mark.slow
def test_objects_of_an_unguarded_script_reach_loader_workers_however_these_start(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    methods = ["fork", "spawn", "forkserver"]
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    told = [line.strip() for line in done.stdout.splitlines()]
    assert told == [f"{method} ok" for method in methods], f"{done.stdout}\n{done.stderr}\n{logs}"
    assert [method for method in methods if not (tmp_path / f"{method}-0").exists()] == [], (
        "worker_init_fn was called"
    )
    assert (tmp_path / "starts").read_text().split() == ["started"], (
        "no trial runs the script again"
    )
