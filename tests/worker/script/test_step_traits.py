"""What of a script's step decides whether cuDNN's timing, a fused optimizer or a compiler's mode is within reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

from autotune.worker.script.sightings import (
    BatchShapes,
    observed_step,
    reached_step,
    step_facts,
    unreached_step,
)

LINEAR = nn.Linear(2, 2)
CONVOLVING = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())


@pytest.fixture(autouse=True)
def _algorithms_of_today() -> Iterator[None]:
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic
    torch.use_deterministic_algorithms(False)


def shapes_of(*batches: Sequence[int]) -> BatchShapes:
    found = BatchShapes()
    for shape in batches:
        found.see({"x": torch.empty(*shape), "id": "a"})
    return found


@pytest.mark.parametrize(
    ("batches", "are_fixed"),
    [
        ([], None),
        ([(8, 3), (8, 3)], None),
        ([(8, 3), (8, 3), (8, 3)], True),
        ([(8, 3), (8, 3), (5, 3)], True),
        ([(8, 3), (6, 3), (5, 3)], False),
        ([(8, 3), (8, 3), (8, 4)], False),
        ([(8, 3), (8, 3), (8, 3, 1)], False),
    ],
)
def test_shapes_are_fixed_where_they_differ_by_an_epochs_last_batch_alone(
    batches: list[tuple[int, ...]], are_fixed: bool | None
) -> None:
    assert shapes_of(*batches).are_fixed is are_fixed


def test_batches_without_tensors_tell_nothing_of_shapes() -> None:
    found = BatchShapes()
    for _ in range(4):
        found.see(["a", None])
    assert found.are_fixed is None


def test_facts_of_the_step_are_those_of_all_its_modules() -> None:
    shapes = shapes_of(*[(8, 2)] * 3)
    plain = {"has_convolutions": False, "has_fixed_shapes": True}
    assert step_facts([LINEAR], shapes) == plain
    assert step_facts([LINEAR, CONVOLVING], shapes) == {**plain, "has_convolutions": True}


@pytest.mark.parametrize("by_torch", [True, False])
def test_a_script_that_asks_for_deterministic_algorithms_keeps_them(by_torch: bool) -> None:
    assert list(reached_step("cuda")) == ["cudnn_benchmark"]
    if by_torch:
        torch.use_deterministic_algorithms(True)
    else:
        torch.backends.cudnn.deterministic = True
    assert not list(reached_step("cuda"))
    optimizer = torch.optim.RMSprop(CONVOLVING.parameters())
    assert unreached_step(optimizer, "cuda", [CONVOLVING], is_compiled=False) == {
        "cudnn_benchmark": "own_algorithms"
    }
    assert not unreached_step(optimizer, "cuda", [LINEAR], is_compiled=False)


def test_cudnn_is_out_of_reach_without_a_gpu_and_nobody_need_be_told() -> None:
    assert not list(reached_step("cpu"))
    assert not unreached_step(
        torch.optim.RMSprop(CONVOLVING.parameters()), "cpu", [CONVOLVING], is_compiled=False
    )


def test_only_an_optimizer_that_torch_could_fuse_is_told_of() -> None:
    class Own(torch.optim.SGD):
        pass

    def reasons(optimizer: torch.optim.Optimizer) -> dict[str, str]:
        return unreached_step(optimizer, "cpu", [LINEAR], is_compiled=False)

    parameters = list(LINEAR.parameters())
    assert reasons(torch.optim.AdamW(parameters)) == {"fused": "own_optimizer"}
    for other in (
        torch.optim.AdamW(parameters, fused=True),
        torch.optim.RMSprop(parameters),
        Own(parameters),
    ):
        assert not reasons(other)


def test_a_mode_is_told_of_where_the_script_compiles() -> None:
    optimizer = torch.optim.RMSprop(LINEAR.parameters())
    assert unreached_step(optimizer, "cpu", [LINEAR], is_compiled=True) == {
        "compile_mode": "in_the_script"
    }


def test_what_the_script_has_is_the_baseline() -> None:
    parameters = list(LINEAR.parameters())
    torch.backends.cudnn.benchmark = True
    assert observed_step(torch.optim.SGD(parameters, fused=True)) == {
        "cudnn_benchmark": True,
        "fused": True,
    }
    torch.backends.cudnn.benchmark = False
    for optimizer in (torch.optim.SGD(parameters), torch.optim.SGD(parameters, fused=False), None):
        assert observed_step(optimizer) == {"cudnn_benchmark": False, "fused": False}
