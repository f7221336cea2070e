"""The machine that trials run on, as a worker process sees it, and how many of its kind; stored beside every result."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from autotune.core.training_config import AmpDtype

__all__ = ["DeviceKind", "Environment"]

DeviceKind = Literal["cpu", "cuda", "rocm", "mps", "xpu"]


class Environment(BaseModel):
    """Hardware and versions. Holds no names of users, no paths, no environment variables."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    device: str
    """torch's name for the device, such as "cuda:0"."""
    device_kind: DeviceKind
    device_name: str
    """The product, such as "NVIDIA H200" or the processor's model."""
    device_memory_bytes: int
    """Memory of the device; on the CPU the machine's or the cgroup's RAM."""
    device_count: int
    """Of its kind on a host."""
    hosts: Annotated[int, Field(ge=1)] = 1
    """Machines, all like this one, over which the ranks of one trial may be spread."""
    is_spread: bool = False
    """Ranks lie on as many of the hosts as possible, not on as few as hold them."""
    native_amp_dtypes: tuple[AmpDtype, ...]
    """Precisions that the device computes natively."""
    driver: str | None
    cores: int
    """Cores that a process may use: affinity and cgroup quota."""
    ram_bytes: int
    """RAM that a process may use: the machine's or the cgroup's."""
    platform: str
    python: str
    torch: str
    cuda: str | None
    versions: dict[str, str]
    """Versions of the packages that results depend on."""

    @property
    def has_only_ram(self) -> bool:
        """The device has no memory of its own: a limit is on the host's RAM, of which loader workers take a part."""
        return self.device_kind in {"cpu", "mps"}

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that change when a host's hardware, driver or torch does; hosts may come and go."""
        parts = (self.device_kind, self.device_name, self.device_count, self.driver, self.cores, self.torch, self.cuda)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
