"""Read NVML by the real pynvml, over a library that plays scenarios."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from autotune.worker.nvml import (
    Gpu,
    GpuSample,
    driver_cuda,
    driver_version,
    free_gpm,
    gpm_shares,
    gpu_with_uuid,
    gpus_of,
    has_persistence,
    max_sm_clock_mhz,
    memory_in_use,
    read_edge,
    take_gpm,
    utilization_since,
    visible_gpu,
)
from tests.nvml_stub import NO_PERMISSION, NOT_SUPPORTED, NvmlStub

ANSWERS = {
    "driver": "580.65.06",
    "cuda": 13000,
    "memory_used": 3 * 2**30,
    "memory_reserved": 2**29,
    "sm_clock": 1755,
    "memory_clock": 2619,
    "max_sm_clock": 1980,
    "temperature": 61,
    "power_mw": 512_000,
    "energy_mj": 9_000_500,
    "persistence": 1,
    "reasons": 0x4,
    "field.74": 5_000_000,
    "field.270": 0,
    "samples": ("100:20", "300:140"),
    "gpm": 1,
    "gpm.1": 62.5,
    "gpm.2": 130,
    "gpm.10": "nan",
}
READ_BY = {
    "nvmlSystemGetDriverVersion": "driver",
    "nvmlSystemGetCudaDriverVersion_v2": "cuda",
    "nvmlDeviceGetMaxClockInfo": "max_clock",
    "nvmlDeviceGetPersistenceMode": "persistence",
    "nvmlDeviceGetPowerUsage": "power_w",
    "nvmlDeviceGetTotalEnergyConsumption": "energy_j",
    "nvmlDeviceGetFieldValues": "throttled_ns",
    "nvmlDeviceGetSamples": "samples",
    "nvmlGpmQueryDeviceSupport": "gpm",
    "nvmlGpmSampleAlloc": "gpm",
    "nvmlGpmSampleGet": "gpm",
    "nvmlGpmMetricsGet": "gpm",
}
"""Functions, and the reading that each alone is for."""


@pytest.fixture
def answering(nvml: NvmlStub) -> NvmlStub:
    """A GPU that answers everything."""
    nvml.play(**ANSWERS)
    return nvml


def opened(uuid: str = "GPU-0") -> Gpu:
    gpu = gpu_with_uuid(uuid)
    assert gpu is not None
    return gpu


def all_readings(gpu: Gpu) -> dict[str, object]:
    """Everything that is asked of a GPU, by name."""
    edge = read_edge(gpu)
    first, second = take_gpm(gpu), take_gpm(gpu)
    found = {
        "driver": driver_version(),
        "cuda": driver_cuda(),
        "memory": memory_in_use(gpu),
        "max_clock": max_sm_clock_mhz(gpu),
        "persistence": has_persistence(gpu),
        "samples": utilization_since(gpu, 0),
        "gpm": gpm_shares(first, second, (1, 2, 3, 10)),
        **{name: getattr(edge, name) for name in edge.__slots__ if name != "at_s"},
    }
    free_gpm(first)
    free_gpm(second)
    return found


def test_all_readings(answering: NvmlStub) -> None:
    assert all_readings(opened()) == {
        "driver": "580.65.06",
        "cuda": 13,
        "memory": 3 * 2**30,
        "max_clock": 1980,
        "persistence": True,
        "samples": [
            GpuSample(time_us=100, busy_fraction=0.2),
            GpuSample(time_us=300, busy_fraction=1.0),
        ],
        "gpm": {1: 0.625, 2: 1.0},
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 2619,
        "temperature_c": 61,
        "event_bits": 4,
        "throttled_ns": {74: 5_000_000, 270: 0},
        "power_w": 512.0,
        "energy_j": 9000.5,
    }
    assert answering.live_samples == 0


@pytest.mark.parametrize("error", [NOT_SUPPORTED, NO_PERMISSION])
def test_refused_readings(error: int, answering: NvmlStub) -> None:
    gpu = opened()
    whole = all_readings(gpu)
    for function, reading in READ_BY.items():
        answering.refuse(function, error)
        missing: dict[str, Any] | None = {} if isinstance(whole[reading], dict) else None
        assert all_readings(gpu) == whole | {reading: missing}, function
        assert answering.live_samples == 0
        answering.play(**{f"refuse.{function}": None})


def test_refused_clocks(answering: NvmlStub) -> None:
    answering.refuse("nvmlDeviceGetClockInfo", NO_PERMISSION)
    edge = read_edge(opened())
    assert (edge.sm_clock_mhz, edge.memory_clock_mhz, edge.temperature_c) == (None, None, 61)


@pytest.mark.parametrize("lacks", ["driver", "pynvml"])
def test_older_names(lacks: str, answering: NvmlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    for newer in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTemperatureV"):
        if lacks == "driver":
            answering.refuse(newer, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        else:
            monkeypatch.delattr(pynvml, newer)
    edge = read_edge(opened())
    assert (edge.event_bits, edge.temperature_c) == (4, 61)


def test_old_driver(
    answering: NvmlStub, nvml_libraries: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = all_readings(opened())
    answering.folder = nvml_libraries["old"]
    answering.load(monkeypatch)
    assert all_readings(opened()) == new | {"memory": None, "gpm": {}}


def test_no_driver(nvml: NvmlStub) -> None:
    nvml.refuse("nvmlInitWithFlags", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert gpu_with_uuid("GPU-0") is None
    assert visible_gpu(0) is None
    assert driver_version() is None


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "CDLL", no_library)
    assert gpu_with_uuid("GPU-0") is None
    assert driver_version() is None


def test_utilization_since(answering: NvmlStub) -> None:
    gpu = opened()
    assert utilization_since(gpu, 100) == [GpuSample(time_us=300, busy_fraction=1.0)]
    assert utilization_since(gpu, 300) is None


class TestMig:
    """A GPU that MIG has split."""

    @pytest.fixture(autouse=True)
    def _split(self, answering: NvmlStub) -> None:
        own = {"uuid": "MIG-7", "instance": 9, "parent": 0, "memory_used": 2**30, "gpm.1": 31.0}
        answering.play(mig_mode=1, **{f"mig.{key}": value for key, value in own.items()})

    def test_readings_of_an_instance(self, answering: NvmlStub) -> None:
        gpu = opened("MIG-7")
        assert gpu.instance == 9
        assert all_readings(gpu) == all_readings(opened()) | {
            "memory": 2**30,
            "gpm": {1: 0.31},
            "samples": None,
            "power_w": None,
            "energy_j": None,
        }
        assert answering.calls("nvmlGpmMigSampleGet") == 2
        assert answering.live_samples == 0

    def test_refused_gpm(self, answering: NvmlStub) -> None:
        gpu = opened("MIG-7")
        whole = all_readings(gpu)
        answering.refuse("nvmlGpmMigSampleGet", NO_PERMISSION)
        assert all_readings(gpu) == whole | {"gpm": {}}
        assert answering.live_samples == 0

    def test_user_who_may_not_see_the_whole_gpu(self, answering: NvmlStub) -> None:
        answering.refuse("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", NO_PERMISSION)
        found = {name: value for name, value in all_readings(opened("MIG-7")).items() if value}
        assert found == {"driver": "580.65.06", "cuda": 13, "memory": 2**30}
        assert answering.live_samples == 0

    @pytest.mark.parametrize(("uuid", "found"), [("7", ["MIG-7"]), ("0", [])])
    def test_uuid_of_torch(
        self, uuid: str, found: list[str], answering: NvmlStub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answering.play(**{"1.uuid": "GPU-7"})  # an instance is preferred
        torch_has(monkeypatch, uuid)
        assert [gpu.uuid for gpu in gpus_of((torch.device("cuda:0"),))] == found

    def test_visible_instance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
        gpu = visible_gpu(0)
        assert gpu is not None
        assert gpu.uuid == "MIG-7"


def torch_has(monkeypatch: pytest.MonkeyPatch, *uuids: str | None) -> None:
    """Give torch CUDA devices with these UUIDs; None for one without."""
    own = [SimpleNamespace() if uuid is None else SimpleNamespace(uuid=uuid) for uuid in uuids]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: own[device.index])


@pytest.mark.parametrize("mig_mode", [0, None])
def test_gpu_that_mig_could_split(
    mig_mode: int | None, nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mig_mode is not None:
        nvml.play(mig_mode=mig_mode)
    torch_has(monkeypatch, "0")
    assert [gpu.uuid for gpu in gpus_of((torch.device("cuda:0"),))] == ["GPU-0"]


def test_gpus_of(nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.play(devices=2, **{"1.uuid": "GPU-1", "1.sm_clock": 1200})
    torch_has(monkeypatch, "1", "GPU-0", "5", None)
    zero, one, unknown, without = (torch.device("cuda", index) for index in range(4))
    gpus = gpus_of((zero, one))
    assert [gpu.uuid for gpu in gpus] == ["GPU-1", "GPU-0"]
    assert [read_edge(gpu).sm_clock_mhz for gpu in gpus] == [1200, None]
    assert gpus_of((zero, unknown)) == gpus_of((zero, without)) == ()


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["GPU-aa0", "GPU-ab1", None]),
        ("1,0", ["GPU-ab1", "GPU-aa0", None]),
        ("GPU-ab1", ["GPU-ab1", None, None]),
        ("GPU-ab", ["GPU-ab1", None, None]),
        ("GPU-a", [None, None, None]),  # two begin so
        ("", [None, None, None]),
        ("0,-1,1", ["GPU-aa0", None, None]),
    ],
)
def test_visible_gpu(
    visible: str | None, found: list[str | None], nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.play(devices=2, **{"0.uuid": "GPU-aa0", "1.uuid": "GPU-ab1"})
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = [visible_gpu(index) for index in range(3)]
    assert [None if gpu is None else gpu.uuid for gpu in gpus] == found


def test_torch_without_visible_devices(nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_parse_visible_devices")
    assert visible_gpu(0) is None
