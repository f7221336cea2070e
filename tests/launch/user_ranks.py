"""What users do to one rank of a group. Loaded by the ranks themselves, as a user's file is."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, distributed, nn

FEATURES = 4
HELD_BYTES = 800 * 2**20


class Acting(nn.Module):
    """A linear layer before whose third forward pass, when the group trains, a rank does what is given for it."""

    def __init__(self, acts: dict[int, Callable[[], object]]) -> None:
        super().__init__()
        self.layer, self.acts, self.passes = nn.Linear(FEATURES, 2), acts, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        act = self.acts.get(distributed.get_rank())
        if self.passes == 3 and act is not None:
            act()
        outputs: Tensor = self.layer(inputs)
        return outputs


# Good groups


def speaking() -> nn.Module:
    def act() -> None:
        os.write(1, f"rank {distributed.get_rank()} of {distributed.get_world_size()} speaks\n".encode())

    return Acting({0: act, 1: act})


def meeting_its_own_alone() -> nn.Module:
    """Fails where the group holds a rank of another launcher."""

    def act() -> None:
        token = torch.tensor([int(os.environ["AUTOTUNE_TOKEN"][:12], 16)])
        low, high = token.clone(), token.clone()
        distributed.all_reduce(low, distributed.ReduceOp.MIN)
        distributed.all_reduce(high, distributed.ReduceOp.MAX)
        if low.item() != high.item():
            raise ValueError("a rank of another search is in this group")

    return Acting({0: act, 1: act})


# Ends of rank 1


def raising_in_1() -> nn.Module:
    return Acting({1: _raise})


def _raise() -> NoReturn:
    raise ValueError("this rank is broken")


def raising_in_build_of_1() -> nn.Module:
    if distributed.get_rank() == 1:
        raise LookupError("no such weights")
    return Acting({})


def running_out_in_1() -> nn.Module:
    def act() -> NoReturn:
        raise MemoryError

    return Acting({1: act})


def exiting_in_1() -> nn.Module:
    return Acting({1: lambda: sys.exit(4)})


def exiting_hard_in_1() -> nn.Module:
    return Acting({1: lambda: os._exit(3)})


def killing_itself_in_1() -> nn.Module:
    return Acting({1: lambda: os.kill(os.getpid(), signal.SIGKILL)})


def killing_the_server_in_1() -> nn.Module:
    def act() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        hang()

    return Acting({1: act})


# Hangs


def hang() -> NoReturn:
    while True:
        time.sleep(60)


def hanging_in_1() -> nn.Module:
    return Acting({1: hang})


def raising_in_0_while_1_hangs() -> nn.Module:
    return Acting({0: _raise, 1: hang})


def raising_in_0_while_1_hangs_deaf() -> nn.Module:
    def act() -> None:
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(one, signal.SIG_IGN)
        hang()

    return Acting({0: _raise, 1: act})


# Memory


def holding() -> nn.Module:
    """Each rank stays within what one may have; both together do not."""

    def act() -> None:
        held = bytearray(b"x") * HELD_BYTES
        hang_with(held)

    return Acting({0: act, 1: act})


def hang_with(_: bytearray) -> NoReturn:
    hang()
