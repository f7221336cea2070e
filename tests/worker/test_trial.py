"""Measure a window with the device's conditions, over NVML's stub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.messages.trials import clock_lowered, clock_moved
from autotune.policy import WindowRules
from autotune.records.measurement import GPM_SOURCE, WAIT_SOURCE, Measurement, MemorySample
from autotune.worker import trial
from autotune.worker.conditions import Others
from autotune.worker.device import Device
from autotune.worker.place import Start
from autotune.worker.step import open_trainer
from autotune.worker.window import Run
from tests.factories.loops import make_feed
from tests.nvml_stub import NvmlStub


@dataclass(frozen=True)
class CpuWithNvml(Device):
    """The CPU, which takes itself for an NVIDIA device that NVML knows."""

    def synchronize(self) -> None:
        """Nothing runs behind."""

    def reset_peak(self) -> None:
        """Nobody counts."""

    def alloc_retries(self) -> int | None:
        return None

    def peak_memory(self, retries_before: int | None = None) -> MemorySample:
        return MemorySample(peak_bytes=1, source="made up", alloc_retries=retries_before)


@pytest.fixture
def measure(nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Measurement]:
    """A window of a small model, on a GPU that tells a steady window."""
    nvml.play(gpm=1, sm_clock=1980, power_mw=300_000, temperature=(40, 41), **{"gpm.1": 45})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0"))

    def measured(before: Mapping[str, Others] | None = None) -> Measurement:
        config = TrainingConfig(micro_batch_size=8)
        data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
        device = CpuWithNvml(torch.device("cpu"), "cuda")
        feed = make_feed(data, config)
        first = feed.start()
        workload = Workload(model=None, dataset=data)
        trainer = open_trainer(workload, nn.Linear(4, 2), first.batch, config, device)
        start = Start(started=0.0, built_from=0.0, ends_at=inf, before=before or {})
        run = Run(feed, trainer, 0, perf_counter() + 60)
        return trial.measure(run, WindowRules(max_s=0.3), first, start, lambda _: None)

    return measured


def test_conditions_of_a_window(measure: Callable[..., Measurement], nvml: NvmlStub) -> None:
    found = measure({"GPU-0": Others(others_memory_bytes=5)})
    assert found.conditions is not None
    assert found.conditions.sm_clock_mhz == (1980, 1980)
    assert found.conditions.temperature_c == (40, 41)
    assert found.conditions.others_memory_bytes == 5
    assert (found.busy_source, found.busy_fraction) == (GPM_SOURCE, 0.45)
    assert found.joules_per_sample == pytest.approx(300 / found.samples_per_s)
    assert found.notes == ()
    assert found.host_load is not None
    assert found.host_load.seconds >= sum(block.seconds for block in found.blocks)
    assert nvml.calls("nvmlDeviceGetClockInfo") == 4  # two clocks at two edges


def test_notes_on_a_window(measure: Callable[..., Measurement], nvml: NvmlStub) -> None:
    nvml.play(sm_clock=(1980, 1400), reasons=(0, 0x40))
    assert measure().notes == (
        clock_lowered(reasons=["thermal"]),
        clock_moved(first_mhz=1980, last_mhz=1400),
    )


def test_device_without_conditions(measure: Callable[..., Measurement], nvml: NvmlStub) -> None:
    nvml.play(**{"refuse.nvmlInitWithFlags": 9})
    found = measure()
    assert found.conditions is None
    assert found.busy_source == WAIT_SOURCE
