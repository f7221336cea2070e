"""What is read of NVML, from a pynvml whose functions are made up and whose structures are its own."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from autotune.core.busy import NVML_SOURCE, WAIT_SOURCE
from autotune.worker import busy
from autotune.worker.busy import BusyProbe
from autotune.worker.device import Device, open_device

GPU = Device(torch.device("cuda:0"), "cuda")


class FakeNvml:
    """Hands on pynvml's constants and structures; answers for one Hopper GPU."""

    def __init__(self, **refusing: Exception) -> None:
        self.refusing, self.allocated, self.freed = refusing, 0, 0
        self.percent, self.unavailable = {2: 75.0, 3: 40.0, 5: 12.5, 10: 130.0}, {3}
        self.is_supported = 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml"):
            raise AttributeError(name)
        return getattr(pynvml, name)

    def _answer(self, name: str, value: Any) -> Any:
        if name in self.refusing:
            raise self.refusing[name]
        return value

    def nvmlInit(self) -> None:  # noqa: N802 - pynvml's name
        self._answer("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - pynvml's name
        assert uuid == "GPU-0123"
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802 - pynvml's name
        return self._answer("rates", SimpleNamespace(gpu=50))

    def nvmlDeviceGetSamples(self, handle: str, kind: int, since_us: int) -> Any:  # noqa: N802 - pynvml's name
        assert kind == pynvml.NVML_GPU_UTILIZATION_SAMPLES
        times = [100, 200] if since_us == 0 else [200, 300, 400]
        samples = [SimpleNamespace(timeStamp=time, sampleValue=SimpleNamespace(uiVal=time // 5)) for time in times]
        return self._answer("samples", (0, samples))

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:  # noqa: N802 - pynvml's name
        return self._answer("support", SimpleNamespace(isSupportedDevice=self.is_supported))

    def nvmlGpmSampleAlloc(self) -> Any:  # noqa: N802 - pynvml's name
        self.allocated += 1
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> Any:  # noqa: N802 - pynvml's name
        return self._answer("sample", sample)

    def nvmlGpmSampleFree(self, sample: Any) -> None:  # noqa: N802 - pynvml's name
        self.freed += 1

    def nvmlGpmMetricsGet(self, asked: Any) -> Any:  # noqa: N802 - pynvml's name
        assert asked.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        assert asked.numMetrics == 4
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value = self.percent[metric.metricId]
            metric.nvmlReturn = 3 if metric.metricId in self.unavailable else 0
        return self._answer("metrics", asked)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """One GPU that answers all; its window is as long as GPM needs."""
    return injected(FakeNvml(), monkeypatch)


def injected(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0123"))
    monkeypatch.setattr(busy, "_GPM_LEAST_S", 0.0)
    return fake


def read(data_wait_fraction: float = 0.25) -> busy.Busyness:
    probe = BusyProbe(GPU)
    probe.start()
    return probe.stop(data_wait_fraction)


def test_nvmls_samples_since_the_start_are_averaged_and_the_waits_stand_beside(nvml: FakeNvml) -> None:
    told = read()
    assert told.reading.source == NVML_SOURCE
    assert told.reading.fraction == pytest.approx(0.7), "of 60 and 80 %; what lay in the buffer before is left out"
    assert [one.source for one in told.readings] == [NVML_SOURCE, WAIT_SOURCE]
    assert told.readings[1].fraction == 0.75


def test_gpm_tells_how_full_each_metric_apart(nvml: FakeNvml) -> None:
    fullness = read().fullness
    assert fullness is not None
    assert fullness.sm_fraction == 0.75
    assert fullness.sm_occupancy is None, "NVML says that it has none"
    assert fullness.tensor_fraction == 0.125
    assert fullness.dram_fraction == 1.0, "rounding may carry it beyond"
    assert nvml.allocated == nvml.freed == 2


@pytest.mark.parametrize("refused", ["support", "sample", "metrics"])
def test_whatever_gpm_refuses_there_is_no_fullness_and_no_leak(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = injected(FakeNvml(**{refused: pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)}), monkeypatch)
    told = read()
    assert told.fullness is None
    assert told.reading.source == NVML_SOURCE
    assert fake.allocated == fake.freed


def test_a_device_before_hopper_has_no_fullness(nvml: FakeNvml) -> None:
    nvml.is_supported = 0
    assert read().fullness is None
    assert nvml.allocated == 0


def test_a_pynvml_from_before_gpm_has_no_fullness(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlGpmQueryDeviceSupport")
    assert read().fullness is None


def test_samples_too_near_to_each_other_tell_nothing(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "_GPM_LEAST_S", 1e9)
    assert read().fullness is None
    assert nvml.allocated == nvml.freed == 1


@pytest.mark.parametrize("refused", ["init", "rates", "samples"])
def test_without_nvml_the_waits_serve(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    injected(FakeNvml(**{refused: pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)}), monkeypatch)
    told = read()
    assert told.reading.source == WAIT_SOURCE
    assert told.reading.fraction == 0.75
    assert told.readings == (told.reading,)


def test_the_cpu_is_judged_by_its_waits_alone() -> None:
    probe = BusyProbe(open_device("cpu"))
    probe.start()
    told = probe.stop(0.4)
    assert told.reading.fraction == pytest.approx(0.6)
    assert told.fullness is None
