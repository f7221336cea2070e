"""Describe the machine that trials run on, as a worker process finds it, and compare machines."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from autotune.config.training_config import AmpDtype
from autotune.frozen import FrozenModel
from autotune.note import Note

DeviceKind = Literal["cpu", "cuda", "rocm", "mps", "xpu", "other"]
"""Kinds of device; other: an accelerator of a plug-in of torch."""
GRAPH_KINDS: frozenset[DeviceKind] = frozenset({"cuda", "rocm"})
"""Devices with CUDA graphs in torch.compile, and with convolutions by cuDNN or MIOpen."""
TF32Override = Annotated[
    str,
    StringConstraints(pattern=r"^(TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|NVIDIA_TF32_OVERRIDE)=[01]$"),
]
"""TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 has products of float32 computed in TF32
(aten/src/ATen/Context.h); so NVIDIA's containers set it. NVIDIA_TF32_OVERRIDE=0 forbids TF32 to all
of NVIDIA's libraries (cuBLAS documentation)."""

COMPARED = {
    "device_kind": "kind of device",
    "device_name": "device",
    "device_count": "devices",
    "driver": "driver",
    "cores": "cores",
    "torch": "torch",
    "cuda": "CUDA",
    "device_names": "unlike devices",
    "tf32_overrides": "TF32 switches",
    "malloc": "malloc",
}
"""Fields by which two machines are compared, with their names in messages."""


class Environment(FrozenModel):
    """Hardware and versions, without user names and paths; of environment variables only switches."""

    device: str
    """Device by torch's name, such as "cuda:0"."""
    device_kind: DeviceKind
    """Kind of the device."""
    device_name: str
    """Product name, such as "NVIDIA H200" or the processor's model."""
    device_memory_bytes: int
    """Memory of the device; on the CPU, RAM of the machine or the cgroup."""
    device_count: int
    """Number of devices of this kind on a host."""
    device_names: tuple[str, ...] = ()
    """Product of each device on a host with different ones; () if all are the same."""
    hosts: Annotated[int, Field(ge=1)] = 1
    """Number of machines like this one that the ranks of a trial may use."""
    is_spread: bool = False
    """True if ranks are spread over as many hosts as possible, not packed on as few."""
    native_amp_dtypes: tuple[AmpDtype, ...]
    """Precisions that the device supports natively."""
    driver: str | None
    """Version of the device's driver; None if it has none or is not known."""
    cores: int
    """Cores that a process may use, by affinity and cgroup quota."""
    numa_nodes: Annotated[int, Field(ge=1)] = 1
    """Number of NUMA nodes of these cores."""
    node_cores: tuple[int, ...] = ()
    """Physical cores that a process may use on each of these nodes; () if not read."""
    device_nodes: tuple[int, ...] = ()
    """Index of each device's node among these; -1 if it is unknown or has no usable core; () on the
    CPU, or if not read."""
    ram_bytes: int
    """RAM that a process may use, of the machine or the cgroup."""
    platform: str
    """Operating system and architecture."""
    python: str
    """Version of Python."""
    torch: str
    """Version of torch."""
    cuda: str | None
    """Version of CUDA that torch was built with; None without CUDA."""
    versions: dict[str, str]
    """Versions of packages that results depend on."""
    tf32_overrides: tuple[TF32Override, ...] = ()
    """Environment variables that change the precision of float32 on an NVIDIA GPU, as NAME=value."""
    malloc: tuple[str, ...] = ()
    """Variables of glibc's malloc in trials, as NAME=value, which keep freed memory; () if none are set,
    or another malloc or C library is used."""
    keeps_memory: bool = False
    """True if autotune has set `malloc`, so that training must set it too."""
    notes: tuple[Note, ...] = ()
    """Notes on how the device was chosen, and on what slows it down."""

    @property
    def has_only_ram(self) -> bool:
        """True if the device uses the host's RAM, which it shares with loader workers."""
        return self.device_kind in {"cpu", "mps"}

    @property
    def has_cuda_graphs(self) -> bool:
        """True if torch.compile records CUDA graphs, and cuDNN or MIOpen computes convolutions."""
        return self.device_kind in GRAPH_KINDS

    def comparable(self) -> dict[str, object]:
        """Return the fields by which two machines are compared, in the order of COMPARED.

        Measured throughput depends on them. A continued study, a warm start and the hosts of a
        cluster are compared by them. The number of hosts is left out, since hosts may come and go.
        """
        return {name: getattr(self, name) for name in COMPARED}

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that change with a host's hardware, driver or torch."""
        values = tuple(value for value in self.comparable().values() if value != ())
        return hashlib.sha256(repr(values).encode()).hexdigest()[:12]
