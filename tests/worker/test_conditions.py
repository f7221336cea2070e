"""What is told of the device during a window and before it, over NVML's stub by the real pynvml."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from autotune.records.measurement import DeviceConditions
from autotune.worker import conditions
from autotune.worker.conditions import ConditionsProbe, Others, conditions_before, others_before
from autotune.worker.nvml import THROTTLE_COUNTERS, Gpu, gpu_with_uuid
from tests.nvml_stub import NO_PERMISSION, NvmlStub

STEADY = {
    "sm_clock": 1980,
    "memory_clock": 2619,
    "max_sm_clock": 1980,
    "temperature": (50, 56),
    "power_mw": (400_000, 600_000),
    "energy_mj": (1_000_000, 1_350_000),
    "persistence": 0,
    "reasons": 0,
}


@pytest.fixture(autouse=True)
def _one_second_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second from one edge of a device to the next."""
    times = iter(range(1000))
    monkeypatch.setattr("autotune.worker.nvml.perf_counter", lambda: float(next(times)))


@pytest.fixture
def gpu(nvml: NvmlStub) -> NvmlStub:
    """One that tells everything of a quiet window."""
    nvml.play(**STEADY)
    return nvml


def gpus(*uuids: str) -> list[Gpu]:
    return [gpu for uuid in uuids if (gpu := gpu_with_uuid(uuid)) is not None]


def window(
    *uuids: str, before: dict[str, Others] | None = None, has_cuda: bool = True
) -> DeviceConditions | None:
    probe = ConditionsProbe(gpus(*uuids), before or {}, has_cuda=has_cuda)
    probe.start()
    return probe.stop()


def known_window(*uuids: str) -> DeviceConditions:
    found = window(*(uuids or ["GPU-0"]))
    assert found is not None
    return found


def test_both_edges_of_a_window(gpu: NvmlStub) -> None:
    before = {
        "GPU-0": Others(others_memory_bytes=7, others_busy_fraction=0.5),
        "GPU-1": Others(others_memory_bytes=9),
    }
    assert window("GPU-0", before=before) == DeviceConditions(
        sm_clock_mhz=(1980, 1980),
        max_sm_clock_mhz=1980,
        memory_clock_mhz=(2619, 2619),
        temperature_c=(50, 56),
        power_w=350.0,
        energy_j=350.0,
        persistence_mode=False,
        others_memory_bytes=7,
        others_busy_fraction=0.5,
    )


@pytest.mark.parametrize(
    "energy_mj", [None, 1_000_000, (1_000_000, 5)]
)  # not counted, stuck, reset
def test_power_without_energy(energy_mj: object, gpu: NvmlStub) -> None:
    gpu.play(energy_mj=energy_mj)
    found = known_window()
    assert (found.energy_j, found.power_w) == (None, 500.0)
    gpu.refuse("nvmlDeviceGetPowerUsage", NO_PERMISSION)
    assert known_window().power_w is None


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        ((0x1, 0x1), ()),  # idle, as right after synchronizing
        ((0x2, 0x10), ()),  # clocks that were set; sync boost
        ((0x0, 0x4), ("power_cap",)),
        ((0x20, 0x4), ("power_cap", "thermal")),
        ((0x48, 0x0), ("thermal",)),  # a hardware slowdown, and its reason
        ((0x88, 0x0), ("power_brake",)),
        ((0x8, 0x20), ("hardware_slowdown", "thermal")),
    ],
)
def test_throttle_reasons_at_the_edges(
    bits: tuple[int, int], reasons: tuple[str, ...], gpu: NvmlStub
) -> None:
    gpu.play(reasons=bits)
    assert known_window().throttle_reasons == reasons


@pytest.mark.parametrize(
    ("counters", "reasons"),
    [
        ({74: (0, 500_000_000)}, ("power_cap",)),
        ({74: (5, 5)}, ()),
        ({74: (0, 9_000_000)}, ()),  # 9 ms of a second
        (
            {269: (1, 20_000_001), 270: (0, 20_000_000), 271: (0, 10_000_000)},
            ("power_brake", "thermal"),
        ),
    ],
)
def test_throttle_reasons_between_the_edges(
    counters: dict[int, tuple[int, int]], reasons: tuple[str, ...], gpu: NvmlStub
) -> None:
    gpu.play(**{f"field.{number}": values for number, values in counters.items()})
    assert known_window().throttle_reasons == reasons


