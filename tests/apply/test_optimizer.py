"""Switch optimizers to torch's fused implementation and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune.apply.prepare import can_fuse, is_fused, optimizer_like, set_fused
from autotune.config.training_config import TrainingConfig

KINDS: list[Any] = [
    torch.optim.SGD,
    lambda parameters, lr: torch.optim.SGD(
        parameters, lr, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    torch.optim.Adam,
    lambda parameters, lr: torch.optim.Adam(parameters, lr, amsgrad=True),
    torch.optim.AdamW,
    torch.optim.Adagrad,
]
LR = 0.05


class Inherited(torch.optim.Adam):
    """Changes neither arguments nor step."""


class Scaled(torch.optim.SGD):
    """Has an argument of its own."""

    def __init__(self, params: Any, lr: float, scale: float = 1.0) -> None:
        super().__init__(params, lr)
        self.scale = scale


class Clipping(torch.optim.SGD):
    """Has a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def numbers(*kinds: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, dtype=kind)) for kind in kinds or (torch.float32,)]


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, **settings: Any) -> list[Tensor]:
    """The weights after some batches, clipped before each step."""
    accumulator = TrainingConfig(lr=LR, **settings).accumulator(model, optimizer)
    generator = torch.Generator().manual_seed(1)

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    for _ in range(12):
        inputs = torch.randn(4, 6, generator=generator)
        with accumulator:
            loss = nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())
            accumulator.backward(loss, before_step=clip)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "amp_dtype"), [*zip(KINDS, ["float32", "bfloat16", "float16"] * 2, strict=True)]
)
def test_fused_optimizer_trains_the_same_weights(kind: Any, amp_dtype: str) -> None:
    plain, fused = network(), network()
    optimizer = kind(fused.parameters(), LR)
    set_fused(optimizer, is_on=True)
    assert is_fused(optimizer)
    theirs = trained(kind(plain.parameters(), LR), plain, amp_dtype=amp_dtype)
    ours = trained(optimizer, fused, amp_dtype=amp_dtype)
    for one, other, start in zip(ours, theirs, network().parameters(), strict=True):
        assert not torch.equal(one, start)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS[::2], ids=["sgd", "adam", "adamw"])
def test_set_fused_is_like_the_constructor(kind: Any) -> None:
    made, switched = kind(numbers(), lr=LR, fused=True), kind(numbers(), lr=LR, foreach=True)
    set_fused(switched, is_on=True)
    own, theirs = (vars(one)["_step_supports_amp_scaling"] for one in (made, switched))
    assert own == theirs
    assert made.defaults == switched.defaults
    (one,), (other,) = made.param_groups, switched.param_groups
    assert {**one, "params": ()} == {**other, "params": ()}


@pytest.mark.parametrize("kind", KINDS)
def test_switched_off_it_steps_as_torch_chooses(kind: Any) -> None:
    plain, once_fused = network(), network()
    optimizer = kind(once_fused.parameters(), LR)
    set_fused(optimizer, is_on=True)
    set_fused(optimizer, is_on=False)
    untouched = kind(plain.parameters(), LR)
    assert not is_fused(optimizer)
    assert optimizer.param_groups[0]["fused"] is None
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)
    ours, theirs = trained(optimizer, once_fused), trained(untouched, plain)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_step_count_is_kept() -> None:
    parameters = numbers()
    optimizer = torch.optim.Adam(parameters, lr=LR)
    for is_on in (True, False, True):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        set_fused(optimizer, is_on=is_on)
    (state,) = optimizer.state.values()
    assert float(state["step"]) == 3


def test_optimizer_like_keeps_groups_and_the_given_one() -> None:
    first, second = numbers()[0], numbers()[0]
    groups: list[dict[str, Any]] = [
        {"params": [first]},
        {"params": [second], "weight_decay": 0.0, "lr": 0.5},
    ]
    given = torch.optim.AdamW(groups, lr=0.1)
    made = optimizer_like(given, [first, second], 0.2)
    set_fused(made, is_on=True)
    assert [
        (group["lr"], group["weight_decay"], group["fused"]) for group in made.param_groups
    ] == [
        (0.2, 0.01, True),
        (1.0, 0.0, True),
    ]
    assert not is_fused(given)
    assert given.defaults["fused"] is None


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: torch.optim.SGD(numbers(), fused=True), True),
        (
            lambda: torch.optim.Adagrad(numbers(torch.float32, torch.bfloat16, torch.float64)),
            True,
        ),
        (lambda: Inherited(numbers()), True),
        (lambda: torch.optim.RMSprop(numbers()), False),
        (lambda: Scaled(numbers(), LR), False),
        (lambda: Clipping(numbers(), LR), False),
        (lambda: torch.optim.Adam(numbers(torch.float32, torch.complex64)), False),
        (lambda: torch.optim.Adam(numbers(), differentiable=True), False),
        (lambda: torch.optim.Adam([nn.Parameter(torch.zeros(2, device="meta"))]), False),
    ],
)
def test_can_fuse(made: Any, expected: bool) -> None:
    for _ in range(2):  # torch wraps the step of a class when its first optimizer is made
        assert can_fuse(made()) is expected


@pytest.mark.parametrize("fused", [False, True])
def test_optimizer_kwargs(fused: bool) -> None:
    optimizer = torch.optim.AdamW(
        numbers(), **TrainingConfig(lr=0.3, fused=fused).optimizer_kwargs()
    )
    assert is_fused(optimizer) is fused
    assert optimizer.param_groups[0]["lr"] == 0.3
