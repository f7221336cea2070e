"""The parent's hold on NVIDIA's driver, over NVML's stub by the real pynvml."""

from __future__ import annotations

import sys

import pynvml
import pytest

from autotune.api.setup import opened_launcher, temporary_folder
from autotune.config.plan import Executor, Plan, Workload
from autotune.config.training_config import TrainingConfig
from autotune.launch.local import LocalLauncher
from autotune.launch.machine import kept_initialised
from autotune.testing import FakeLauncher
from tests.nvml_stub import NO_PERMISSION, NvmlStub

BY_INDEX, BY_UUID = "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByUUID"


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_every_gpu_is_held_until_the_end(nvml: NvmlStub) -> None:
    nvml.play(devices=3)
    with kept_initialised("auto"):
        assert (nvml.references, nvml.calls(BY_INDEX)) == (1, 3)
    assert nvml.references == 0


@pytest.mark.parametrize(
    ("visible", "by_index", "by_uuid"),
    [("1", 2, 0), ("GPU-0, MIG-1", 0, 2), ("", 0, 0), ("-1", 0, 0), ("7", 2, 0)],
)
def test_gpus_are_held_by_uuid_and_all_where_cuda_counts_them_its_own_way(
    visible: str, by_index: int, by_uuid: int, nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.play(devices=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with kept_initialised("cuda:0"):
        assert (nvml.calls(BY_INDEX), nvml.calls(BY_UUID)) == (by_index, by_uuid)


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu:0"])
def test_where_no_trial_runs_on_one_nothing_is_held(device: str, nvml: NvmlStub) -> None:
    with kept_initialised(device):
        assert nvml.references == 0


@pytest.mark.parametrize("refuses", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2", BY_INDEX])
def test_no_refusal_ends_a_search(refuses: str, nvml: NvmlStub) -> None:
    nvml.refuse(refuses, NO_PERMISSION)
    with kept_initialised("auto"):
        assert nvml.references == (refuses != "nvmlInitWithFlags")
    assert nvml.references == 0


def test_without_the_library_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", no_library)
    with kept_initialised("auto"):
        pass


def test_who_uses_nvml_beside_is_not_cut_off(nvml: NvmlStub) -> None:
    pynvml.nvmlInit()
    with pytest.raises(KeyboardInterrupt), kept_initialised("auto"):
        raise KeyboardInterrupt
    assert nvml.references == 1


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_a_search_on_this_machine_holds_its_gpus(executor: str, nvml: NvmlStub) -> None:
    plan = Plan(
        name="case",
        workload=Workload(model=object, dataset=object),
        baseline=TrainingConfig(),
        executor=Executor.model_validate({"kind": executor}),
    )
    with temporary_folder() as folder, opened_launcher(FakeLauncher(), folder, plan):
        assert nvml.references == (executor == "local")
    assert nvml.references == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is Linux's")
def test_a_searchs_launcher_knows_what_its_trials_run_on() -> None:
    workload = Workload(model=object, dataset=object)
    plan = Plan(name="case", workload=workload, baseline=TrainingConfig(), device="cpu")
    with temporary_folder() as folder, opened_launcher(None, folder, plan) as launcher:
        assert isinstance(launcher, LocalLauncher)
        assert launcher._device == "cpu"
