"""Fused or not, an optimizer trains the same weights; what can't be fused is told."""

from __future__ import annotations

from collections.abc import Iterable
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
    ("kind", "amp_dtype", "steps"),
    [
        (kind, amp_dtype, (1, 3)[(place + shift) % 2])
        for place, kind in enumerate(KINDS)
        for shift, amp_dtype in enumerate(("float32", "bfloat16", "float16"))
    ],
)
def test_a_fused_optimizer_trains_the_same_weights(kind: Any, amp_dtype: str, steps: int) -> None:
    settings = {"amp_dtype": amp_dtype, "grad_accum_steps": steps}
    plain, fused = network(), network()
    optimizer = kind(fused.parameters(), LR)
    set_fused(optimizer, is_on=True)
    assert is_fused(optimizer)
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    theirs, ours = (
        trained(kind(plain.parameters(), LR), plain, **settings),
        trained(optimizer, fused, **settings),
    )
    for one, other, start in zip(ours, theirs, before, strict=True):
        assert not torch.equal(one, start)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS[::2], ids=["sgd", "adam", "adamw"])
def test_after_the_constructor_it_is_as_one_that_was_made_fused(kind: Any) -> None:
    made, switched = kind(numbers(), lr=LR, fused=True), kind(numbers(), lr=LR, foreach=True)
    set_fused(switched, is_on=True)
    own, theirs = (vars(one)["_step_supports_amp_scaling"] for one in (made, switched))
    assert own == theirs
    assert made.defaults == switched.defaults
    (one,), (other,) = made.param_groups, switched.param_groups
    assert {**one, "params": ()} == {**other, "params": ()}


@pytest.mark.parametrize(
    "kind", KINDS, ids=["sgd", "momentum", "adam", "amsgrad", "adamw", "adagrad"]
)
def test_switched_off_it_steps_as_torch_chooses_by_itself(kind: Any) -> None:
    plain, once_fused = network(), network()
    optimizer = kind(once_fused.parameters(), LR)
    set_fused(optimizer, is_on=True)
    set_fused(optimizer, is_on=False)
    untouched = kind(plain.parameters(), LR)
    assert not is_fused(optimizer)
    assert {group["fused"] for group in (*optimizer.param_groups, *untouched.param_groups)} == {
        None
    }
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)
    ours, theirs = trained(optimizer, once_fused), trained(untouched, plain)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_steps_that_were_counted_go_on_being_counted() -> None:
    parameters = numbers()
    optimizer = torch.optim.Adam(parameters, lr=LR)
    for is_on in (True, False, True):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        set_fused(optimizer, is_on=is_on)
    (state,) = optimizer.state.values()
    assert float(state["step"]) == 3


def test_groups_keep_their_own_settings_and_the_users_optimizer_stays_as_it_was() -> None:
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
    "made",
    [
        lambda: torch.optim.SGD(numbers()),
        lambda: torch.optim.SGD(numbers(), fused=True),
        lambda: torch.optim.Adagrad(numbers(torch.float32, torch.bfloat16, torch.float64)),
        lambda: Inherited(numbers()),
    ],
)
def test_torchs_own_classes_and_what_inherits_all_of_one_can_be_fused(made: Any) -> None:
    optimizer = made()
    for _ in range(2):  # torch wraps a class's step when it makes the first one of it
        assert can_fuse(optimizer)
        optimizer = made()


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.optim.RMSprop(numbers()),
        lambda: Scaled(numbers(), LR),
        lambda: Clipping(numbers(), LR),
        lambda: torch.optim.Adam(numbers(torch.float32, torch.complex64)),
        lambda: torch.optim.Adam(numbers(), differentiable=True),
        lambda: torch.optim.Adam([nn.Parameter(torch.zeros(2, device="meta"))]),
    ],
    ids=["rmsprop", "argument", "step", "complex", "differentiable", "meta"],
)
def test_what_torch_has_no_fused_step_for_is_told(made: Any) -> None:
    assert not can_fuse(made())


def test_the_arguments_of_the_users_own_optimizer_are_those_of_a_trial() -> None:
    def made(config: TrainingConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **config.optimizer_kwargs())

    plain, fused = (made(TrainingConfig(lr=0.3, fused=is_on), numbers()) for is_on in (False, True))
    assert [is_fused(plain), is_fused(fused)] == [False, True]
    assert {optimizer.param_groups[0]["lr"] for optimizer in (plain, fused)} == {0.3}
    assert plain.defaults == torch.optim.AdamW(numbers(), lr=0.3).defaults
