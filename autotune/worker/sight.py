"""Which device "auto" stands for, and whether a GPU would be passed over by that.

Takes what is seen of torch and of the machine (`look`, the only reader); hands on a Choice, or refuses: a torch that
can't use the GPU of this machine would tune the CPU, and nobody would notice.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from autotune.worker import nvml

__all__ = ["Choice", "DeviceError", "Sight", "choose", "look", "unusable"]

_NODES = {"NVIDIA": "nvidia[0-9]*", "AMD": "kfd"}
"""Files in /dev by which a maker's driver gives its GPUs. Source: NVIDIA driver README, nvidia-modprobe; ROCm
documentation, running containers."""
_VISIBLE = {"NVIDIA": ("CUDA_VISIBLE_DEVICES",), "AMD": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}
_HIDDEN = ("", "-1", "NoDevFiles")  # the first two by CUDA's rules, the last by Slurm where a job has no GPU


class DeviceError(Exception):
    """The device that was asked for is not there; the message is a complete sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What is seen of torch and of this machine's GPUs."""

    torch: str
    """Torch's version."""
    usable: str | None = None
    """The accelerator that torch can use now, such as "cuda"; None: none, and what follows says why."""
    built_for: str | None = None
    """What torch was built for, such as "CUDA 13.0" or "ROCm 7.0"; None: for neither."""
    gpu: str | None = None
    """Maker of a GPU that is physically here and not hidden from this process: "AMD" for a torch that was built for
    ROCm, "NVIDIA" for any other; None: there is none."""
    driver: str | None = None
    """Version of its driver; None where nobody tells."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What "auto" stands for."""

    name: str
    """Torch's name of the device."""
    remark: str = ""
    """What a person should know of it, in a sentence."""


def choose(sight: Sight) -> Choice:
    """The device for "auto": the accelerator that torch can use, else the CPU.

    Raises:
        DeviceError: torch was built for the GPU that is here, and can't use it.
    """
    if sight.usable is not None:
        return Choice(sight.usable)
    reason = unusable(sight)
    if reason is not None:
        raise DeviceError(f"device: auto must not pass over a GPU, but {reason}, or set device: cpu")
    if sight.gpu is not None:
        seen = f"There is an {sight.gpu} GPU, but torch {sight.torch} is built without CUDA, so auto is the CPU"
        return Choice("cpu", f"{seen}: install a torch with CUDA to train on the GPU.")
    return Choice("cpu")


def unusable(sight: Sight) -> str | None:
    """Why torch can't use the GPU that it was built for, with a remedy; None where that is not so."""
    if sight.usable is not None or sight.built_for is None or sight.gpu is None:
        return None
    driver = "a driver of unknown version" if sight.driver is None else f"driver {sight.driver}"
    platform = sight.built_for.partition(" ")[0]
    return (
        f"torch {sight.torch}, built for {sight.built_for}, can't use the {sight.gpu} GPU here with {driver}; "
        f"install a newer driver, or a torch built for the {platform} of this driver"
    )


def look() -> Sight:
    """See what torch can use, and where that is nothing, what GPU there is."""
    if torch.accelerator.is_available():
        return Sight(torch=torch.__version__, usable=str(torch.accelerator.current_accelerator()))
    if torch.version.hip is not None:
        gpu = "AMD" if _has_node("AMD") else None
        return Sight(torch=torch.__version__, built_for=f"ROCm {torch.version.hip}", gpu=gpu)
    built_for = None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    if _is_hidden("NVIDIA"):
        return Sight(torch=torch.__version__, built_for=built_for)
    gpu = "NVIDIA" if nvml.gpu_count() or _has_node("NVIDIA") else None
    return Sight(torch=torch.__version__, built_for=built_for, gpu=gpu, driver=nvml.driver_version())


def _is_hidden(maker: str) -> bool:
    """Whether the environment hides all GPUs from this process."""
    visible = next((os.environ[name] for name in _VISIBLE[maker] if name in os.environ), None)
    return visible is not None and visible.split(",")[0].strip() in _HIDDEN


def _has_node(maker: str) -> bool:
    """Whether there is a GPU that this process may open: a container or a job may see one that is not its own."""
    return not _is_hidden(maker) and any(_can_open(node) for node in Path("/dev").glob(_NODES[maker]))


def _can_open(node: Path) -> bool:
    with suppress(OSError):
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
        return True
    return False
