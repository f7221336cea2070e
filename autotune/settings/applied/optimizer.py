"""An optimizer like the user's: made anew for each trial, since its state belongs to one training.

Comes in: an optimizer, or what a framework has put around it. Goes out: another one of its class with its groups,
settings and hooks, without state. The one that was given is not changed. A fresh one is switched to torch's fused
implementation, where torch has one for it, or from it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from inspect import signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "ForeignParametersError",
    "base_lr",
    "can_fuse",
    "inner_optimizer",
    "is_fused",
    "optimizer_like",
    "set_fused",
    "stateless",
]

_WRAPPERS = {("accelerate", "AcceleratedOptimizer"), ("lightning", "LightningOptimizer")}
"""Package and class of what frameworks put around an optimizer, which they keep as `optimizer`."""


class ForeignParametersError(ValueError):
    """An optimizer does not train the model that it was given with; the message says what to do."""


def inner_optimizer(given: Any) -> Any:
    """The optimizer inside of a framework's wrapper; anything else as it is."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(given).__mro__}
    return given.optimizer if kinds & _WRAPPERS else given


def base_lr(optimizer: torch.optim.Optimizer) -> float | None:
    """The learning rate of the first group, before any schedule; None where there is none above 0.

    A schedule keeps what it began from as `initial_lr`: with a warm-up the current one is 0.
    Source: torch.optim.lr_scheduler.LRScheduler.
    """
    lr = _lr_of(optimizer.param_groups[0])
    return lr or None


def stateless(given: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer without its state, to be restored by `__setstate__`.

    Without `step` too, which a schedule has put around the class's own. Hooks can be added to the copy alone.
    """
    kept = {name: value for name, value in vars(given).items() if name != "step"}
    hooks = {name: OrderedDict(value) for name, value in kept.items() if isinstance(value, OrderedDict)}
    return {**kept, **hooks, "state": defaultdict(dict)}


def optimizer_like(given: torch.optim.Optimizer, parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    """An optimizer of the class, groups and settings of another, without its state; learning rates keep their ratio.

    Args:
        given: The user's.
        parameters: What is trained: the parameters in its groups that require a gradient must be among them.
        lr: Of the first group; of all groups where the first has none above 0.

    Raises:
        ForeignParametersError: some are not.
    """
    trained, own = set(parameters), [parameter for group in given.param_groups for parameter in group["params"]]
    strangers = sum(parameter.requires_grad and parameter not in trained for parameter in own)
    if strangers:
        raise ForeignParametersError(
            f"an optimizer must train parameters of the model that is given, but {strangers} of its {len(own)} belong "
            "to none of its modules; give the model itself in place of a function that makes one, or "
            "optimizer=lambda params, lr: ..."
        )
    base = base_lr(given)
    groups = []
    for group in given.param_groups:
        trainable = [parameter for parameter in group["params"] if parameter.requires_grad]
        before = _lr_of(group)
        changed = {} if before is None else {"lr": lr if base is None else before * (lr / base)}
        if trainable:
            groups.append({**group, **changed, "params": trainable})
    made: torch.optim.Optimizer = object.__new__(type(given))  # its constructor may ask for more than groups hold
    defaults = {**given.defaults, **({"lr": lr} if "lr" in given.defaults else {})}
    made.__setstate__({**stateless(given), "param_groups": groups, "defaults": defaults})
    return made


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it steps by torch's fused implementation."""
    return any(bool(group.get("fused")) for group in optimizer.param_groups)


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch has a fused implementation of an optimizer for the parameters that it trains.

    It has them of its own classes alone; a subclass may inherit one where it leaves the constructor's arguments and the
    step as they are. One step of it on a number of each type and device tells whether its kernels are there. Sparse
    gradients, which none takes, show in training only.
    """
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not _has_fused_step(type(optimizer)) or any(group.get("differentiable") for group in groups):
        return False
    if not all(type(one) in {Tensor, nn.Parameter} and one.is_floating_point() for one in parameters):
        return False
    places = {(parameter.dtype, parameter.device) for parameter in parameters}
    return all(_steps_fused(type(optimizer), *place) for place in places)


def set_fused(optimizer: torch.optim.Optimizer, *, is_on: bool) -> None:
    """Have an optimizer step by torch's fused implementation, or no longer: what its constructor does for that.

    Switched off, it steps as torch would choose by itself (foreach on a GPU): `fused` is None then, since False, given,
    would have torch loop over the parameters. Steps that were counted stay, where the implementation looks for them.
    Source: torch/optim/sgd.py, adam.py, adagrad.py (constructors, _init_group, "Respect when the user inputs
    False/True") and torch/amp/grad_scaler.py (_step_supports_amp_scaling), torch 2.9 to 2.13.
    """
    chosen = {"fused": True if is_on else None, "foreach": None}
    optimizer.defaults.update(chosen)
    for name in ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused"):
        setattr(optimizer, name, is_on)
    for group in optimizer.param_groups:
        group.update(chosen)
        for parameter in group["params"]:
            step = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
            if step is not None:
                place = parameter.device if is_on or group.get("capturable") else "cpu"
                optimizer.state[parameter]["step"] = torch.as_tensor(step, dtype=torch.float32, device=place)


def _has_fused_step(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether it is a class of torch's that knows `fused`, or one with the same arguments and step.

    torch wraps the step of a class when the first optimizer of it is made.
    """
    base: Any = next((own for own in kind.__mro__ if own.__module__.startswith("torch.optim.")), None)
    if base is None or "fused" not in (arguments := signature(base.__init__).parameters):
        return False
    return [*signature(kind.__init__).parameters] == [*arguments] and unwrap(kind.step) is unwrap(base.step)


def _steps_fused(kind: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a fused step on one number can be done."""
    number = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
    number.grad = torch.zeros_like(number)
    try:
        kind([number], fused=True).step()
    except (RuntimeError, TypeError, ValueError):  # torch has no such kernel, or the class no such combination
        return False
    return True


def _lr_of(group: dict[str, Any]) -> float | None:
    """A group's learning rate before any schedule; None where it has none, as where the optimizer finds its own."""
    lr = group.get("initial_lr", group.get("lr"))
    return None if lr is None else float(lr)
