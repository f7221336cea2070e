"""What only a CUDA device can show. Each test runs a trial in a process of its own, as a study does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from autotune import diagnosing
from autotune.api import diagnose_plan
from autotune.core.plan import Plan
from autotune.core.training_config import TrainingConfig
from autotune.core.trial import TrialResult
from autotune.core.workload import Workload
from autotune.diagnosing import Pace
from autotune.launch.fork_server import ForkServerLauncher
from autotune.launch.runner import TrialRunner
from autotune.protocol import NO_EXTRAS, Extras, WindowRules, write_payload

NVML_SOURCE = "NVML utilization"  # autotune.core.busy.NVML_SOURCE, spelled out: it stands in users' reports
PROFILER_SOURCE = "profiler: kernels and copies"  # autotune.core.busy.PROFILER_SOURCE
GIB = 2**30

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None or torch.cuda.device_count() == 0, reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServerLauncher]:
    """One server for all."""
    launcher = ForkServerLauncher(tmp_path_factory.mktemp("server") / "server.log")
    yield launcher
    launcher.close()


class Wide(nn.Module):
    """Keeps 4 MiB of activations a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 2**20), nn.Linear(2**20, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(self.first(inputs).relu())
        return outputs


def image_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


def images() -> TensorDataset:
    return TensorDataset(torch.randn(512, 3, 64, 64), torch.randint(0, 10, (512,)))


def rows() -> TensorDataset:
    return TensorDataset(torch.randn(8192, 64), torch.randint(0, 2, (8192,)))


def run(
    launcher: ForkServerLauncher, folder: Path, limit_bytes: int | None = None, max_s: float = 1.0, **given: Any
) -> TrialResult:
    """One trial on the first CUDA device; `model` and `dataset` are the workload's, the rest are settings."""
    parts = {name: given.pop(name) for name in ("model", "dataset", "step") if name in given}
    named: dict[str, Any] = {"model": image_net, "dataset": images} | parts
    write_payload(Workload(**named), folder / "payload")
    runner = TrialRunner(
        launcher=launcher,
        payload=folder / "payload",
        scratch=folder,
        logs=folder,
        device="cuda:0",
        seed=0,
        limit_bytes=limit_bytes,
    )
    extras = given.pop("extras", NO_EXTRAS)
    config = TrainingConfig(**({"micro_batch_size": 64} | given))
    return runner.run(config, name="trial", deadline_s=110, window=WindowRules(max_s=max_s), extras=extras)


@pytest.mark.parametrize("amp_dtype", ["float32", "tf32", "bfloat16", "float16"])
def test_each_precision_trains(amp_dtype: str, launcher: ForkServerLauncher, tmp_path: Path) -> None:
    result = run(launcher, tmp_path, amp_dtype=amp_dtype, channels_last=True)
    assert result.outcome == "ok", result.reason
    assert result.measurement is not None
    assert result.measurement.samples_per_s > 0


def test_a_peak_is_what_torch_reserved_and_what_lies_outside_it(launcher: ForkServerLauncher, tmp_path: Path) -> None:
    memory = run(launcher, tmp_path).measurement
    assert memory is not None
    assert memory.memory.reserved_bytes is not None
    assert memory.memory.outside_bytes is not None
    assert memory.memory.reserved_bytes > 0
    assert memory.memory.outside_bytes > 0, "the context alone takes hundreds of MB"
    assert memory.peak_memory_bytes == memory.memory.reserved_bytes + memory.memory.outside_bytes


def test_what_does_not_fit_below_the_limit_is_an_out_of_memory_and_the_next_trial_works(
    launcher: ForkServerLauncher, tmp_path: Path
) -> None:
    limit, fitting, bursting = 6 * GIB, 64, 4096  # 0.3 GiB and 16 GiB of activations
    failed = run(launcher, tmp_path, limit_bytes=limit, model=Wide, dataset=rows, micro_batch_size=bursting)
    assert failed.outcome == "oom", failed.reason
    assert failed.violation is not None
    assert failed.violation > 0
    worked = run(launcher, tmp_path, limit_bytes=limit, model=Wide, dataset=rows, micro_batch_size=fitting)
    assert worked.outcome == "ok", worked.reason
    assert worked.measurement is not None
    assert worked.measurement.peak_memory_bytes <= limit


def test_the_same_batch_fits_without_the_limit(launcher: ForkServerLauncher, tmp_path: Path) -> None:
    if torch.cuda.mem_get_info(0)[0] < 40 * GIB:
        pytest.skip("needs 40 GiB of free device memory")
    result = run(launcher, tmp_path, model=Wide, dataset=rows, micro_batch_size=4096)
    assert result.outcome == "ok", result.reason


def test_busyness_comes_from_nvml_where_it_answers(launcher: ForkServerLauncher, tmp_path: Path) -> None:
    import pynvml

    pynvml.nvmlInit()
    try:
        pynvml.nvmlDeviceGetSamples(pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)
    except pynvml.NVMLError as error:
        pytest.skip(f"NVML tells no utilization here: {error}")
    result = run(launcher, tmp_path, max_s=3.0)
    assert result.measurement is not None
    assert result.measurement.busy_source == NVML_SOURCE
    assert result.measurement.busy_fraction is not None
    assert 0 <= result.measurement.busy_fraction <= 1


@pytest.mark.parametrize("pin_memory", [False, True])
def test_the_profiler_tells_where_the_time_goes_copies_included(
    pin_memory: bool, launcher: ForkServerLauncher, tmp_path: Path
) -> None:
    everything = Extras(loader_ceiling=True, device_ceiling=True, breakdown=True)
    found = run(launcher, tmp_path, num_workers=2, pin_memory=pin_memory, extras=everything).measurement
    assert found is not None
    assert found.remarks == ()
    assert found.breakdown is not None
    assert found.breakdown.compute.fraction > 0
    assert found.breakdown.device_copy.source.startswith("profiler")
    assert found.busy_readings[0].source == PROFILER_SOURCE
    assert 0 < found.busy_readings[0].fraction <= 1
    assert found.loader_ceiling is not None
    assert found.device_ceiling is not None
    assert found.loader_costs is not None
    assert (found.loader_costs.pin_s is not None) == pin_memory


def test_work_that_only_the_device_does_is_seen_by_the_profiler(launcher: ForkServerLauncher, tmp_path: Path) -> None:
    heavy = run(launcher, tmp_path, model=Wide, dataset=rows, micro_batch_size=512, extras=Extras(breakdown=True))
    assert heavy.measurement is not None
    assert heavy.measurement.breakdown is not None
    assert heavy.measurement.breakdown.compute.fraction > 0.5, "2 GiB of activations a step, rows that lie in memory"


def test_fullness_comes_from_gpm_where_it_answers(launcher: ForkServerLauncher, tmp_path: Path) -> None:
    import pynvml

    pynvml.nvmlInit()
    try:
        supported = pynvml.nvmlGpmQueryDeviceSupport(pynvml.nvmlDeviceGetHandleByIndex(0)).isSupportedDevice
    except pynvml.NVMLError as error:
        pytest.skip(f"NVML has no GPM here: {error}")
    found = run(launcher, tmp_path).measurement
    assert found is not None
    if not supported or found.fullness is None:
        pytest.skip("this device, driver or user is not given GPM's counters")
    assert found.fullness.sm_fraction is not None
    assert found.fullness.sm_fraction > 0


def test_the_window_is_the_same_with_and_without_what_follows_it(launcher: ForkServerLauncher, tmp_path: Path) -> None:
    alone, more = tmp_path / "alone", tmp_path / "more"
    alone.mkdir()
    more.mkdir()
    plain = run(launcher, alone).measurement
    full = run(launcher, more, extras=Extras(device_ceiling=True, breakdown=True)).measurement
    assert plain is not None
    assert full is not None
    assert plain.memory.reserved_bytes is not None
    assert full.memory.reserved_bytes == pytest.approx(plain.memory.reserved_bytes, rel=0.1), "peaks are read before"
    assert full.busy_source == plain.busy_source


class Indices(Dataset[int]):
    """Items that cost nothing."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> int:
        return index


class ReadyBatches:
    """Gives the same 192 MiB whatever the items: a batch that costs its copy to the device alone."""

    def __init__(self) -> None:
        self.batch: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, items: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.batch is None or len(self.batch[0]) != len(items):
            self.batch = torch.ones(len(items), 3 * 2**18), torch.zeros(len(items), dtype=torch.long)
        return self.batch


class FirstNumbers(nn.Module):
    """Looks at next to nothing of what was copied."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(inputs[:, :16])
        return outputs


def test_large_batches_of_a_cheap_model_are_copy_bound_and_pinning_is_advised(
    launcher: ForkServerLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosing, "variations", lambda _: [])  # workers would need GiB of shared memory
    workload = Workload(model=FirstNumbers, dataset=Indices(), collate_fn=ReadyBatches())
    config = TrainingConfig(micro_batch_size=64)
    plan = Plan(name="case", workload=workload, baseline=config, device="cuda:0")
    found = diagnose_plan(plan, progress=False, launcher=launcher, pace=Pace(window_s=1.0, stretch_s=0.3))
    assert (found.verdict, found.findings[0].share > 0.5) == ("copy", True)
    assert {"pin_memory": True} in [one.settings for one in found.advice]


def needs_pinned_batches(model: nn.Module, batch: Any) -> torch.Tensor:
    """A step that takes batches only on the device."""
    inputs, targets = batch
    assert inputs.is_cuda
    assert targets.is_cuda
    return nn.functional.cross_entropy(model(inputs), targets)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pinned_batches_reach_the_device(num_workers: int, launcher: ForkServerLauncher, tmp_path: Path) -> None:
    result = run(launcher, tmp_path, num_workers=num_workers, pin_memory=True, step=needs_pinned_batches)
    assert result.outcome == "ok", result.reason


def test_a_device_beyond_those_there_is_told(launcher: ForkServerLauncher, tmp_path: Path) -> None:
    write_payload(Workload(model=image_net, dataset=images), tmp_path / "payload")
    runner = TrialRunner(
        launcher=launcher, payload=tmp_path / "payload", scratch=tmp_path, logs=tmp_path, device="cuda:99", seed=0
    )
    result = runner.run(TrainingConfig(), name="trial", deadline_s=60, window=WindowRules())
    assert result.outcome == "crashed"
    assert "name one below cuda:" in result.reason


def test_the_device_is_described(launcher: ForkServerLauncher, tmp_path: Path) -> None:
    runner = TrialRunner(launcher=launcher, payload=tmp_path, scratch=tmp_path, logs=tmp_path, device="auto", seed=0)
    environment = runner.describe(deadline_s=60).environment
    assert environment is not None
    assert environment.device == "cuda:0"
    assert environment.device_kind == "cuda"
    assert environment.device_name == torch.cuda.get_device_name(0)
    assert environment.driver