def test_readings_at_one_edge_alone(gpu: NvmlStub) -> None:
    refused = ("GetFieldValues", "GetTemperatureV", "GetTemperature")
    gpu.play(
        **{"field.74": 500_000_000}, **{f"refuse.nvmlDevice{name}": (3, 0) for name in refused}
    )
    found = known_window()
    assert found.throttle_reasons == ()
    assert found.temperature_c is None
    assert found.sm_clock_mhz == (1980, 1980)


def test_several_devices_as_one(gpu: NvmlStub) -> None:
    gpu.play(devices=2, **{"1.uuid": "GPU-1", "1.sm_clock": (1900, 1500), "1.reasons": (0, 4)})
    found = known_window("GPU-0", "GPU-1")
    assert found.energy_j == 700.0
    assert found.sm_clock_mhz == (1900, 1500)
    assert found.throttle_reasons == ("power_cap",)


def test_variables_that_change_float32(gpu: NvmlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert window() is None
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    overrides = ("NVIDIA_TF32_OVERRIDE=0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1")
    assert window() == DeviceConditions(tf32_overrides=overrides)
    assert window(has_cuda=False) is None
    found = known_window()
    assert (found.tf32_overrides, found.max_sm_clock_mhz) == (overrides, 1980)


class TestOthers:
    """What was on the devices before."""

    @pytest.fixture(autouse=True)
    def _torch_for_cuda(self, nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        nvml.play(devices=3, **{f"{index}.uuid": f"GPU-{index}" for index in range(3)})
        nvml.play(**{f"{index}.memory_used": 100 + index for index in range(3)})

    @pytest.mark.parametrize(
        ("device", "first", "count", "found"),
        [
            ("auto", 0, 1, {"GPU-0": 100}),
            ("cuda", 1, 1, {"GPU-1": 101}),
            ("cuda:1", 1, 1, {"GPU-2": 102}),
            ("cuda:1", 0, 2, {"GPU-1": 101, "GPU-2": 102}),
            ("cuda:9", 0, 1, {}),
            ("cpu", 0, 1, {}),
            ("xpu:0", 0, 1, {}),
            ("cuda:first", 0, 1, {}),
        ],
    )
    def test_memory_of_others(
        self, device: str, first: int, count: int, found: dict[str, int]
    ) -> None:
        before = others_before(device, first, count, quiet_s=1.0)
        assert {uuid: others.others_memory_bytes for uuid, others in before.items()} == found

    def test_torch_without_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        assert others_before("auto", 0, 1, quiet_s=1.0) == {}

    def test_kernels_of_others(self, nvml: NvmlStub) -> None:
        def busy(quiet_s: float) -> float | None:
            return others_before("auto", 0, 1, quiet_s=quiet_s)["GPU-0"].others_busy_fraction

        nvml.play(samples_every_us=200_000, busy=80)
        assert busy(quiet_s=5.0) == pytest.approx(0.8)
        assert busy(quiet_s=0.02) is None  # they may be those of a trial that has just ended
        now_us = time.time_ns() // 1000
        nvml.play(
            samples_every_us=None,
            samples=tuple(f"{now_us - 1_000_000 * ago}:100" for ago in range(9, 2, -1)),
        )
        assert busy(quiet_s=1.0) is None

    def test_conditions_before(self) -> None:
        before = others_before("auto", 0, 1, quiet_s=1.0)
        assert conditions_before(gpus("GPU-0"), before) == DeviceConditions(others_memory_bytes=100)
        # CUDA numbers them another way here
        assert conditions_before(gpus("GPU-1"), before) is None
        assert conditions_before((), before) is None


def test_reasons_are_numbered_as_in_pynvml() -> None:
    import pynvml

    names = SimpleNamespace(
        **{name: value for name, value in vars(pynvml).items() if "ClocksEventReason" in name}
    )
    assert {
        names.nvmlClocksEventReasonSwPowerCap: "power_cap",
        names.nvmlClocksEventReasonHwSlowdown: "hardware_slowdown",
        names.nvmlClocksEventReasonSwThermalSlowdown: "thermal",
        names.nvmlClocksEventReasonHwThermalSlowdown: "thermal",
        names.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power_brake",
    } == conditions._REASONS
    assert list(THROTTLE_COUNTERS) == [
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP,
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN,
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN,
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN,
    ]
