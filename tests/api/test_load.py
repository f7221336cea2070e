"""What `autotune.load` says where a recommendation comes from another machine, by what it can tell without a device."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import autotune
from autotune.apply.cores import processor_name, usable_cores
from autotune.config.training_config import TrainingConfig
from autotune.files.recommended import describe_machine
from autotune.testing import fake_environment
from tests.nvml_stub import NvmlStub

CONFIG = TrainingConfig(num_workers=2)
CPU = {
    "device": "cpu",
    "device_kind": "cpu",
    "device_name": processor_name(),
    "cores": usable_cores(),
    "driver": None,
    "torch": str(torch.__version__),
}
GPU = {**CPU, "device": "cuda:0", "device_kind": "cuda", "device_name": "GB-900", "driver": "580.1"}


def found_on(machine: dict[str, Any], folder: Path) -> Path:
    """A recommended.yaml of a search on such a machine."""
    environment = fake_environment().model_copy(update=machine)
    content = {
        "format": 1,
        "settings": CONFIG.model_dump(),
        "machine": describe_machine(environment),
    }
    path = folder / "recommended.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def loaded(path: Path) -> list[str]:
    """What is warned of, from the caller's own line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert autotune.load(path) == CONFIG
    assert all(each.filename == __file__ and each.category is UserWarning for each in caught)
    return [str(each.message) for each in caught]


def test_nothing_is_said_on_the_machine_that_it_was_found_on(tmp_path: Path) -> None:
    assert loaded(found_on(CPU, tmp_path)) == []


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("device_name", "Abacus 9", f"device Abacus 9 there, {processor_name()} here"),
        ("cores", 512, f"cores 512 there, {usable_cores()} here"),
        ("torch", "1.0", f"torch 1.0 there, {torch.__version__} here"),
    ],
)
def test_what_differs_is_named(part: str, value: object, said: str, tmp_path: Path) -> None:
    path = found_on({**CPU, part: value}, tmp_path)
    (warning,) = loaded(path)
    assert warning.startswith(f"{path} ")
    assert f"({said})" in warning


def test_what_can_not_be_told_without_a_device_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    path = found_on({**CPU, "torch": "1.0", "malloc": ("A=1",), "device_count": 3}, tmp_path)
    assert loaded(path) == []


def test_a_gpu_is_known_by_its_driver(tmp_path: Path, nvml: NvmlStub) -> None:
    nvml.play(driver="580.1", devices=2, **{"0.name": "Voodoo", "1.name": "GB-900"})
    assert loaded(found_on(GPU, tmp_path)) == []
    (said,) = loaded(found_on({**GPU, "device_name": "H300", "driver": "1"}, tmp_path))
    assert [
        name for name in ("device H300", "Voodoo", "driver 1 ", "580.1") if name not in said
    ] == []
    assert nvml.references == 0


def test_a_gpu_that_is_not_here_is_missed(tmp_path: Path, nvml: NvmlStub) -> None:
    nvml.refuse("nvmlInitWithFlags", 9)
    (said,) = loaded(found_on(GPU, tmp_path))
    assert "device GB-900" in said
    assert "driver 580.1" in said
    assert said.count("none here") == 2


@pytest.mark.parametrize(
    "machine", [None, 3, {}, {"cores": [1], "name": {"a": 1}, "device_kind": ["cpu"]}]
)
def test_whatever_a_file_says_of_its_machine_it_is_read(machine: object, tmp_path: Path) -> None:
    path = tmp_path / "recommended.yaml"
    path.write_text(
        yaml.safe_dump({"format": 1, "settings": CONFIG.model_dump(), "machine": machine})
    )
    assert len(loaded(path)) == (isinstance(machine, dict) and len(machine) > 0)
