"""Join the ranks of a trial into one group, and let them agree on what all must do alike.

Comes in: a job, this rank's number and its device. Goes out: a `Group`; a single process is a group
of one, for which agreeing costs nothing. Ranks that train in step must take the same number of
batches: whatever depends on a clock is agreed on here first, over the CPU, even if gradients go
over NCCL.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from autotune.protocol.messages import TrialJob
from autotune.space import constraints as rules
from autotune.worker.device import Device, DeviceError

_FILE = "file://"
_TORCH_DISTRIBUTED = f"torch{os.sep}distributed{os.sep}"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_COLLATERAL = re.compile(
    r"Connection (closed|reset|refused)|closed by peer|Broken pipe|remote process exited|pair closure|timed? ?out",
    re.IGNORECASE,
)
"""Messages of gloo and NCCL. NCCL's other ones, such as its own lack of memory, are this rank's own
failure."""


@dataclass(frozen=True, slots=True)
class Group:
    """This rank among the ranks of its trial."""

    rank: int = 0
    size: int = 1
    control: Any = None
    """A gloo group for agreeing; None for a single process."""
    local_size: int = 1
    """Ranks on this host."""

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank. Every rank must call it."""
        return bool(self.most(float(flag)))

    def all(self, flag: bool) -> bool:
        """Return whether a flag is set on all ranks. Every rank must call it."""
        return not self.any(not flag)

    def most(self, value: float) -> float:
        """Return the largest value of all ranks. Every rank must call it."""
        if self.control is None:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX, group=self.control)
        return float(shared.item())

    def is_equal(self, value: float) -> bool:
        """Return whether all ranks have the same value. Every rank must call it."""
        return self.most(value) == -self.most(-value)

    def wait(self) -> None:
        """Wait for all ranks."""
        if self.control is not None:
            distributed.barrier(group=self.control)


ALONE = Group()
"""The group of a single process."""


def open_group(job: TrialJob, rank: int, device: Device) -> Group:
    """Join the other ranks of a DDP trial; for any other trial, return the group of one.

    A rendezvous by file keeps all traffic on the loopback interface: no name server outside the
    machine is asked. Ranks on several hosts meet at a TCP store of rank 0.

    Args:
        job: The trial's job.
        rank: Number of this rank among all of the trial.
        device: The device of this rank.

    Raises:
        DeviceError: Torch has no backend for this kind of device.
    """
    if job.config.strategy != "ddp" or job.rendezvous is None:
        return ALONE
    backend = rules.GROUP_BACKENDS.get(device.kind)
    if (
        backend is None
        or not distributed.is_available()
        or not distributed.is_backend_available(backend)
    ):
        raise DeviceError(
            f"strategy ddp needs a torch with the backend {backend} for {device.kind}, but torch "
            f"{torch.__version__} has none; set strategy: single"
        )
    size = job.config.world_size
    part = job.part
    first = 0
    local_size = size
    interface = None
    if part is not None:
        first = part.first_rank
        local_size = part.ranks
        interface = part.interface

    # Set torchrun's variables, which loader workers inherit.
    os.environ["RANK"] = str(rank)
    os.environ["LOCAL_RANK"] = str(rank - first)
    os.environ["WORLD_SIZE"] = str(size)
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size)

    distributed.init_process_group(
        backend,
        **_meeting_place(job.rendezvous, size, interface),
        rank=rank,
        world_size=size,
        # a waiting rank fails shortly before all are ended
        timeout=timedelta(seconds=max(1.0, job.process.deadline_s - 3.0)),
        device_id=device.torch_device if backend == "nccl" else None,
    )
    if backend != "gloo":
        _exchange_once(device)
    if size == 1:
        return Group(rank, size)
    # apart from the gradients' group, with whose calls the order would not be defined
    control = distributed.new_group(backend="gloo")
    return Group(rank, size, control, local_size)


def _exchange_once(device: Device) -> None:
    """Exchange one number, so that the communicator and its buffers exist before memory is divided.

    NCCL connects for each algorithm when it is first chosen, so large gradients may add more: the
    cap on memory is set again after the first steps. Source: NCCL_RUNTIME_CONNECT in NCCL's user
    guide.
    """
    distributed.all_reduce(torch.zeros(1, device=device.torch_device))
    device.synchronize()


def _meeting_place(rendezvous: str, size: int, interface: str | None) -> dict[str, Any]:
    """Return the arguments of init_process_group that say where the ranks meet.

    A file is opened here, since torch's URL parser fails on a path with a question mark. For ranks
    on several hosts gloo's interface is set: gloo would take the one that the host's name resolves
    to, which is the loopback one on many machines. NCCL skips that one by itself; given a name, it
    would use neither several interfaces nor the faster ones that it prefers, and would ignore
    nccl.conf. Source: NCCL_SOCKET_IFNAME in NCCL's user guide.
    """
    if not rendezvous.startswith(_FILE):
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        return {"init_method": rendezvous}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    store = distributed.FileStore(rendezvous.removeprefix(_FILE), size)  # type: ignore[attr-defined] # torch hides it
    return {"store": store}


def is_collateral(error: BaseException) -> bool:
    """Return whether an exception only means that another rank is gone.

    That is a closed connection, or a collective that timed out.
    """
    if not distributed.is_available() or not (
        distributed.is_initialized() or _comes_from_torch_distributed(error)
    ):
        return False
    is_message = bool(_COLLATERAL.search(str(error))) and "DataLoader" not in str(error)
    named = distributed.DistNetworkError | distributed.DistStoreError
    return isinstance(error, named) or (isinstance(error, RuntimeError) and is_message)


def _comes_from_torch_distributed(error: BaseException) -> bool:
    """Return whether an exception was raised while the ranks were still meeting."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(_TORCH_DISTRIBUTED in frame.f_code.co_filename for frame, _ in frames)
