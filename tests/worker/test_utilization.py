"""Read how busy and how full a device was in a window, over NVML's stub by the real pynvml."""

from __future__ import annotations

import pytest

from autotune.records.measurement import (
    GPM_SOURCE,
    NVML_SOURCE,
    WAIT_SOURCE,
    BusyReading,
    Fullness,
)
from autotune.worker import conditions as busy
from autotune.worker.conditions import BusyProbe, covered_busy_fraction
from autotune.worker.nvml import GpuSample, gpu_with_uuid
from tests.nvml_stub import NO_PERMISSION, NvmlStub

SAMPLES = tuple(
    f"{100_000_000 * time}:{percent}"
    for time, percent in ((1, 10), (2, 20), (4, 90), (7, 60), (9, 80))
)
"""Of NVML's; a window begins after the second. They cover whatever a test takes many times over."""


@pytest.fixture(autouse=True)
def _windows_without_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were as long as GPM needs."""
    monkeypatch.setattr(busy, "GPM_LEAST_S", 0.0)


@pytest.fixture
def gpu(nvml: NvmlStub) -> NvmlStub:
    """One that answers all."""
    metrics = {"gpm.1": 45.0, "gpm.2": 75.0, "gpm.5": 12.5, "gpm.10": 130.0}
    nvml.play(gpm=1, samples=SAMPLES[:2], **metrics)
    return nvml


def read(
    stub: NvmlStub, *uuids: str, samples: tuple[str, ...] = SAMPLES, stretch_s: float | None = None
) -> tuple[dict[str, float], Fullness | None]:
    """Measure these devices over a window at whose end NVML has these samples.

    Returns:
        The busy fraction by source, the best first, and the fullness.
    """
    if "samples" in stub.answers:
        stub.play(samples=SAMPLES[:2])
    gpus = [gpu for uuid in uuids or ("GPU-0",) if (gpu := gpu_with_uuid(uuid)) is not None]
    probe = BusyProbe(gpus)
    probe.start()
    if "samples" in stub.answers:
        stub.play(samples=samples)
    if stretch_s is not None:
        for own in probe._probes:
            own._begun -= stretch_s
    readings, fullness = probe.stop(data_wait_fraction=0.25)
    return {reading.source: round(reading.fraction, 6) for reading in readings}, fullness


def test_gpm_comes_before_nvmls_samples_and_these_before_waits(gpu: NvmlStub) -> None:
    readings, fullness = read(gpu)
    assert list(readings.items()) == [(GPM_SOURCE, 0.45), (NVML_SOURCE, 0.68), (WAIT_SOURCE, 0.75)]
    # NVML has no occupancy here, and rounding may carry a share beyond 1
    assert fullness == Fullness(
        sm_fraction=0.75, sm_occupancy=None, tensor_fraction=0.125, dram_fraction=1.0
    )
    assert gpu.calls("nvmlGpmSampleAlloc") == 2
    assert gpu.live_samples == 0
    gpu.play(gpm=0)
    assert list(read(gpu)[0]) == [NVML_SOURCE, WAIT_SOURCE]
    gpu.play(samples=None)
    assert read(gpu)[0] == {WAIT_SOURCE: 0.75}


def test_fullness_without_the_busy_metric(gpu: NvmlStub) -> None:
    gpu.play(**{"gpm.1": None})
    readings, fullness = read(gpu)
    assert GPM_SOURCE not in readings
    assert fullness is not None
    gpu.play(**{f"gpm.{metric}": None for metric in (2, 5, 10)})
    assert read(gpu)[1] is None


@pytest.mark.parametrize("refused", [(NO_PERMISSION, 0), (0, NO_PERMISSION)])
def test_gpm_refused_at_one_edge(refused: tuple[int, int], gpu: NvmlStub) -> None:
    gpu.play(**{"refuse.nvmlGpmSampleGet": refused})
    readings, fullness = read(gpu)
    assert fullness is None
    assert list(readings) == [NVML_SOURCE, WAIT_SOURCE]
    assert gpu.live_samples == 0


def test_gpm_samples_too_close(gpu: NvmlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "GPM_LEAST_S", 1e9)
    assert GPM_SOURCE not in read(gpu)[0]
    assert gpu.calls("nvmlGpmSampleAlloc") == 1
    assert gpu.live_samples == 0


@pytest.mark.parametrize("refused", [(NO_PERMISSION, 0), (0, 0, 3)])
def test_no_nvml_samples_at_one_edge(refused: tuple[int, ...], nvml: NvmlStub) -> None:
    nvml.play(samples=SAMPLES, **{"refuse.nvmlDeviceGetSamples": refused})
    assert read(nvml)[0] == {WAIT_SOURCE: 0.75}


@pytest.mark.parametrize(
    ("stretch_s", "times_ms", "fraction"),
    [
        (0.6, (100, 300, 500), 0.5),  # 5 Hz: the second and third lie within, and cover two thirds
        (0.6, (100, 300), None),  # one has got lost: a third
        (0.6, (500,), None),
        (0.6, (), None),
        (2.5, (500, 1500, 2500), 0.5),  # a product that samples once a second
        (0.6, (10, 20, 30), None),  # dense, but of the beginning alone
    ],
)
def test_samples_must_cover_half_of_a_window(
    stretch_s: float, times_ms: tuple[int, ...], fraction: float | None
) -> None:
    # the first sample began before the window
    samples = [
        GpuSample(time_us=1000 * at_ms, busy_fraction=1.0 if index == 0 else 0.5)
        for index, at_ms in enumerate(times_ms)
    ]
    assert covered_busy_fraction(samples, stretch_s) == fraction


def test_waits_serve_if_samples_do_not_cover_the_window(nvml: NvmlStub) -> None:
    nvml.play(samples=())
    assert NVML_SOURCE in read(nvml, stretch_s=999.0)[0]
    assert NVML_SOURCE not in read(nvml, stretch_s=1001.0)[0]


def test_several_devices_show_the_least_busy(nvml: NvmlStub) -> None:
    own = {"1.uuid": "GPU-1", "0.gpm.1": 90, "1.gpm.1": 40, "0.gpm.2": 80, "1.gpm.2": 30}
    nvml.play(devices=2, gpm=1, **own)
    readings, fullness = read(nvml, "GPU-0", "GPU-1")
    assert readings == {GPM_SOURCE: 0.4, WAIT_SOURCE: 0.75}
    assert fullness is not None
    assert fullness.sm_fraction == 0.3
    nvml.play(**{"1.gpm.1": None})
    assert read(nvml, "GPU-0", "GPU-1")[0] == {WAIT_SOURCE: 0.75}


def test_mig_instance_has_gpm_of_its_own(nvml: NvmlStub) -> None:
    own = {"uuid": "MIG-1", "instance": 3, "parent": 0, "gpm.1": 55.0}
    instance = {f"mig.{key}": value for key, value in own.items()}
    nvml.play(gpm=1, samples=SAMPLES, **instance, **{"gpm.1": 99.0})
    assert read(nvml, "MIG-1")[0] == {GPM_SOURCE: 0.55, WAIT_SOURCE: 0.75}


def test_waits_serve_without_a_gpu() -> None:
    probe = BusyProbe(())
    probe.start()
    reading = BusyReading(fraction=0.6, source=WAIT_SOURCE)
    assert probe.stop(0.4) == ((reading,), None)
