"""NVML's readings, by the real pynvml over a library that plays scenarios: each reading, and each refusal."""

from __future__ import annotations

import os
import subprocess
import sys
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
from tests.nvml_stub import NO_PERMISSION, NOT_FOUND, NOT_SUPPORTED, NvmlStub

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


def test_everything_that_a_gpu_tells_is_read_in_our_units(answering: NvmlStub) -> None:
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


@pytest.mark.parametrize("error", [NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND])
def test_what_nvml_refuses_is_missing_and_all_else_is_read(error: int, answering: NvmlStub) -> None:
    gpu = opened()
    whole = all_readings(gpu)
    for function, reading in READ_BY.items():
        answering.refuse(function, error)
        missing: dict[str, Any] | None = {} if isinstance(whole[reading], dict) else None
        assert all_readings(gpu) == whole | {reading: missing}, function
        assert answering.live_samples == 0, "what was allocated for GPM is freed"
        answering.play(**{f"refuse.{function}": None})


def test_clocks_of_both_kinds_are_missing_where_nvml_refuses_them(answering: NvmlStub) -> None:
    answering.refuse("nvmlDeviceGetClockInfo", NO_PERMISSION)
    edge = read_edge(opened())
    assert (edge.sm_clock_mhz, edge.memory_clock_mhz, edge.temperature_c) == (None, None, 61)


@pytest.mark.parametrize(
    ("newer", "reading"),
    [
        ("nvmlDeviceGetCurrentClocksEventReasons", "event_bits"),
        ("nvmlDeviceGetTemperatureV", "temperature_c"),
    ],
)
@pytest.mark.parametrize("lacks", ["driver", "pynvml"])
def test_an_older_name_serves_where_driver_or_pynvml_lack_the_newer(
    newer: str, reading: str, lacks: str, answering: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "driver":
        answering.refuse(newer, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    else:
        monkeypatch.delattr(pynvml, newer)
    assert getattr(read_edge(opened()), reading) == {"event_bits": 4, "temperature_c": 61}[reading]


def test_an_old_driver_tells_what_it_can(
    answering: NvmlStub, nvml_libraries: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = all_readings(opened())
    answering.folder = nvml_libraries["old"]
    answering.load(monkeypatch)
    assert all_readings(opened()) == new | {"memory": None, "gpm": {}}


def test_without_a_driver_no_device_is_found(nvml: NvmlStub) -> None:
    nvml.refuse("nvmlInitWithFlags", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert gpu_with_uuid("GPU-0") is None
    assert visible_gpu(0) is None
    assert driver_version() is None


def test_a_child_process_finds_the_library_that_plays(nvml: NvmlStub) -> None:
    nvml.play(devices=2, driver="580.1", **{"1.uuid": "GPU-1"})
    script = (
        "import pynvml, torch\npynvml.nvmlInit()\n"
        "print(pynvml.nvmlSystemGetDriverVersion(), *torch.cuda._raw_device_uuid_nvml())"
    )
    environment = {**os.environ, **nvml.environment}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["580.1", "GPU-0", "GPU-1"]


def test_without_the_library_no_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "CDLL", no_library)
    assert gpu_with_uuid("GPU-0") is None
    assert driver_version() is None


def test_samples_before_the_moment_that_is_asked_for_are_left_out(answering: NvmlStub) -> None:
    gpu = opened()
    assert utilization_since(gpu, 100) == [GpuSample(time_us=300, busy_fraction=1.0)]
    assert utilization_since(gpu, 300) is None


class TestMig:
    """A GPU that MIG has split."""

    @pytest.fixture(autouse=True)
    def _split(self, answering: NvmlStub) -> None:
        own = {"uuid": "MIG-7", "instance": 9, "parent": 0, "memory_used": 2**30, "gpm.1": 31.0}
        answering.play(mig_mode=1, **{f"mig.{key}": value for key, value in own.items()})

    def test_memory_and_gpm_are_the_instances_and_clocks_the_whole_gpus(
        self, answering: NvmlStub
    ) -> None:
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

    @pytest.mark.parametrize(
        ("function", "left"),
        [
            (
                "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
                {"driver": "580.65.06", "cuda": 13, "memory": 2**30},
            ),
            ("nvmlGpmMigSampleGet", None),
        ],
    )
    def test_a_user_who_may_not_see_the_whole_gpu_is_told_of_the_instance(
        self, function: str, left: dict[str, object] | None, answering: NvmlStub
    ) -> None:
        whole = all_readings(opened("MIG-7"))
        answering.refuse(function, NO_PERMISSION)
        found = all_readings(opened("MIG-7"))
        if left is None:
            assert found == whole | {"gpm": {}}
        else:
            assert {name: value for name, value in found.items() if value not in (None, {})} == left
        assert answering.live_samples == 0

    def test_torchs_uuid_of_an_instance_leads_to_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="7")
        )
        assert [gpu.uuid for gpu in gpus_of((torch.device("cuda:0"),))] == ["MIG-7"]

    def test_the_uuid_of_the_whole_gpu_leads_to_no_reading(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0")
        )
        assert gpus_of((torch.device("cuda:0"),)) == ()

    def test_an_instance_is_preferred_to_a_gpu_with_the_same_uuid(
        self, answering: NvmlStub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answering.play(**{"0.uuid": "GPU-7"})
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="7")
        )
        assert [gpu.uuid for gpu in gpus_of((torch.device("cuda:0"),))] == ["MIG-7"]

    def test_a_visible_instance_is_found_by_its_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
        gpu = visible_gpu(0)
        assert gpu is not None
        assert gpu.uuid == "MIG-7"


@pytest.mark.parametrize("mig_mode", [0, None])
def test_a_gpu_that_mig_could_split_is_read_as_a_whole(
    mig_mode: int | None, nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mig_mode is not None:
        nvml.play(mig_mode=mig_mode)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0"))
    assert [gpu.uuid for gpu in gpus_of((torch.device("cuda:0"),))] == ["GPU-0"]


@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_torchs_devices_are_found_by_uuid(
    prefix: str, nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.play(devices=2, **{"1.uuid": "GPU-1", "1.sm_clock": 1200})
    properties = {0: SimpleNamespace(uuid=f"{prefix}1"), 1: SimpleNamespace(uuid=f"{prefix}0")}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: properties[device.index]
    )
    gpus = gpus_of((torch.device("cuda:0"), torch.device("cuda:1")))
    assert [gpu.uuid for gpu in gpus] == ["GPU-1", "GPU-0"]
    assert [read_edge(gpu).sm_clock_mhz for gpu in gpus] == [1200, None]


@pytest.mark.parametrize("properties", [SimpleNamespace(uuid="5"), SimpleNamespace()])
def test_where_nvml_does_not_know_one_device_none_is_read(
    properties: object, nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {0: SimpleNamespace(uuid="0"), 1: properties}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known[device.index])
    assert gpus_of((torch.device("cuda:0"), torch.device("cuda:1"))) == ()
    assert len(gpus_of((torch.device("cuda:0"),))) == 1


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
def test_the_device_that_cuda_will_number_so_is_found_before_cuda_is_there(
    visible: str | None, found: list[str | None], nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.play(devices=2, **{"0.uuid": "GPU-aa0", "1.uuid": "GPU-ab1"})
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = [visible_gpu(index) for index in range(3)]
    assert [None if gpu is None else gpu.uuid for gpu in gpus] == found


def test_a_torch_that_does_not_tell_what_is_visible_leaves_it_open(
    nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cuda, "_parse_visible_devices")
    assert visible_gpu(0) is None
