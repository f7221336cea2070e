"""Devices that a forked process can't open, since the one that it was forked from had opened them.

torch marks the children of a process that has asked a device anything, `torch.cuda.is_available()` included
(torch/csrc/cuda/Module.cpp, poison_fork): it raises in them, or finds no device. A package that torch loads by itself,
by an entry point of the group torch.backends, may ask before anybody can keep it from it.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from autotune.worker.setup.device import DeviceError

__all__ = ["refuse_bad_fork", "spoilt_devices", "spoilt_in_forks"]

_DEVICES = ("cuda", "xpu", "mtia", "mps")


def spoilt_devices() -> tuple[str, ...]:
    """Kinds of devices that this process can't open for having been forked."""
    found, registered = [], torch._C._get_privateuse1_backend_name()  # noqa: SLF001 - no public name
    for name in (*_DEVICES, registered):
        is_bad = getattr(getattr(torch, name, None), "_is_in_bad_fork", None)
        if is_bad is not None and is_bad():
            found.append(name)
    return tuple(found)


def spoilt_in_forks() -> tuple[str, ...]:
    """Kinds of devices that a process forked from this one could not open. Forks one, which looks."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):  # nothing of this process may run on in its fork
            os.write(writing, " ".join(spoilt_devices()).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:  # noqa: PTH123 - a descriptor
        said = answer.read()
    os.waitpid(pid, 0)
    return tuple(said.decode().split())


def refuse_bad_fork(device: str) -> None:
    """Refuse to look for a device where it can't be opened: it might seem not to be there.

    Raises:
        DeviceError: this process was forked from one that had opened a device.
    """
    spoilt = spoilt_devices()
    if spoilt and device != "cpu":
        raise DeviceError(
            f"a trial must be the first to open its device, but {', '.join(spoilt)} had been opened before its process "
            "was forked, by a package that torch loads by itself, most likely; set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
