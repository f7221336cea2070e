"""What users do to one rank of a group. Loaded by the ranks themselves, as a user's file is."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import Dataset, IterableDataset

from autotune.worker import failures as last_words

FEATURES = 4
HELD_BYTES = 800 * 2**20
STANDSTILL_S, PAUSE_S = 1.0, 1.5


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
        os.write(
            1, f"rank {distributed.get_rank()} of {distributed.get_world_size()} speaks\n".encode()
        )

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


class Comparing(nn.Module):
    """A linear layer that holds the ranks' weights and gradients against each other in the third optimizer step of two
    batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(FEATURES, 2), 0

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.layer.weight
        if self.passes == 0:
            self.first = weight.detach().clone()
        if self.passes == 4:
            if torch.equal(weight, self.first):
                raise ValueError("two steps have changed nothing")
            if not _is_the_same_everywhere(weight):
                raise ValueError("the weights differ between ranks")
        if self.passes == 5:
            if weight.grad is None:
                raise ValueError("a step's first batch has left no gradient")
            if _is_the_same_everywhere(weight.grad):
                raise ValueError("gradients were exchanged before a step's last batch")
        self.passes += 1
        outputs: Tensor = self.layer(inputs)
        return outputs


class Steep(nn.Module):
    """A linear layer whose gradients float16 can't hold unless they are scaled down. Each rank notes for each pass
    whether the step before has changed its weights ("1") or was skipped ("0")."""

    def __init__(self, factor: float = 64.0) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)
        self.layer.weight.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call] # torch
        self.last = torch.zeros_like(self.layer.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.layer.weight.detach()
        with Path(f"steps-{distributed.get_rank()}").open("a") as notes:
            notes.write("0" if torch.equal(weight, self.last) else "1")
        self.last = weight.clone()
        outputs: Tensor = self.layer(inputs)
        return outputs


def precipitous() -> nn.Module:
    return Steep(1e9)


def _is_the_same_everywhere(tensor: Tensor) -> bool:
    all_of_them = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(all_of_them, tensor.detach().contiguous())
    return torch.equal(*all_of_them)


# Data


class Sharing(IterableDataset[Any]):
    """Of the numbers from 0 on, each rank has its own share."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(int(os.environ["RANK"]), 128, int(os.environ["WORLD_SIZE"])):
            yield torch.full((FEATURES,), float(number)), number % 2


class Repeating(IterableDataset[Any]):
    """Each rank has all of the numbers."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(64):
            yield torch.full((FEATURES,), float(number)), number % 2


class SlowInRank1(Dataset[Any]):
    """Items that are made at once, but in rank 1."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if distributed.get_rank() == 1:
            time.sleep(0.01)
        return torch.full((FEATURES,), float(index)), index % 2


# Ends of rank 1


def raising_in_1() -> nn.Module:
    return Acting({1: _raise})


def _raise() -> NoReturn:
    raise ValueError("this rank is broken")


def exiting_hard_in_1() -> nn.Module:
    return Acting({1: lambda: os._exit(3)})


def killing_itself_in_build_of_1() -> nn.Module:
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return Acting({})


def killing_itself_in_1() -> nn.Module:
    return Acting({1: lambda: os.kill(os.getpid(), signal.SIGKILL)})


def leaving_shared_memory_in_1() -> nn.Module:
    """Is killed between making two files in shared memory, as NCCL names them, and the last rank's opening them."""

    def act() -> None:
        made = [tempfile.mkstemp(prefix="nccl-", dir="/dev/shm") for _ in range(2)]
        for descriptor, _ in made:
            os.ftruncate(descriptor, 4096)
        Path("made.tmp").write_text("\n".join(name for _, name in made))
        Path("made.tmp").rename("made")
        while not Path("go").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    return Acting({1: act})


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


class Stopping(nn.Module):
    """A linear layer in which rank 1 does what is given once there is a file `go`. A standstill is seen soon."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        last_words._LEAST_S = STANDSTILL_S
        self.layer, self.act = nn.Linear(FEATURES, 2), act

    def forward(self, inputs: Tensor) -> Tensor:
        if distributed.get_rank() == 1 and Path("go").exists():
            self.act()
        outputs: Tensor = self.layer(inputs)
        return outputs


def hanging_in_1_at_last() -> nn.Module:
    return Stopping(hang)


def calling_the_others_alone_in_1() -> nn.Module:
    """In a group of the user's own: in that of the gradients the call would be taken for an exchange of them."""
    own = distributed.new_group(backend="gloo")
    return Stopping(lambda: distributed.all_reduce(torch.ones(1), group=own))


def pausing_in_1() -> nn.Module:
    """Rank 1 pauses before its second batch, and once again as long, late in the window: longer than a standstill may
    be where no batch has ever taken long."""
    pauses_s = [0.0, PAUSE_S]

    class Pausing(Stopping):
        def forward(self, inputs: Tensor) -> Tensor:
            if pauses_s and distributed.get_rank() == 1:
                time.sleep(pauses_s.pop(0))
            return super().forward(inputs)

    def act() -> None:
        Path("go").unlink()
        time.sleep(PAUSE_S)

    return Pausing(act)


def pausing_once_in_1() -> nn.Module:
    """Rank 1 pauses late in the window, where no batch has ever taken long."""
    acts = [lambda: time.sleep(PAUSE_S)]

    return Stopping(lambda: acts.pop()() if acts else None)


def impatient() -> nn.Module:
    return Stopping(lambda: None)


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
