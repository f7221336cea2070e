"""An optimizer like the user's: made anew for each trial, since its state belongs to one training.

Comes in: an optimizer, or what a framework has put around it. Goes out: another one of its class with its groups,
settings and hooks, without state. The one that was given is not changed.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["ForeignParametersError", "base_lr", "inner_optimizer", "optimizer_like", "stateless"]

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


def _lr_of(group: dict[str, Any]) -> float | None:
    """A group's learning rate before any schedule; None where it has none, as where the optimizer finds its own."""
    lr = group.get("initial_lr", group.get("lr"))
    return None if lr is None else float(lr)
