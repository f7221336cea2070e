"""Ceilings: the rates of the loader, the device, the copies and the host, each alone, and the room that they leave.

A loader's ceiling depends on the loader's settings, a device's on the step's, a copy's on where batches lie and how
they are laid out; `loader_key`, `device_key` and `copy_key` name them, so that each is measured once and kept in a
CeilingBook.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from autotune.frozen import FrozenModel
from autotune.settings.training_config import LOADER_SETTINGS, TrainingConfig

__all__ = [
    "HOLDS_FROM",
    "PLAUSIBLE",
    "Ceiling",
    "CeilingBook",
    "Headroom",
    "copy_key",
    "device_key",
    "headroom_of",
    "host_ceiling_of",
    "loader_key",
    "overlaps",
]

PLAUSIBLE = 1.10
"""A rate further above a ceiling is no noise, the ceiling was measured too low: our convention."""
HOLDS_FROM = 0.85
"""Share of the lowest ceiling from which that side counts as the bottleneck: our convention."""
_STEP_SETTINGS = attrgetter(*(name for name in TrainingConfig.model_fields if name not in {"lr", *LOADER_SETTINGS}))
"""All but the loader's, and the learning rate."""


class Ceiling(FrozenModel):
    """A rate that one side reaches by itself."""

    samples_per_s: float
    """The rate, in samples per second."""
    samples: int
    """Samples that came, counted."""
    seconds: float
    """Wall time of the stretch."""
    batches: int
    """Batches that came."""
    host_s: float | None = None
    """Of the device: seconds in which the host launches a batch's work without waiting for it, the least of a few
    steps. None where the host is the device, for float16 without a fused optimizer, and without the time for a step."""
    relative_sd: float | None = None
    """Standard error of the rate by the stretch's own blocks, as a share of it: large where a loader pauses. None where
    they do not tell."""


def host_ceiling_of(device: Ceiling | None, take_s: float | None) -> float | None:
    """Return the rate of a host that takes batches that lie ready and launches their work, one after the other.

    Args:
        device: The device's ceiling, which holds the seconds of launching.
        take_s: Seconds of taking a batch that lies ready; None: none.
    """
    if device is None or device.host_s is None:
        return None
    return device.samples / device.batches / (device.host_s + (take_s or 0.0))


def loader_key(config: TrainingConfig) -> tuple[object, ...]:
    """The settings that a loader's rate depends on; torch's own value where a setting is left to torch."""
    return (
        *({**config.loader_settings, "prefetch_factor": config.batches_per_worker}).values(),
        config.worker_threads,
        config.numa_binding,
        config.micro_batch_size,
        config.max_tokens,
        config.world_size,
        config.strategy,
        config.intra_op_threads if config.num_workers == 0 else None,  # the trial's own process makes the items
    )


def device_key(config: TrainingConfig) -> tuple[object, ...]:
    """The settings that a step's time depends on: all but the loader's, and the learning rate."""
    settings: tuple[object, ...] = _STEP_SETTINGS(config)
    return settings


def copy_key(config: TrainingConfig) -> tuple[object, ...]:
    """The settings that the copies' rate depends on; hardly on the batch, since a copy's start takes microseconds."""
    return (config.pin_memory, config.channels_last, config.numa_binding, config.world_size, config.strategy)


@dataclass(slots=True)
class CeilingBook:
    """The ceilings measured so far in a search, by what they depend on; None where a trial could not measure it."""

    loader: dict[tuple[object, ...], Ceiling | None] = field(default_factory=dict)
    device: dict[tuple[object, ...], Ceiling | None] = field(default_factory=dict)
    copy: dict[tuple[object, ...], Ceiling | None] = field(default_factory=dict)

    def needs_loader(self, config: TrainingConfig) -> bool:
        """Whether this loader's ceiling was not tried yet."""
        return loader_key(config) not in self.loader

    def needs_device(self, config: TrainingConfig) -> bool:
        """Whether this device's ceiling was not tried yet."""
        return device_key(config) not in self.device

    def needs_copy(self, config: TrainingConfig) -> bool:
        """Whether the ceiling of such copies was not tried yet."""
        return copy_key(config) not in self.copy

    def keep(
        self, config: TrainingConfig, *, loader: Ceiling | None, device: Ceiling | None, copy: Ceiling | None = None
    ) -> None:
        """Enter what a trial of this configuration has measured; of several measurements of a key the longest stays."""
        for side, key, ceiling in (
            (self.loader, loader_key(config), loader),
            (self.device, device_key(config), device),
            (self.copy, copy_key(config), copy),
        ):
            known = side.get(key)
            if ceiling is not None and (known is None or ceiling.seconds > known.seconds):
                side[key] = ceiling

    def give_up(self, config: TrainingConfig, *, loader: bool, device: bool, copy: bool = False) -> None:
        """Enter which sides a trial of this configuration could not measure."""
        if loader:
            self.loader.setdefault(loader_key(config), None)
        if device:
            self.device.setdefault(device_key(config), None)
        if copy:
            self.copy.setdefault(copy_key(config), None)


class Headroom(FrozenModel):
    """Where a rate stands between the ceilings."""

    samples_per_s: float
    """The rate as it is."""
    loader_ceiling: float
    """Infinite where nothing is known of the loader."""
    device_ceiling: float
    """Samples per second of the device alone; infinite where nothing is known of it."""
    copy_ceiling: float | None = None
    """Samples per second of copying batches to the device; None where nothing is copied, or it was not measured."""
    host_ceiling: float | None = None
    """Samples per second of the host that takes and launches batches; None where it is the device, or not measured."""
    lower: Literal["loader", "device", "copy", "host"]
    """The side whose ceiling is the lowest."""
    share_of_device: float
    """The rate over what the device can do on a batch in its memory."""
    share_of_lower: float
    """The rate over the lowest ceiling; noise may carry it above 1."""
    room: float
    """What other settings can still give at most, as a share of the rate, while the lowest one stays: 0.04 = 4 %."""


def headroom_of(
    samples_per_s: float,
    *,
    loader_ceiling: float,
    device_ceiling: float,
    copy_ceiling: float | None = None,
    host_ceiling: float | None = None,
) -> Headroom:
    """Compare a rate to the ceilings; of equal ones the device's counts as the lowest, then the loader's."""
    known: dict[Literal["loader", "device", "copy", "host"], float]
    known = {"device": device_ceiling, "loader": loader_ceiling}
    if copy_ceiling is not None:
        known["copy"] = copy_ceiling
    if host_ceiling is not None:
        known["host"] = host_ceiling
    lower = min(known, key=known.__getitem__)
    lowest = known[lower]
    return Headroom(
        samples_per_s=samples_per_s,
        loader_ceiling=loader_ceiling,
        device_ceiling=device_ceiling,
        copy_ceiling=copy_ceiling,
        host_ceiling=host_ceiling,
        lower=lower,
        share_of_device=samples_per_s / device_ceiling,
        share_of_lower=samples_per_s / lowest,
        room=max(0.0, lowest / samples_per_s - 1.0),
    )


def overlaps(config: TrainingConfig, device_kind: str) -> bool:
    """Whether loading goes on beside training: in workers, or beside an accelerator's own work."""
    return config.num_workers > 0 or device_kind != "cpu"
