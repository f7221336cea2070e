"""Use an accelerator with memory of its own, simulated by tests/accelerator.py."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import TensorDataset

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.launch.local import LocalLauncher
from autotune.launch.runner import TrialRunner
from autotune.messages.trials import launches_wait
from autotune.policy import WindowRules
from autotune.protocol.disk import TrialFolder, read_model, write_model
from autotune.protocol.messages import (
    CurvesJob,
    PrecisionJob,
    ProbeJob,
    RankReport,
    StressJob,
    TrialJob,
    WorkloadJob,
)
from autotune.protocol.payload import write_payload
from autotune.records.measurement import MemoryLimits
from autotune.space import constraints as rules
from autotune.worker import group
from autotune.worker.device import Device, DeviceError, open_device, opened_device
from autotune.worker.environment import describe
from autotune.worker.failures import device_was_full, shortage_of
from autotune.worker.group import open_group
from autotune.worker.rank import run_rank
from tests import accelerator
from tests.accelerator import CALLS, DEVICES, MIB, on_simulated_device
from tests.factories import make_process


def take(size_mib: float, device: str = "sim:0") -> torch.Tensor:
    return torch.empty(int(size_mib * MIB), dtype=torch.uint8, device=device)


@on_simulated_device
def test_open_device() -> None:
    assert open_device("auto").torch_device == torch.device("sim:0")
    assert open_device("sim", rank=1).torch_device == torch.device("sim:1")
    assert open_device("sim:0").kind == "other"
    assert open_device("sim", count=2).devices == (torch.device("sim:0"), torch.device("sim:1"))
    for wanted in ({"rank": 2}, {"count": 3}, {"rank": 1, "count": 2}):
        with pytest.raises(DeviceError, match="sim:2"):
            open_device("sim", **wanted)
    with pytest.raises(DeviceError, match="cuda:0"):
        open_device("cuda:0")


@on_simulated_device
def test_cap_is_the_limit_without_outside_memory() -> None:
    device = open_device("sim:0", limit_bytes=16 * MIB)
    memory = DEVICES[0].memory
    memory.others = 2 * MIB
    assert device.peak_memory().outside_bytes == 6 * MIB
    device.cap_memory()
    held = take(6)
    memory.context += 2 * MIB  # kernels are loaded when first called
    device.cap_memory()
    with pytest.raises(torch.OutOfMemoryError):
        take(3)
    more = take(2)
    assert held.nbytes + more.nbytes + 8 * MIB == device.limit_bytes
    assert device.free_bytes() == device.total_memory_bytes - 16 * MIB
    assert device.refusals() == 1


@on_simulated_device
@pytest.mark.parametrize("limit_mib", [1, 1000])
def test_cap_of_extreme_limits(limit_mib: int) -> None:
    open_device("sim:0", limit_bytes=limit_mib * MIB).cap_memory()
    assert DEVICES[0].memory.fraction == (0.0 if limit_mib == 1 else 1.0)
    open_device("sim:0").cap_memory()
    assert CALLS["cap 0"] == 1


@on_simulated_device
def test_peak_memory() -> None:
    device = open_device("sim:0")
    take(20)
    device.reset_peak()
    assert DEVICES[0].memory.reserved == 0
    kept = take(8)
    del kept
    both = [take(4), take(4)]
    DEVICES[0].memory.others = MIB
    memory = device.peak_memory()
    assert memory.source.startswith("max reserved")
    assert memory.allocated_bytes == sum(one.nbytes for one in both)
    assert memory.reserved_bytes == 16 * MIB  # the 8 MiB stay reserved, too large for 4
    assert memory.outside_bytes == 5 * MIB
    assert memory.peak_bytes == 21 * MIB
    assert memory.alloc_retries is None


@on_simulated_device
def test_alloc_retries() -> None:
    device = open_device("sim:0", limit_bytes=12 * MIB)
    device.cap_memory()
    take(5)
    take(8)  # finds no room beside what is kept
    before = device.alloc_retries()
    assert before == 1
    take(3)
    assert device.peak_memory(before).alloc_retries == 1
    assert not device.peak_memory(before).is_thrashing
    assert device.peak_memory(0).is_thrashing


@on_simulated_device
def test_several_devices() -> None:
    device = open_device("sim", count=2, limit_bytes=12 * MIB)
    DEVICES[1].memory.total = 32 * MIB
    device.cap_memory()
    assert (CALLS["cap 0"], CALLS["cap 1"]) == (1, 1)
    assert DEVICES[0].memory.fraction == 8 / 64
    assert DEVICES[1].memory.fraction == 8 / 32
    assert device.total_memory_bytes == 32 * MIB
    device.reset_peak()
    held = take(2), take(7, "sim:1")
    assert device.peak_memory().peak_bytes == held[1].nbytes + 4 * MIB
    for one in DEVICES:
        one.memory.retries += 2
    assert device.peak_memory(1).alloc_retries == 3
    device.synchronize()
    assert (CALLS["synchronize 0"], CALLS["synchronize 1"]) == (1, 1)


@on_simulated_device
def test_synchronize() -> None:
    clock, device = accelerator.use_still_clock(), open_device("sim:0")
    DEVICES[0].queue.kernel_s = 0.25
    take(1).fill_(1)
    assert clock.now() == 0.0
    device.synchronize()
    assert clock.now() == DEVICES[0].queue.ends_at > 0


@on_simulated_device
def test_module_without_free_memory_and_cap() -> None:
    module: Any = torch.get_device_module("sim")
    del module.mem_get_info, module.set_per_process_memory_fraction
    device = open_device("sim:0", limit_bytes=MIB)
    device.cap_memory()
    device.reset_peak()
    held = take(3)
    memory = device.peak_memory()
    assert (memory.peak_bytes, memory.outside_bytes) == (held.nbytes, None)
    assert memory.source == "max reserved"
    del module.max_memory_reserved
    assert not device.has_own_memory
    assert "process tree" in device.peak_memory().source
    assert device.alloc_retries() is None


@on_simulated_device
def test_module_with_peaks_alone() -> None:
    module: Any = torch.get_device_module("sim")
    del module.memory_stats, module.max_memory_allocated, module.reset_peak_memory_stats
    del module.empty_cache, module.memory_reserved, module.is_initialized
    device = open_device("sim:0", limit_bytes=32 * MIB)
    device.cap_memory()
    device.reset_peak()
    device.give_back()
    held = take(3)
    memory = device.peak_memory(device.alloc_retries())
    assert memory.reserved_bytes == held.nbytes
    assert (memory.allocated_bytes, memory.alloc_retries, device.refusals()) == (None, None, 0)
    assert opened_device() is None


@on_simulated_device
def test_device_was_full() -> None:
    device = open_device("sim", count=2)
    asked: Any = torch.get_device_module("sim")
    asked.mem_get_info = lambda _: (2**40, 2**40)
    perhaps = RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")
    assert (device_was_full(device), shortage_of(perhaps)) == (False, None)
    DEVICES[1].memory.ooms += 1
    assert device_was_full(device)
    assert not device_was_full(device, device.refusals())
    DEVICES[0].memory.ooms += 1
    assert shortage_of(perhaps) is not None
    asked.mem_get_info = lambda one: (64 * MIB if one.index == 1 else 2**40, 2**40)
    assert device_was_full(device, device.refusals())

    def lost(_: object) -> NoReturn:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    asked.mem_get_info = lost
    assert not device_was_full(device, device.refusals())


@on_simulated_device
def test_closed_accelerator_is_asked_nothing() -> None:
    module: Any = torch.get_device_module("sim")
    assert opened_device() == Device(torch.device("sim:0"), "other")
    module.is_initialized = lambda: False
    module.current_device = module.memory_stats = module.mem_get_info = None  # would fail
    assert opened_device() is None
    assert shortage_of(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")) is None


@on_simulated_device
def test_describe_several_devices() -> None:
    module: Any = torch.get_device_module("sim")
    environment = describe(open_device("auto"))
    assert (environment.device, environment.device_kind) == ("sim:0", "other")
    assert environment.device_count == 2
    assert environment.device_name == "Simulated accelerator 0"
    assert environment.device_names == ("Simulated accelerator 0", "Simulated accelerator 1")
    assert environment.device_memory_bytes == 64 * MIB
    assert environment.native_amp_dtypes == ("float32", "bfloat16", "float16")
    module.get_device_name = lambda device=None: "One of a kind"
    assert describe(open_device("auto")).device_names == ()


@on_simulated_device
def test_note_on_launches_that_wait() -> None:
    """The device passes for one of CUDA's; what torch would ask CUDA of its precisions is answered for it."""
    cuda: Any = torch.cuda
    cuda.get_device_capability, cuda.is_bf16_supported = lambda _: (9, 0), lambda **_: True
    device = Device(torch.device("sim:0"), "cuda")
    os.environ.pop("CUDA_LAUNCH_BLOCKING", None)
    assert describe(device).notes == ()
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    assert describe(device).notes == (launches_wait(variable="CUDA_LAUNCH_BLOCKING=1"),)
    assert describe(device, job_blocks=True).notes == ()


