"""The notes of a space before it is searched."""

from __future__ import annotations

from typing import Any

import pytest

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


def test_nothing_is_said_where_nothing_is_odd() -> None:
    assert make_space(environment=FOUR_DEVICES).notes == ()
    assert make_space(GROUP, environment=FOUR_DEVICES).notes == ()


def test_unlike_devices_are_told_where_groups_of_them_are_tried() -> None:
    unlike = make_environment(device_count=2, cores=16, device_names=("NVIDIA H200", "NVIDIA T4"))
    (note,) = make_space(environment=unlike).notes
    assert note == unlike_devices(devices=("NVIDIA H200", "NVIDIA T4"))
    assert make_space({"strategy": "single"}, environment=unlike).notes == ()


def test_what_was_found_with_the_device_is_among_the_notes() -> None:
    assert make_space(environment=make_environment(notes=(Note(code="gpu"),))).notes == (
        Note(code="gpu"),
    )


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_malloc_that_is_set_is_among_the_notes(is_ours: bool) -> None:
    environment = make_environment(malloc=("A=1",), keeps_memory=is_ours)
    assert make_space(environment=environment).notes == (
        malloc(switches=("A=1",), is_ours=is_ours),
    )


@pytest.mark.parametrize("given_space", [{}, {"strategy": "single"}])
def test_settings_of_ddp_without_ddp_are_said_to_have_no_effect(
    given_space: dict[str, Any],
) -> None:
    ddp = {"bucket_cap_mb": [25, 50], "static_graph": True}
    (note,) = make_space({**given_space, "ddp": ddp}).notes
    assert note == ddp_settings_without_ddp(settings=("ddp.bucket_cap_mb", "ddp.static_graph"))


def test_the_baselines_own_settings_without_effect_are_said() -> None:
    ddp = DdpConfig(static_graph=True, find_unused_parameters=True, broadcast_buffers=False)
    baseline = TrainingConfig(strategy="ddp", world_size=2, ddp=ddp)
    notes = make_space(environment=FOUR_DEVICES, baseline=baseline).notes
    device = FOUR_DEVICES.device
    assert notes == (
        baseline_without_effect(
            setting="ddp.find_unused_parameters", reason="static_graph", device=device
        ),
        baseline_without_effect(
            setting="ddp.broadcast_buffers", reason="no_buffers", device=device
        ),
    )


def test_a_device_that_was_named_is_said_to_stay_alone() -> None:
    second = make_environment(device="cuda:1", device_count=4)
    (note,) = make_space(environment=second).notes
    assert note == trials_stay_on_named_device(device="cuda:1")
    assert make_space({"world_size": [1, 2]}, environment=second).notes == ()


def test_a_choice_that_leaves_out_looking_for_unused_parameters_is_kept_and_said() -> None:
    ddp = {"find_unused_parameters": False, "static_graph": [False, True]}
    space = make_space({**GROUP, "ddp": ddp}, environment=FOUR_DEVICES, has_unused_parameters=True)
    (note,) = space.notes
    assert note == unused_parameters_not_searched()
    assert "find_unused_parameters: true" in str(compose({"ddp.static_graph": False}, space))
    assert isinstance(compose({"ddp.static_graph": True}, space), TrainingConfig)
    assert make_space({**GROUP, "ddp": ddp}, environment=FOUR_DEVICES).notes == ()


def test_a_hook_that_was_listed_is_the_users_to_judge_unless_it_runs_today() -> None:
    given_space = {
        **GROUP,
        "amp_dtype": "float16",
        "ddp": {"comm_hook": [None, "fp16", "powersgd"]},
    }
    (note,) = make_space(given_space, environment=FOUR_DEVICES).notes
    assert note == hooks_change_gradients(hooks=("fp16", "powersgd"))
    baseline = TrainingConfig(strategy="ddp", world_size=2, ddp=DdpConfig(comm_hook="fp16"))
    (note,) = make_space(given_space, environment=FOUR_DEVICES, baseline=baseline).notes
    assert note == hooks_change_gradients(hooks=("powersgd",))


def test_the_range_that_the_fp16_hook_leaves_is_said_where_no_scaler_makes_up_for_it() -> None:
    hooks: dict[str, Any] = {"comm_hook": [None, "fp16"]}
    given_space = {**GROUP, "amp_dtype": ["float32", "bfloat16", "float16"], "ddp": hooks}
    *_, note = make_space(given_space, environment=FOUR_DEVICES).notes
    assert note == fp16_hook_overflows(precisions=("float32", "bfloat16"))
    assert (
        len(make_space(given_space | {"amp_dtype": "float16"}, environment=FOUR_DEVICES).notes) == 1
    )


def test_listed_values_of_the_steps_switches_without_effect_are_said() -> None:
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
