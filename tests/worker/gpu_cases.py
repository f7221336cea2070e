"""What the tests on a GPU run: workloads that each ask one thing of a device, and one trial of them.

Imported inside the trials as well. A `Witness` writes down where and in which precision a step really computed, which
no measurement tells.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from autotune.config.plan import Workload
from autotune.config.training_config import AmpDtype, TrainingConfig
from autotune.launch.launcher import Launcher
from autotune.launch.runner import TrialRunner
from autotune.policy import WindowRules
from autotune.protocol.messages import NO_EXTRAS, Extras
from autotune.protocol.payload import write_payload
from autotune.records.measurement import MemoryLimits
from autotune.records.trial import TrialResult
from autotune.worker.device import tf32_overrides

GIB = 2**30
MUST_HAVE_GPU = "AUTOTUNE_TEST_GPU"
"""Variable that `make test-gpu` sets: there is to be a GPU, and without one nothing has been shown."""
_SWITCHES: dict[AmpDtype, tuple[str, ...]] = {
    "float32": ("NVIDIA_TF32_OVERRIDE=1", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"),
    "tf32": ("NVIDIA_TF32_OVERRIDE=0",),
}
"""Of a container's switches those under which a precision may compute as another does."""
_WORKLOAD = ("model", "dataset", "loss", "step", "collate_fn")
EVERYTHING = Extras(loader_ceiling=True, device_ceiling=True, breakdown=True)
_LOOK = """
import contextlib, json, torch
found = {"busy_fraction": 0.0}
with contextlib.suppress(Exception):  # NVML does not tell everywhere
    found["busy_fraction"] = torch.cuda.utilization(0) / 100
found |= {"names": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]}
torch.zeros(1, device="cuda")
free, total = torch.cuda.mem_get_info()
print(json.dumps(found | {"used_bytes": total - free, "free_bytes": free}))
"""

TRAINS_COMPILED = """
import torch
from torch._dynamo.utils import counters
from autotune.config.training_config import TrainingConfig
from tests.worker.gpu_cases import rows, small_net

model = TrainingConfig(micro_batch_size=64, compile=True).prepare(small_net(), "cuda:0")
inputs, targets = (part[:64].to("cuda:0") for part in rows().tensors)
torch.nn.functional.cross_entropy(model(inputs), targets).backward()
print(counters["inductor"]["fxgraph_cache_hit"])
"""
"""Prints how much of what a compiled model needed was there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The CUDA devices here, as a process of its own has seen them."""

    missing: str
    """Why there is none to test on; "" where there is."""
    names: tuple[str, ...] = ()
    used_bytes: int = 0
    """Memory in use on the first one with one context open: that context's, the driver's and other processes'."""
    free_bytes: int = 0
    busy_fraction: float = 0.0
    """Share of the last second in which others' kernels ran on the first one, as far as NVML tells."""


@cache
def look_for_gpus() -> Gpus:
    """Ask a process of its own: a context in this one would be inherited by what it forks, and break it."""
    if torch.version.cuda is None:
        return Gpus(missing=f"torch {torch.__version__} is built without CUDA")
    look = subprocess.run(
        [sys.executable, "-c", _LOOK], capture_output=True, text=True, check=False
    )
    if look.returncode != 0:
        return Gpus(
            missing=f"no CUDA device works here: {(look.stderr.strip() or 'no reason given').splitlines()[-1]}"
        )
    found = json.loads(look.stdout)
    return Gpus(missing="", **(found | {"names": tuple(found["names"])}))


def leave_out(missing: str) -> NoReturn:
    """Skip for want of a GPU, or fail where there was to be one."""
    if os.environ.get(MUST_HAVE_GPU) == "1":
        pytest.fail(missing)
    pytest.skip(missing)


def switch_of(amp_dtype: AmpDtype) -> str:
    """The variable that is set here, and under which a precision may not be what torch makes of it; "" for none."""
    found = (
        one.partition("=")[0] for one in tf32_overrides() if one in _SWITCHES.get(amp_dtype, ())
    )
    return next(found, "")


def run(
    launcher: Launcher,
    folder: Path,
    device: str = "cuda:0",
    limit_bytes: int | None = None,
    **given: Any,
) -> TrialResult:
    """One trial: its workload's parts, `max_s` and `extras` of its window, and settings."""
    workload = {name: given.pop(name) for name in _WORKLOAD if name in given}
    runner = runner_of(launcher, folder, device, limit_bytes, **workload)
    window, extras = WindowRules(max_s=given.pop("max_s", 0.5)), given.pop("extras", NO_EXTRAS)
    config = TrainingConfig(**({"micro_batch_size": 64} | given))
    return runner.run(config, name="trial", deadline_s=60, window=window, extras=extras)


