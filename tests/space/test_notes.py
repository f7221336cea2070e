"""What is said of a space with several ranks before it is searched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autotune.settings.environment import Environment
from autotune.settings.training_config import DdpConfig, TrainingConfig
from autotune.space.resolved_space import ResolvedSpace, compose

MakeSpace = Callable[..., ResolvedSpace]
GROUP: dict[str, Any] = {"strategy": "ddp", "world_size": 2}


def test_nothing_is_said_where_nothing_is_odd(make_space: MakeSpace, four_devices: Environment) -> None:
    assert make_space(environment=four_devices).notes == ()
    assert make_space(GROUP, environment=four_devices).notes == ()


def test_unlike_devices_are_told_where_groups_of_them_are_tried(
    make_space: MakeSpace, make_environment: Callable[..., Environment]
) -> None:
    unlike = make_environment(device_count=2, cores=16, device_names=("NVIDIA H200", "NVIDIA T4"))
    (note,) = make_space(environment=unlike).notes
    assert note.startswith("The devices are not alike (NVIDIA H200, NVIDIA T4): a group of them trains at the slowest")
    assert make_space({"strategy": "single"}, environment=unlike).notes == ()


def test_what_was_found_with_the_device_is_told(
    make_space: MakeSpace, make_environment: Callable[..., Environment]
) -> None:
    assert make_space(environment=make_environment(remarks=("There is a GPU.",))).notes == ("There is a GPU.",)


@pytest.mark.parametrize("given_space", [{}, {"strategy": "single"}])
def test_settings_of_ddp_without_ddp_are_said_to_have_no_effect(
    make_space: MakeSpace, given_space: dict[str, Any]
) -> None:
    ddp = {"bucket_cap_mb": [25, 50], "static_graph": True}
    (note,) = make_space({**given_space, "ddp": ddp}).notes
    assert note.startswith("ddp.bucket_cap_mb, ddp.static_graph had no effect")


def test_the_baselines_own_settings_without_effect_are_said(make_space: MakeSpace, four_devices: Environment) -> None:
    ddp = DdpConfig(static_graph=True, find_unused_parameters=True, broadcast_buffers=False)
    baseline = TrainingConfig(strategy="ddp", world_size=2, ddp=ddp)
    notes = make_space(environment=four_devices, baseline=baseline).notes
    assert [note.split(" has no effect")[0] for note in notes] == [
        "The baseline's ddp.find_unused_parameters",
        "The baseline's ddp.broadcast_buffers",
    ]


def test_a_device_that_was_named_is_said_to_stay_alone(
    make_space: MakeSpace, make_environment: Callable[..., Environment]
) -> None:
    second = make_environment(device="cuda:1", device_count=4)
    (note,) = make_space(environment=second).notes
    assert note.startswith("cuda:1 was named")
    assert make_space({"world_size": [1, 2]}, environment=second).notes == ()


def test_a_choice_that_leaves_out_looking_for_unused_parameters_is_kept_and_said(
    make_space: MakeSpace, four_devices: Environment
) -> None:
    ddp = {"find_unused_parameters": False, "static_graph": [False, True]}
    space = make_space({**GROUP, "ddp": ddp}, environment=four_devices, has_unused_parameters=True)
    (note,) = space.notes
    assert "only a static graph runs" in note
    assert "find_unused_parameters: true" in str(compose({"ddp.static_graph": False}, space))
    assert isinstance(compose({"ddp.static_graph": True}, space), TrainingConfig)
    assert make_space({**GROUP, "ddp": ddp}, environment=four_devices).notes == ()


def test_a_hook_that_was_listed_is_the_users_to_judge_unless_he_runs_it_today(
    make_space: MakeSpace, four_devices: Environment
) -> None:
    given_space = {**GROUP, "amp_dtype": "float16", "ddp": {"comm_hook": [None, "fp16", "powersgd"]}}
    (note,) = make_space(given_space, environment=four_devices).notes
    assert note.startswith("ddp.comm_hook fp16, powersgd changes the gradients")
    baseline = TrainingConfig(strategy="ddp", world_size=2, ddp=DdpConfig(comm_hook="fp16"))
    (note,) = make_space(given_space, environment=four_devices, baseline=baseline).notes
    assert note.startswith("ddp.comm_hook powersgd changes")


def test_the_range_that_the_fp16_hook_leaves_is_said_where_no_scaler_makes_up_for_it(
    make_space: MakeSpace, four_devices: Environment
) -> None:
    hooks: dict[str, Any] = {"comm_hook": [None, "fp16"]}
    given_space = {**GROUP, "amp_dtype": ["float32", "bfloat16", "float16"], "ddp": hooks}
    *_, note = make_space(given_space, environment=four_devices).notes
    assert note.startswith("ddp.comm_hook fp16 makes gradients above 65,504 infinite")
    assert note.endswith("in float32, bfloat16 no GradScaler makes up for that.")
    assert len(make_space(given_space | {"amp_dtype": "float16"}, environment=four_devices).notes) == 1
