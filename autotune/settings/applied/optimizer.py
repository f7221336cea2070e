"""An optimizer like the user's: made anew for each trial, since its state belongs to one training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

__all__ = ["ForeignParametersError", "optimizer_like"]


class ForeignParametersError(ValueError):
    """An optimizer does not train the model that it was given with; the message says what to do."""


def optimizer_like(given: torch.optim.Optimizer, parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    """An optimizer of the class, groups and settings of another, without its state; learning rates keep their ratio.

    Args:
        given: The user's.
        parameters: What is trained: the parameters in its groups that require a gradient must be among them.
        lr: Of the first group.

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
    ratio = lr / float(given.param_groups[0]["lr"])
    groups = [
        {
            **group,
            "params": [parameter for parameter in group["params"] if parameter.requires_grad],
            "lr": float(group["lr"]) * ratio,
        }
        for group in given.param_groups
    ]
    made = copy(given)  # as torch restores one: not by a constructor, which may ask for more than groups hold
    made.state, made.param_groups = defaultdict(dict), [group for group in groups if group["params"]]
    made.defaults = {**given.defaults, "lr": lr}
    return made
