"""Which source tells how busy a window was, and how full: over NVML's stub, by the real pynvml."""

from __future__ import annotations

import pytest

from autotune.records.measurement import GPM_SOURCE, NVML_SOURCE, WAIT_SOURCE
from autotune.worker import conditions as busy
from autotune.worker.conditions import Busyness, BusyProbe, covered_busy_fraction
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
) -> Busyness:
    """A window of these devices', at whose end NVML has these samples; of a length where one is given."""
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
    return probe.stop(data_wait_fraction=0.25)


def told(found: Busyness) -> list[tuple[str, float]]:
    return [(reading.source, round(reading.fraction, 6)) for reading in found.readings]


def test_gpm_speaks_before_nvmls_samples_and_these_before_the_waits(gpu: NvmlStub) -> None:
    found = read(gpu)
    assert told(found) == [(GPM_SOURCE, 0.45), (NVML_SOURCE, 0.68), (WAIT_SOURCE, 0.75)]
    assert found.reading == found.readings[0]
    gpu.play(gpm=0)
    assert read(gpu).reading.source == NVML_SOURCE
    gpu.play(samples=None)
    assert told(read(gpu)) == [(WAIT_SOURCE, 0.75)]


def test_gpm_tells_how_full_each_metric_apart(gpu: NvmlStub) -> None:
    fullness = read(gpu).fullness
    assert fullness is not None
    assert fullness.sm_fraction == 0.75
    assert fullness.sm_occupancy is None, "NVML says that it has none"
    assert fullness.tensor_fraction == 0.125
    assert fullness.dram_fraction == 1.0, "rounding may carry it beyond"
    assert gpu.calls("nvmlGpmSampleAlloc") == 2
    assert gpu.live_samples == 0


def test_a_gpu_whose_gpm_lacks_the_busy_metric_still_tells_how_full(gpu: NvmlStub) -> None:
    gpu.play(**{"gpm.1": None})
    found = read(gpu)
    assert found.reading.source == NVML_SOURCE
    assert found.fullness is not None
    gpu.play(**{f"gpm.{metric}": None for metric in (2, 5, 10)})
    assert read(gpu).fullness is None


@pytest.mark.parametrize("at", ["first", "second"])
def test_a_sample_of_gpm_that_is_refused_at_one_edge_leaves_the_others(
    at: str, gpu: NvmlStub
) -> None:
    gpu.play(
        **{"refuse.nvmlGpmSampleGet": (NO_PERMISSION, 0) if at == "first" else (0, NO_PERMISSION)}
    )
    found = read(gpu)
    assert found.fullness is None
    assert found.reading.source == NVML_SOURCE
    assert gpu.live_samples == 0


def test_samples_of_gpm_too_near_to_each_other_tell_nothing(
    gpu: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy, "GPM_LEAST_S", 1e9)
    assert read(gpu).reading.source == NVML_SOURCE
    assert gpu.calls("nvmlGpmSampleAlloc") == 1
    assert gpu.live_samples == 0


@pytest.mark.parametrize("when", ["start", "end"])
def test_without_samples_at_either_edge_nvml_says_nothing(when: str, nvml: NvmlStub) -> None:
    nvml.play(
        samples=SAMPLES,
        **{"refuse.nvmlDeviceGetSamples": (NO_PERMISSION, 0) if when == "start" else (0, 0, 3)},
    )
    assert told(read(nvml)) == [(WAIT_SOURCE, 0.75)]


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
def test_samples_speak_for_a_window_once_whole_ones_cover_half_of_it(
    stretch_s: float, times_ms: tuple[int, ...], fraction: float | None
) -> None:
    samples = [
        GpuSample(time_us=1000 * at_ms, busy_fraction=1.0 if index == 0 else 0.5)
        for index, at_ms in enumerate(times_ms)
    ]
    assert covered_busy_fraction(samples, stretch_s) == fraction, (
        "the first began before the window"
    )


def test_a_window_that_samples_do_not_cover_is_told_by_the_waits(nvml: NvmlStub) -> None:
    nvml.play(samples=())
    assert read(nvml, stretch_s=999.0).reading.source == NVML_SOURCE
    assert read(nvml, stretch_s=1001.0).reading.source == WAIT_SOURCE


def test_samples_that_come_by_the_clock_are_averaged(nvml: NvmlStub) -> None:
    nvml.play(samples_every_us=1000, busy=70)
    probe = BusyProbe([gpu for gpu in (gpu_with_uuid("GPU-0"),) if gpu is not None])
    probe.start()
    while (reading := probe.stop(0.0).reading).source != NVML_SOURCE:
        pass  # until the clock has gone on for long enough
    assert reading.fraction == pytest.approx(0.7)


def test_of_several_devices_the_least_busy_is_told_where_all_are_known(nvml: NvmlStub) -> None:
    nvml.play(
        devices=2,
        gpm=1,
        **{"1.uuid": "GPU-1", "0.gpm.1": 90, "1.gpm.1": 40, "0.gpm.2": 80, "1.gpm.2": 30},
    )
    found = read(nvml, "GPU-0", "GPU-1")
    assert told(found) == [(GPM_SOURCE, 0.4), (WAIT_SOURCE, 0.75)]
    assert found.fullness is not None
    assert found.fullness.sm_fraction == 0.3
    nvml.play(**{"1.gpm.1": None})
    assert told(read(nvml, "GPU-0", "GPU-1")) == [(WAIT_SOURCE, 0.75)]


def test_an_instance_of_mig_is_told_by_gpm(nvml: NvmlStub) -> None:
    own = {"uuid": "MIG-1", "instance": 3, "parent": 0, "gpm.1": 55.0}
    nvml.play(
        gpm=1,
        samples=SAMPLES,
        **{f"mig.{key}": value for key, value in own.items()},
        **{"gpm.1": 99.0},
    )
    assert told(read(nvml, "MIG-1")) == [(GPM_SOURCE, 0.55), (WAIT_SOURCE, 0.75)]


def test_without_a_gpu_the_waits_serve() -> None:
    probe = BusyProbe(())
    probe.start()
    found = probe.stop(0.4)
    assert told(found) == [(WAIT_SOURCE, 0.6)]
    assert found.fullness is None
