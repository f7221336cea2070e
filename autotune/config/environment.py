"""The machine that trials run on, as a worker process finds it, and the fields by which machines are compared."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from autotune.config.training_config import AmpDtype
from autotune.frozen import FrozenModel
from autotune.note import Note

DeviceKind = Literal["cpu", "cuda", "rocm", "mps", "xpu", "other"]
"""other: an accelerator that a plug-in has added to torch."""
GRAPH_KINDS: frozenset[DeviceKind] = frozenset({"cuda", "rocm"})
"""Devices whose kernels torch.compile records as CUDA graphs, and whose convolutions cuDNN or
MIOpen computes."""
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
"""The fields by which two machines are compared, and what messages call them."""


class Environment(FrozenModel):
    """Hardware and versions. No names of users, no paths, and of the environment's variables only switches."""

    device: str
    """torch's name for the device, such as "cuda:0"."""
    device_kind: DeviceKind
    """torch's name for the kind of device."""
    device_name: str
    """The product, such as "NVIDIA H200" or the processor's model."""
    device_memory_bytes: int
    """Memory of the device; on the CPU the machine's or the cgroup's RAM."""
    device_count: int
    """Devices of this kind on a host."""
    device_names: tuple[str, ...] = ()
    """Each device's product on a host whose devices differ; () where they are all the same."""
    hosts: Annotated[int, Field(ge=1)] = 1
    """Machines, all like this one, over which the ranks of one trial may be spread."""
    is_spread: bool = False
    """Ranks lie on as many of the hosts as possible, not on as few as have room for them."""
    native_amp_dtypes: tuple[AmpDtype, ...]
    """Precisions that the device computes natively."""
    driver: str | None
    """Version of the device's driver; None where it has none or is not known."""
    cores: int
    """Cores that a process may use: affinity and cgroup quota."""
    numa_nodes: Annotated[int, Field(ge=1)] = 1
    """NUMA nodes that these cores belong to."""
    node_cores: tuple[int, ...] = ()
    """Physical cores of each of these nodes that a process may use; () where they were not looked
    up."""
    device_nodes: tuple[int, ...] = ()
    """For each device the place of its node among these, -1 where the machine does not tell it or
    none of its cores may be used; () on the CPU, and where they were not looked up."""
    ram_bytes: int
    """RAM that a process may use: the machine's or the cgroup's."""
    platform: str
    """Operating system and architecture."""
    python: str
    """Version of Python."""
    torch: str
    """Version of torch."""
    cuda: str | None
    """Version of CUDA that torch was built with; None where it was built without."""
    versions: dict[str, str]
    """Versions of the packages that results depend on."""
    tf32_overrides: tuple[TF32Override, ...] = ()
    """Switches that are set in the environment and change what float32 means on an NVIDIA GPU, as
    NAME=value."""
    malloc: tuple[str, ...] = ()
    """What is set for glibc's malloc in trials, as NAME=value: whether it keeps the memory that is
    freed. () where nothing is, and where another malloc or C library is used."""
    keeps_memory: bool = False
    """autotune has set that for trials; training has the same only where it is set there too."""
    remarks: tuple[Note, ...] = ()
    """What the user should know of how the device was chosen, and of what slows it down."""

    @property
    def has_only_ram(self) -> bool:
        """The device has no memory of its own: a limit is on the host's RAM, of which loader workers take a part."""
        return self.device_kind in {"cpu", "mps"}

    @property
    def has_cuda_graphs(self) -> bool:
        """Return True where torch.compile records CUDA graphs, and cuDNN or MIOpen computes convolutions."""
        return self.device_kind in GRAPH_KINDS

    def comparable(self) -> dict[str, object]:
        """The fields by which two machines are compared, by their names, in the order of COMPARED.

        They are what a measured rate depends on. Everything that asks "is this the same machine,
        and if not, what has changed" compares these: a study that goes on, a warm start, the hosts
        of a cluster. How many hosts there are is not among them: hosts may come and go.
        """
        return {name: getattr(self, name) for name in COMPARED}

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that change when a host's hardware, driver or torch does."""
        values = tuple(value for value in self.comparable().values() if value != ())
        return hashlib.sha256(repr(values).encode()).hexdigest()[:12]