ROWS = TensorDataset(torch.zeros(256, 64), torch.zeros(256, dtype=torch.int64))


class Retrying(nn.Linear):
    """Its allocator finds no room at each step: what a trial does that thrashes at the cap."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        DEVICES[0].memory.retries += 1
        return super().forward(inputs)


class Growing(nn.Linear):
    """With its first steps 8 MiB come outside the allocator: kernels, a communicator's buffers."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        DEVICES[0].memory.context = 12 * MIB
        return super().forward(inputs)


def trained(
    folder: Path,
    model: nn.Module,
    kind: type[WorkloadJob] = TrialJob,
    *,
    limit_bytes: int | None = 40 * MIB,
    **given: Any,
) -> RankReport:
    """A rank's whole life on the device: build, warm up, window, peak."""
    payload = folder / "payload"
    write_payload(Workload(model=model, dataset=ROWS), payload)
    if kind is TrialJob:
        given["window"] = WindowRules(max_s=0.3, precision=0.5, block_s=0.01)
    config = TrainingConfig(micro_batch_size=16)
    process = make_process(folder, device="auto", limit_bytes=limit_bytes)
    place = TrialFolder(folder)
    write_model(place.job, kind(process=process, payload=payload, config=config, **given))
    before = Path.cwd()
    try:
        accelerator.use_still_clock()
        assert run_rank(place, started=perf_counter()) == 0
    finally:
        os.chdir(before)
    return read_model(place.report, RankReport)


