"""The fingerprint follows the hardware and torch, and nothing else."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from autotune.config.environment import Environment
from autotune.note import Note
from tests.factories import make_environment


@pytest.mark.parametrize(
    "change",
    [
        {"device_kind": "rocm"},
        {"device_name": "NVIDIA A100"},
        {"device_count": 2},
        {"driver": None},
        {"cores": 64},
        {"torch": "2.14.0"},
        {"cuda": None},
        {"device_names": ("NVIDIA H200", "NVIDIA T4")},
        {"tf32_overrides": ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1",)},
        {"malloc": ("MALLOC_TRIM_THRESHOLD_=0",)},
    ],
)
def test_fingerprint_follows_hardware_and_torch(change: dict[str, object]) -> None:
    assert make_environment(**change).fingerprint != make_environment().fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"versions": {}},
        {"ram_bytes": 1},
        {"python": "3.13.0"},
        {"device": "cuda:1"},
        {"notes": (Note(code="x"),)},
        {"keeps_memory": True},
    ],
)
def test_fingerprint_ignores_the_rest(change: dict[str, object]) -> None:
    assert make_environment(**change).fingerprint == make_environment().fingerprint


def test_fingerprint_form() -> None:
    environment = make_environment()
    assert len(environment.fingerprint) == 12
    assert int(environment.fingerprint, 16) >= 0
    assert Environment.model_validate_json(environment.model_dump_json()) == environment


@pytest.mark.parametrize(
    "override", ["PATH=/home/me", "NVIDIA_TF32_OVERRIDE=2", "NVIDIA_TF32_OVERRIDE=0\nX", "1"]
)
def test_only_tf32_switches_are_kept(override: str) -> None:
    with pytest.raises(ValidationError, match="tf32_overrides"):
        make_environment(tf32_overrides=(override,))
