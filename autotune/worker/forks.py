"""Devices that a forked process can't open, since its parent had opened them before the fork.

torch calls the children of a process that has used a device, if only by `torch.cuda.is_available()`, bad forks
(torch/csrc/cuda/Module.cpp, poison_fork): it raises in them, or finds no device. A package that torch loads by itself,
by an entry point of the group torch.backends, may do so before it can be prevented.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from autotune.worker.setup.device import DeviceError

__all__ = ["bad_fork_devices", "bad_fork_devices_of_children", "refuse_bad_fork"]

_DEVICES = ("cuda", "xpu", "mtia", "mps")


def bad_fork_devices() -> tuple[str, ...]:
    """Kinds of devices that this process can't open for having been forked."""
    found, registered = [], torch._C._get_privateuse1_backend_name()  # noqa: SLF001 - no public name
    for name in (*_DEVICES, registered):
        is_bad = getattr(getattr(torch, name, None), "_is_in_bad_fork", None)
        if is_bad is not None and is_bad():
            found.append(name)
    return tuple(found)


def bad_fork_devices_of_children() -> tuple[str, ...]:
    """Kinds of devices that a process forked from this one could not open. Forks one to find out."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):  # nothing of this process may run on in its fork
            os.write(writing, " ".join(bad_fork_devices()).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:  # noqa: PTH123 - a descriptor
        names = answer.read()
    os.waitpid(pid, 0)
    return tuple(names.decode().split())


def refuse_bad_fork(device: str) -> None:
    """Refuse to search for a device where it can't be opened: it might seem not to exist.

    Raises:
        DeviceError: this process was forked from one that had opened a device.
    """
    devices = bad_fork_devices()
    if devices and device != "cpu":
        raise DeviceError(
            f"a trial must be the first to open its device, but {', '.join(devices)} had been opened before its "
            "process was forked, most likely by a package that torch loads by itself; set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