@on_simulated_device
def test_trial_measures_memory_under_the_cap(tmp_path: Path) -> None:
    report = trained(tmp_path, Growing(64, 2))
    assert report.result.measurement is not None, report.result
    memory = report.result.measurement.memory
    assert memory.allocated_bytes is not None
    assert memory.reserved_bytes is not None
    assert 0 < memory.allocated_bytes <= memory.reserved_bytes < 4 * MIB
    assert memory.outside_bytes == 12 * MIB
    assert memory.alloc_retries == 0
    assert CALLS["cap 0"] == 2  # before the model, and after the first steps
    assert DEVICES[0].memory.fraction == 28 / 64


@on_simulated_device
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (PrecisionJob, {}),
        (StressJob, {"train_s": 0.3}),
        (CurvesJob, {"variations": (TrainingConfig(micro_batch_size=32),)}),
    ],
)
def test_cap_in_other_jobs(kind: type[WorkloadJob], given: dict[str, Any], tmp_path: Path) -> None:
    report = trained(tmp_path, Growing(64, 2), kind, **given)
    assert report.result.outcome == "ok", report.result
    assert DEVICES[0].memory.fraction == 28 / 64
    if report.curves is not None:
        assert [point.reason for point in report.curves.device] == [""] * len(report.curves.device)
    if report.stress is not None:
        assert report.stress.memory.alloc_retries == 0


