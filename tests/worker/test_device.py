"""Use the CPU as a device; accelerators are in test_device_room.py and test_gpu.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autotune.apply import cores
from autotune.apply.cores import allowed_cores
from autotune.messages.trials import torch_without_cuda
from autotune.worker.device import Device, DeviceError, open_device, opened_device, tf32_overrides
from autotune.worker.environment import _device_nodes, describe


def test_describe() -> None:
    environment = describe(open_device("cpu"))
    assert (environment.device, environment.device_kind) == ("cpu", "cpu")
    assert environment.device_count == 1
    assert environment.device_memory_bytes == environment.ram_bytes > 0
    assert environment.cores >= 1
    assert environment.driver is None
    assert environment.numa_nodes == max(1, len(environment.node_cores))
    assert 0 <= sum(environment.node_cores) <= len(allowed_cores())
    assert environment.device_nodes == ()
    assert environment.native_amp_dtypes[0] == "float32"
    assert "tf32" not in environment.native_amp_dtypes
    assert environment.torch == torch.__version__
    assert (
        environment.versions["torch"] == torch.__version__.partition("+")[0]
        or "+" in environment.versions["torch"]
    )


def test_device_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bus, node in ((1, 2), (2, 5), (3, -1), (4, 0)):
        folder = tmp_path / f"bus/pci/devices/0000:0{bus}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    module = SimpleNamespace(
        device_count=lambda: 4,
        get_device_properties=lambda device: SimpleNamespace(
            pci_domain_id=0, pci_bus_id=device.index + 1, pci_device_id=0
        ),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(cores, "_SYS", tmp_path)
    nodes = {2: [frozenset({0})], 5: [frozenset({1})]}
    gpu = Device(torch.device("cuda:0"), "cuda")
    assert _device_nodes(gpu, nodes) == (0, 1, -1, -1)
    assert _device_nodes(gpu, {}) == ()
    assert _device_nodes(Device(torch.device("xpu:0"), "xpu"), nodes) == ()


@pytest.mark.parametrize("name", ["nonsense", "meta"])
def test_unknown_device(name: str) -> None:
    with pytest.raises(DeviceError, match=name):
        open_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_no_accelerator() -> None:
    assert open_device("auto").kind == "cpu"
    with pytest.raises(DeviceError, match=r"cuda:0.*device: auto"):
        open_device("cuda:0")


def test_cpu_has_no_allocator() -> None:
    device = open_device("cpu", limit_bytes=1)
    device.cap_memory()
    device.synchronize()
    assert torch.zeros(1000).sum() == 0
    assert opened_device() is None
    assert (device.refusals(), device.free_bytes(), device.alloc_retries()) == (0, None, None)


def test_peak_memory() -> None:
    device = open_device("cpu")
    device.reset_peak()
    before = device.peak_memory()
    torch.ones(50_000_000).sum()
    after = device.peak_memory()
    assert after.peak_bytes - before.peak_bytes > 150_000_000
    assert "PSS" in after.source
    device.reset_peak()
    assert device.peak_memory().peak_bytes < after.peak_bytes - 100_000_000


@pytest.mark.parametrize(
    ("set_to", "told"),
    [
        ({}, ()),
        ({"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1",)),
        (
            {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "a secret"},
            ("NVIDIA_TF32_OVERRIDE=0",),
        ),
    ],
)
def test_tf32_overrides(
    set_to: dict[str, str], told: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    assert tf32_overrides() == told
    assert describe(open_device("cpu")).tf32_overrides == ()


def test_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    note = torch_without_cuda("NVIDIA", "2.13.0")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")  # means nothing on the CPU
    assert describe(Device(torch.device("cpu"), "cpu", note=note)).notes == (note,)
    assert describe(open_device("cpu")).notes == ()
