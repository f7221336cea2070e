"""The fingerprint follows the hardware and torch, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autotune.core.environment import Environment


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
    ],
)
def test_other_hardware_or_another_torch_has_another_fingerprint(
    make_environment: Callable[..., Environment], change: dict[str, object]
) -> None:
    assert make_environment(**change).fingerprint != make_environment().fingerprint


@pytest.mark.parametrize("change", [{"versions": {}}, {"ram_bytes": 1}, {"python": "3.13.0"}, {"device": "cuda:1"}])
def test_what_speed_does_not_depend_on_leaves_the_fingerprint(
    make_environment: Callable[..., Environment], change: dict[str, object]
) -> None:
    assert make_environment(**change).fingerprint == make_environment().fingerprint


def test_a_fingerprint_is_twelve_hex_digits_and_survives_json(make_environment: Callable[..., Environment]) -> None:
    environment = make_environment()
    assert len(environment.fingerprint) == 12
    assert int(environment.fingerprint, 16) >= 0
    assert Environment.model_validate_json(environment.model_dump_json()) == environment
