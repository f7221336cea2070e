"""Choose the device for "auto"; a GPU that torch was built for is never ignored."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.messages.trials import torch_without_cuda
from autotune.worker import device
from autotune.worker.device import Detection, DeviceError, choose, detect, open_device, unusable
from tests.nvml_stub import NvmlStub

CUDA, ROCM = "CUDA 13.0", "ROCm 7.0"


def seen(**given: Any) -> Detection:
    return Detection(torch="2.13.0", **given)


@pytest.mark.parametrize("given", [{}, {"built_for": CUDA, "gpu": "NVIDIA", "driver": "580.65"}])
def test_usable_accelerator(given: dict[str, str]) -> None:
    assert choose(seen(usable="cuda", **given)) == ("cuda", None)


@pytest.mark.parametrize("built_for", [None, CUDA])
def test_no_gpu(built_for: str | None) -> None:
    assert choose(seen(built_for=built_for)) == ("cpu", None)


@pytest.mark.parametrize(
    ("built_for", "gpu", "driver", "named"),
    [
        (CUDA, "NVIDIA", "535.104", ["2.13.0", CUDA, "NVIDIA", "535.104"]),
        (CUDA, "NVIDIA", None, ["libcuda.so.1"]),
        (ROCM, "AMD", None, ["AMD", ROCM]),
    ],
)
def test_unusable_gpu_is_refused(
    built_for: str, gpu: str, driver: str | None, named: list[str]
) -> None:
    with pytest.raises(DeviceError, match=r"^device: auto.*device: cpu$") as told:
        choose(seen(built_for=built_for, gpu=gpu, driver=driver))
    assert [one for one in named if one not in str(told.value)] == []


NOT_READY = "CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"


@pytest.mark.parametrize(
    ("known", "named"),
    [
        ({"driver_cuda": 12}, ["CUDA 12"]),
        ({"driver_cuda": 12, "torch_warning": "too old"}, ["(torch says: too old)", "CUDA 12"]),
        ({"driver_cuda": 13, "torch_warning": NOT_READY}, [NOT_READY]),
        ({"driver_cuda": 13, "visible": "CUDA_VISIBLE_DEVICES=7"}, ["CUDA_VISIBLE_DEVICES=7"]),
        (
            {"driver_cuda": 13, "visible": "CUDA_VISIBLE_DEVICES=0", "torch_warning": NOT_READY},
            ["CUDA_VISIBLE_DEVICES=0", NOT_READY],
        ),
        ({}, ["libcuda.so.1", "NVIDIA_DRIVER_CAPABILITIES=compute,"]),
        ({"driver_cuda": 13}, []),
    ],
)
def test_remedies(known: dict[str, Any], named: list[str]) -> None:
    reason = unusable(seen(built_for=CUDA, gpu="NVIDIA", driver="550.54", **known))
    assert reason is not None
    assert "driver 550.54" in reason
    assert [one for one in named if one not in reason] == []
    assert ("CUDA 12" in reason) == (known.get("driver_cuda") == 12)
    assert ("libcuda.so.1" in reason) == (not known)


def test_driver_runs_all_minor_versions() -> None:
    reason = unusable(seen(built_for="CUDA 12.8", gpu="NVIDIA", driver="535.104", driver_cuda=12))
    assert reason is not None
    assert "newer" not in reason


def test_torch_without_cuda() -> None:
    name, note = choose(seen(gpu="NVIDIA", driver="535.104"))
    assert name == "cpu"
    assert note == torch_without_cuda(gpu="NVIDIA", torch="2.13.0")


@pytest.mark.parametrize(
    ("maker", "environment", "is_hidden", "visible"),
    [
        ("NVIDIA", {}, False, None),
        ("NVIDIA", {"CUDA_VISIBLE_DEVICES": "GPU-5b5b"}, False, "CUDA_VISIBLE_DEVICES=GPU-5b5b"),
        ("NVIDIA", {"CUDA_VISIBLE_DEVICES": "-1"}, True, "CUDA_VISIBLE_DEVICES=-1"),
        ("AMD", {"ROCR_VISIBLE_DEVICES": ""}, True, "ROCR_VISIBLE_DEVICES="),
        (
            "AMD",
            {"ROCR_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "0"},
            True,
            "ROCR_VISIBLE_DEVICES=-1, HIP_VISIBLE_DEVICES=0",
        ),
        (
            "AMD",
            {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "-1"},
            False,
            "HIP_VISIBLE_DEVICES=0",
        ),
        ("AMD", {"CUDA_VISIBLE_DEVICES": "-1"}, True, "CUDA_VISIBLE_DEVICES=-1"),
    ],
)
def test_variables_that_hide_gpus(
    maker: str,
    environment: dict[str, str],
    is_hidden: bool,
    visible: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (device._is_hidden(maker), device._visible(maker)) == (is_hidden, visible)


def test_can_open(tmp_path: Path) -> None:
    node = tmp_path / "nvidia0"
    assert not device._can_open(node)
    node.touch()
    assert device._can_open(node)
    assert not device._can_open(tmp_path)  # a folder, like a device of another job


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch can use an accelerator")
@pytest.mark.parametrize("cuda", ["13.0", None])
def test_open_device_without_cuda(
    cuda: str | None, nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with one NVIDIA GPU, of which NVML tells; what torch was built for is made up."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml.play(driver="535.104", cuda=12020)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    assert open_device("cpu").note is None
    if cuda is None:
        note = open_device("auto").note
        assert note is not None
        assert note.code == "torch_without_cuda"
        return
    for name in ("auto", "cuda:0"):
        with pytest.raises(DeviceError, match=rf"{name}.*CUDA 13\.0.*NVIDIA.*535\.104.*CUDA 12"):
            open_device(name)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch can use an accelerator")
@pytest.mark.parametrize("name", ["auto", "cuda:0"])
def test_warning_of_torch_is_quoted(
    name: str, nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch says it the first time that it is asked, and no more."""
    words = [
        f"{NOT_READY} (Triggered internally at CUDAFunctions.cpp:119.)\n  return torch._C._cuda_getDeviceCount()"
    ]

    def is_available() -> bool:
        if words:
            warnings.warn(words.pop(), UserWarning, stacklevel=1)
        return False

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(torch.accelerator, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    nvml.play(driver="580.65", cuda=13000)
    with pytest.warns(UserWarning, match="Error 802"), pytest.raises(DeviceError) as told:
        open_device(name)
    assert [
        one for one in ("580.65", "CUDA_VISIBLE_DEVICES=1", NOT_READY) if one not in str(told.value)
    ] == []


@pytest.mark.skipif(
    torch.accelerator.is_available() or any(Path("/dev").glob("nvidia[0-9]*")), reason="has a GPU"
)
def test_detect_without_a_gpu() -> None:
    built_for = None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    assert detect() == Detection(torch=torch.__version__, built_for=built_for)
