"""Note what is odd in a space before it is searched."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.environment import Environment
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.messages.space import (
    baseline_without_effect,
    ddp_settings_without_ddp,
    fp16_hook_overflows,
    hooks_change_gradients,
    malloc,
    trials_stay_on_named_device,
    unlike_devices,
    unused_parameters_not_searched,
)
from autotune.note import Note
from autotune.space.space import compose
from tests.factories import CPU, FOUR_DEVICES, make_environment, make_space

GROUP: dict[str, Any] = {"strategy": "ddp", "world_size": 2}


UNLIKE = make_environment(device_count=2, cores=16, device_names=("NVIDIA H200", "NVIDIA T4"))
NAMED = make_environment(device="cuda:1", device_count=4)
ODD = DdpConfig(static_graph=True, find_unused_parameters=True, broadcast_buffers=False)
DDP = {"ddp": {"bucket_cap_mb": [25, 50], "static_graph": True}}
NO_DDP = ddp_settings_without_ddp(settings=("ddp.bucket_cap_mb", "ddp.static_graph"))
HOOKS = {**GROUP, "amp_dtype": "float16", "ddp": {"comm_hook": [None, "fp16", "powersgd"]}}


@pytest.mark.parametrize(
    ("given_space", "environment", "baseline", "notes"),
    [
        ({}, FOUR_DEVICES, None, []),
        (GROUP, FOUR_DEVICES, None, []),
        ({}, make_environment(notes=(Note(code="gpu"),)), None, [Note(code="gpu")]),
        (
            {},
            make_environment(malloc=("A=1",), keeps_memory=True),
            None,
            [malloc(switches=("A=1",), is_ours=True)],
        ),
        ({}, UNLIKE, None, [unlike_devices(devices=("NVIDIA H200", "NVIDIA T4"))]),
        ({"strategy": "single"}, UNLIKE, None, []),
        (DDP, None, None, [NO_DDP]),
        ({**DDP, "strategy": "single"}, FOUR_DEVICES, None, [NO_DDP]),
        ({}, NAMED, None, [trials_stay_on_named_device(device="cuda:1")]),
        ({"world_size": [1, 2]}, NAMED, None, []),
        (
            {},
            FOUR_DEVICES,
            ODD,
            [
                baseline_without_effect(f"ddp.{setting}", reason, FOUR_DEVICES.device)
                for setting, reason in (
                    ("find_unused_parameters", "static_graph"),
                    ("broadcast_buffers", "no_buffers"),
                )
            ],
        ),
        # Only the user can judge a hook, unless the baseline has it
        (HOOKS, FOUR_DEVICES, None, [hooks_change_gradients(hooks=("fp16", "powersgd"))]),
        (
            HOOKS,
            FOUR_DEVICES,
            DdpConfig(comm_hook="fp16"),
            [hooks_change_gradients(hooks=("powersgd",))],
        ),
        (
            HOOKS | {"amp_dtype": ["float32", "float16"]},
            FOUR_DEVICES,
            None,
            [
                hooks_change_gradients(hooks=("fp16", "powersgd")),
                fp16_hook_overflows(precisions=("float32",)),
            ],
        ),
    ],
)
def test_notes(
    given_space: dict[str, Any],
    environment: Environment | None,
    baseline: DdpConfig | None,
    notes: list[Note],
) -> None:
    """`baseline`: settings of a group of two."""
    own = TrainingConfig(**GROUP, ddp=baseline) if baseline else None
    assert [*make_space(given_space, environment=environment, baseline=own).notes] == notes


def test_unused_parameters_left_out() -> None:
    ddp = {"find_unused_parameters": False, "static_graph": [False, True]}
    space = make_space({**GROUP, "ddp": ddp}, environment=FOUR_DEVICES, has_unused_parameters=True)
    (note,) = space.notes
    assert note == unused_parameters_not_searched()
    assert "find_unused_parameters: true" in str(compose({"ddp.static_graph": False}, space))
    assert isinstance(compose({"ddp.static_graph": True}, space), TrainingConfig)
    assert make_space({**GROUP, "ddp": ddp}, environment=FOUR_DEVICES).notes == ()


def test_listed_values_without_effect() -> None:
    listed = {
        "fused": [False, True],
        "cudnn_benchmark": True,
        "compile": True,
        "compile_mode": "reduce-overhead",
    }
    found = make_space(listed, environment=CPU).notes
    assert {
        (note.figures["setting"], note.figures["value"], note.figures["reason"]) for note in found
    } == {
        ("fused", True, "no_fused_optimizer"),
        ("cudnn_benchmark", True, "no_cudnn"),
        ("compile_mode", "reduce-overhead", "no_cuda_graphs"),
    }