def runner_of(
    launcher: Launcher,
    folder: Path,
    device: str = "cuda:0",
    limit_bytes: int | None = None,
    **workload: Any,
) -> TrialRunner:
    """What runs trials of a workload; of a small one where nothing is given."""
    named: dict[str, Any] = {"model": small_net, "dataset": rows}
    write_payload(Workload(**(named | workload)), folder / "payload")
    return TrialRunner(
        launcher=launcher,
        payload=folder / "payload",
        scratch=folder,
        logs=folder,
        device=device,
        seed=0,
        limits=MemoryLimits(limit_bytes=limit_bytes),
    )


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))


def rows() -> TensorDataset:
    return TensorDataset(torch.randn(8192, 64), torch.randint(0, 2, (8192,)))


class Heavy(nn.Module):
    """412 GFLOP a step of 1024: milliseconds on any device."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [layer for _ in range(4) for layer in (nn.Linear(4096, 4096), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(64, 4096), *hidden, nn.Linear(4096, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


class Wide(nn.Module):
    """Takes 4 MiB of activations a sample, and as much again twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 2**20), nn.Linear(2**20, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(inputs).relu())
        return outputs


class TinyKernels(nn.Module):
    """Some 600 kernels a step, each of some 2 us: the host can't launch them as fast as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.head = nn.Parameter(torch.ones(200)), nn.Linear(64, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        for scale in self.scales.unbind():
            inputs = inputs * scale
        outputs: Tensor = self.head(inputs)
        return outputs


class LooksUp(nn.Module):
    """An embedding of ten rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.table(rows)  # the row beyond the table
        return found


def place_of_the_lookup() -> str:
    """Where `LooksUp` looks up, as a failure's signature names it."""
    lines = Path(__file__).read_text().splitlines()
    number = next(
        number
        for number, line in enumerate(lines, 1)
        if line.endswith("# the row beyond the table")
    )
    return f"{Path(__file__).name}:{number}"


def rows_beyond_the_table() -> TensorDataset:
    """One in 500 items names a row that there is not."""
    wanted = torch.arange(5000) % 10
    wanted[::500] = 10
    return TensorDataset(wanted, torch.zeros(5000, dtype=torch.long))


class Indices(Dataset[int]):
    """Items that cost nothing."""

    def __len__(self) -> int:
        return 16 * 1024

    def __getitem__(self, index: int) -> int:
        return index


class SleepingRows(Dataset[tuple[Tensor, int]]):
    """Items that take 2 ms without any work."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.002)
        return torch.zeros(64), index % 2


class ReadyBatches:
    """Gives the same batch whatever the items: one that costs its copy to the device alone."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.batch: tuple[Tensor, Tensor] | None = None

    def __call__(self, items: list[int]) -> tuple[Tensor, Tensor]:
        if self.batch is None or len(self.batch[0]) != len(items):
            self.batch = (
                torch.ones(len(items), self.width),
                torch.zeros(len(items), dtype=torch.long),
            )
        return self.batch


class FirstNumbers(nn.Module):
    """Looks at next to nothing of what was copied."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(inputs[:, :16])
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a step did, as it saw it itself."""

    device: str
    """Type of the batch's device."""
    dtype: str
    """Of what the model's last layer gave."""
    backend: str | None
    """Of the process group; None where there is none."""
    rounding: float
    """Largest error of a product of float32 matrices, as a share of its largest value."""


@dataclass(frozen=True, slots=True)
class Witness:
    """A step that writes down, the first time, where and how it computes."""

    path: Path

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a pair of inputs and classes."""
        inputs, targets = batch
        outputs = model(inputs)
        if not self.path.exists():
            seen = Seen(
                device=inputs.device.type,
                dtype=str(outputs.dtype),
                backend=distributed.get_backend() if distributed.is_initialized() else None,
                rounding=_rounding(inputs.device),
            )
            self.path.write_text(json.dumps(asdict(seen)))
        return functional.cross_entropy(outputs.float(), targets)

    def told(self) -> Seen:
        """What was written down."""
        return Seen(**json.loads(self.path.read_text()))


def _rounding(device: torch.device) -> float:
    factor = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).to(device)
    exact = factor.double() @ factor.double()
    return float(((factor @ factor).double() - exact).abs().max() / exact.abs().max())


def convolve_in_full_memory(model: nn.Module, batch: Any) -> Tensor:
    """A step that fills the memory which the cap leaves to the last few MiB, then convolves, by cuDNN on a GPU."""
    inputs, _ = batch
    held = []
    for size in (256 * 2**20, 2**25, 2**22):
        try:
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device=inputs.device))
        except torch.OutOfMemoryError:
            continue
    outputs: Tensor = model(inputs)
    return outputs.square().mean()


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3))


def images() -> TensorDataset:
    return TensorDataset(torch.randn(256, 3, 32, 32), torch.zeros(256, dtype=torch.long))