@on_simulated_device
def test_probe_without_a_limit(tmp_path: Path) -> None:
    report = trained(tmp_path, nn.Linear(64, 2), ProbeJob, limit_bytes=None)
    assert report.environment is not None
    assert report.environment.device_kind == "other"
    assert report.facts is not None
    assert CALLS["cap 0"] == 0


@on_simulated_device
def test_retries_in_the_window(tmp_path: Path) -> None:
    report = trained(tmp_path, Retrying(64, 2))
    assert report.result.measurement is not None
    measurement = report.result.measurement
    assert measurement.memory.alloc_retries == sum(block.batches for block in measurement.blocks)
    assert DEVICES[0].memory.retries > measurement.memory.alloc_retries


@on_simulated_device
def test_retries_of_a_stress_run(tmp_path: Path) -> None:
    report = trained(tmp_path, Retrying(64, 2), StressJob, train_s=0.3)
    assert report.stress is not None, report.result
    assert report.stress.memory.alloc_retries == report.stress.steps - 1
    assert DEVICES[0].memory.retries == report.stress.steps


@on_simulated_device
def test_cap_without_room_is_oom(tmp_path: Path) -> None:
    report = trained(tmp_path, nn.Linear(64, 2), limit_bytes=4 * MIB)
    assert report.result.outcome == "oom"
    assert DEVICES[0].memory.ooms == 1


def as_rank(rank: int, store: Path, *, binds: bool) -> str:
    """Meet another rank over a backend of the device's own; what was raised, or the group's answer."""
    device = open_device("sim", rank=rank)
    config = TrainingConfig(strategy="ddp", world_size=2)
    job: Any = SimpleNamespace(
        config=config,
        rendezvous=f"file://{store}",
        part=None,
        process=SimpleNamespace(deadline_s=30.0),
    )
    distributed.Backend.register_backend("simccl", _backend, devices=["sim"])
    rules.GROUP_BACKENDS["other"] = "simccl"
    group._exchange_once = lambda device: None  # nothing carries its tensors
    if binds:
        opened = distributed.init_process_group
        distributed.init_process_group = lambda *given, **named: opened(  # as it was called
            *given, **(named | {"device_id": device.torch_device})
        )
    try:
        return str(open_group(job, rank, device).most(float(rank)))
    except RuntimeError as error:
        return str(error)


def _backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return distributed.ProcessGroupGloo(store, rank, size, timeout)


@on_simulated_device
@pytest.mark.parametrize("binds", [False, True])
def test_ranks_of_a_plugin_agree_over_gloo(binds: bool, tmp_path: Path) -> None:
    """Bound to a device by init_process_group, torch asks each further group for a backend of that device."""
    answer = tmp_path / "answer"
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            answer.write_text(as_rank(1, tmp_path / "store", binds=binds))
        os._exit(0)
    own = as_rank(0, tmp_path / "store", binds=binds)
    os.waitpid(child, 0)
    if binds:  # whichever comes first learns it; the other may find only that the first is gone
        assert any("device type sim" in said for said in (own, answer.read_text()))
    else:
        assert (own, answer.read_text()) == ("1.0", "1.0")


@pytest.mark.slow
def test_trial_finds_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in accelerator.write_entry_point(tmp_path / "site"):
        monkeypatch.syspath_prepend(folder)
    payload = tmp_path / "payload"
    write_payload(Workload(model=nn.Linear(64, 2), dataset=ROWS), payload)
    runner = TrialRunner(
        launcher=LocalLauncher(None),
        payload=payload,
        scratch=tmp_path,
        logs=tmp_path,
        device="auto",
        seed=0,
        limits=MemoryLimits(limit_bytes=40 * MIB),
    )
    window = WindowRules(max_s=0.3, precision=0.5, block_s=0.01)
    result = runner.run(
        TrainingConfig(micro_batch_size=16), name="trial", deadline_s=60.0, window=window
    )
    assert result.outcome == "ok", result
    assert result.measurement is not None
    assert result.measurement.memory.outside_bytes == 4 * MIB
