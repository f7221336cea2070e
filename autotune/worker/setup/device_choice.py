"""Which device "auto" stands for, and whether a GPU would be passed over by that.

Takes a Detection of torch and of the machine (`detect`, the only reader); hands on a name, or refuses: a torch that
can't use the GPU of this machine would tune the CPU, and the user would not notice.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autotune.messages.trials import torch_without_cuda
from autotune.note import Note
from autotune.worker.measure import nvml

__all__ = ["Detection", "DeviceError", "choose", "detect", "unusable"]

_NODES = {"NVIDIA": "nvidia[0-9]*", "AMD": "kfd"}
"""Files in /dev by which a maker's driver gives its GPUs. Source: NVIDIA driver README, nvidia-modprobe; ROCm
documentation, running containers."""
_VISIBLE = {
    "NVIDIA": (("CUDA_VISIBLE_DEVICES",),),
    "AMD": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
}
"""Variables that leave a process a part of the GPUs, one after the other; of those side by side the first that is set
counts. Source: CUDA C++ Programming Guide, environment variables; ROCm documentation, GPU isolation techniques."""
_HIDDEN = ("", "-1", "NoDevFiles")  # the first two by CUDA's rules, the last by Slurm where a job has no GPU


class DeviceError(Exception):
    """The device that was asked for is not there; the message is a complete sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """What torch can use, and which GPUs this machine has."""

    torch: str
    """Torch's version."""
    usable: str | None = None
    """The accelerator that torch can use now, such as "cuda"; None: none, and the other fields show why."""
    built_for: str | None = None
    """What torch was built for, such as "CUDA 13.0" or "ROCm 7.0"; None: for neither."""
    gpu: str | None = None
    """Maker of a GPU that is physically here and not hidden from this process: "AMD" for a torch that was built for
    ROCm, "NVIDIA" for any other; None: there is none."""
    driver: str | None = None
    """Version of its driver; None where it is not known."""
    driver_cuda: int | None = None
    """The newest major version of CUDA that this driver is for; None where its library libcuda is not found."""
    visible: str | None = None
    """The variable of the environment that restricts the GPUs that this process may see, as NAME=value; None: none."""
    torch_warning: str | None = None
    """Why torch can't use the GPU, in its own words; None where it gave none."""


def choose(found: Detection) -> tuple[str, Note | None]:
    """The device for "auto", and what the user should know of it: the accelerator that torch can use, else the CPU.

    Raises:
        DeviceError: torch was built for the GPU that is here, and can't use it.
    """
    if found.usable is not None:
        return found.usable, None
    reason = unusable(found)
    if reason is not None:
        raise DeviceError(f"device: auto must not pass over a GPU, but {reason}, or set device: cpu")
    return "cpu", None if found.gpu is None else torch_without_cuda(found.gpu, found.torch)


def unusable(found: Detection) -> str | None:
    """Why torch can't use the GPU that it was built for, with a remedy; None where that is not so."""
    if found.usable is not None or found.built_for is None or found.gpu is None:
        return None
    driver = "a driver of unknown version" if found.driver is None else f"driver {found.driver}"
    visible = "" if found.visible is None else f" and {found.visible}"
    torch_warning = "" if found.torch_warning is None else f" (torch says: {found.torch_warning})"
    return (
        f"torch {found.torch}, built for {found.built_for}, can't use the {found.gpu} GPU here with {driver}{visible}"
        f"{torch_warning}; {_remedy(found)}"
    )


def _remedy(found: Detection) -> str:
    """What most likely helps, by what is known for certain first.

    The driver is too old where CUDA's major version is newer than its own: it runs all minor ones.
    Source: NVIDIA, CUDA Compatibility, "Minor Version Compatibility"; NVIDIA Container Toolkit, driver capabilities.
    """
    platform, _, version = (found.built_for or "").partition(" ")
    if found.driver_cuda is not None and found.driver_cuda < int(version.partition(".")[0]):
        return f"this driver is for CUDA {found.driver_cuda}: install a newer one, or a torch built for that CUDA"
    if found.torch_warning is not None:
        return "mend what it says"
    if found.visible is not None:
        return "let that name GPUs that are here, or unset it"
    if found.gpu == "NVIDIA" and found.driver_cuda is None:
        return "install the driver's libcuda.so.1; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    return f"see that another program which uses {platform} runs here"


def detect() -> Detection:
    """Find out what torch can use, and where that is nothing, which GPU there is. To be called first.

    torch warns only once in a process why it can't use a GPU. Source: c10/cuda/CUDAFunctions.cpp, device_count.
    """
    is_available, torch_warning = _ask_torch()
    if is_available:
        return Detection(torch=torch.__version__, usable=str(torch.accelerator.current_accelerator()))
    maker, platform, version = "NVIDIA", "CUDA", torch.version.cuda
    if torch.version.hip is not None:
        maker, platform, version = "AMD", "ROCm", torch.version.hip
    found = Detection(torch=torch.__version__, built_for=version and f"{platform} {version}")
    if _is_hidden(maker):
        return found
    is_nvidia = maker == "NVIDIA"
    return replace(
        found,
        gpu=maker if (is_nvidia and nvml.gpu_count()) or _has_node(maker) else None,
        driver=nvml.driver_version() if is_nvidia else None,
        driver_cuda=nvml.driver_cuda() if is_nvidia else None,
        visible=_visible(maker),
        torch_warning=torch_warning,
    )


def _ask_torch() -> tuple[bool, str | None]:
    """Whether torch can use an accelerator, and what it warns of meanwhile; the warning is passed on to the log."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.accelerator.is_available()
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    words = [line for warning in caught for line in str(warning.message).splitlines()[:1]]
    return is_available, words[0].partition(" (Triggered internally")[0].strip() if words else None


def _variables(maker: str) -> list[str]:
    """The names of the variables that count."""
    firsts = (next((name for name in names if name in os.environ), None) for names in _VISIBLE[maker])
    return [name for name in firsts if name is not None]


def _visible(maker: str) -> str | None:
    return ", ".join(f"{name}={os.environ[name]}" for name in _variables(maker)) or None


def _is_hidden(maker: str) -> bool:
    """Whether the environment hides all GPUs from this process."""
    return any(os.environ[name].split(",")[0].strip() in _HIDDEN for name in _variables(maker))


def _has_node(maker: str) -> bool:
    """Whether there is a GPU that this process may open: a container or a job may see one that is not its own."""
    return any(_can_open(node) for node in Path("/dev").glob(_NODES[maker]))


def _can_open(node: Path) -> bool:
    with suppress(OSError):
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
        return True
    return False
