"""Ceilings: the rates of the loader, the device, the copies and the host, each alone, and the room that they leave.

A loader's ceiling depends on the loader's settings, a device's on the step's, a copy's on where
batches lie and how they are laid out; `loader_key`, `device_key` and `copy_key` name them, so that
each is measured once and kept in a CeilingBook.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from statistics import median_high
from typing import Literal

from autotune.config.training_config import TrainingConfig
from autotune.frozen import FrozenModel
from autotune.settings_table import SETTINGS, Side

EXCEEDED_FROM = 1.05
"""Of a ceiling: a rate above it shows that the ceiling was measured too low, since a whole run
can't exceed one side alone. Our own convention; runs of the same settings differ by 1 to 3 %."""
_DISAGREE_FROM = 1.5
"""Factor between two measurements of one side from which on other processes slowed one of them: our
own convention. Stretches of 0.2 s differ by up to a fifth on two shared cores
(benchmarks/surfaces)."""
_CERTAIN_SDS = 2.0
"""Standard errors of a ceiling that a rate must exceed on top: about a 95 % interval."""
_HOLDS_FROM = 0.85
"""Share of the lowest ceiling from which that side counts as the bottleneck: our convention."""

SIDES: tuple[Side, ...] = ("loader", "device", "copy")
"""What is measured alone."""
_VALUES = {
    side: [setting.value for setting in SETTINGS if side in setting.sides and not setting.is_of_ddp]
    for side in SIDES
}
"""Functions of a configuration: the values that each side depends on."""


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
    """Of the device: seconds in which the host launches a batch's work without waiting for it, the
    least of a few steps. None where the host is the device, for float16 without a fused optimizer,
    and without the time for a step."""
    relative_sd: float | None = None
    """Standard error of the rate by the stretch's own blocks, as a share of it: large where a
    loader pauses. None where they do not tell."""


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
    """Return the settings that a loader's throughput depends on; torch's own value where a setting is left to torch."""
    threads = (
        config.intra_op_threads if config.num_workers == 0 else None
    )  # the trial's own process makes the items
    return (*_values("loader", config), threads)


def device_key(config: TrainingConfig) -> tuple[object, ...]:
    """Return the settings that a step's time depends on: all but the loader's, and the learning rate."""
    return _values("device", config)


def copy_key(config: TrainingConfig) -> tuple[object, ...]:
    """Return the settings that copies depend on; hardly on the batch, since a copy's start takes microseconds."""
    return _values("copy", config)


def _values(side: Side, config: TrainingConfig) -> tuple[object, ...]:
    return tuple(value(config) for value in _VALUES[side])


_KEYS = {"loader": loader_key, "device": device_key, "copy": copy_key}
_Key = tuple[Side, tuple[object, ...]]


def _key(side: Side, config: TrainingConfig) -> _Key:
    return side, _KEYS[side](config)


@dataclass(slots=True)
class _Evidence:
    """All that was seen of one side in one setting."""

    seen: list[Ceiling] = field(default_factory=list)
    """Every measurement of the side alone."""
    shown: float = 0.0
    """The rate that a whole run has reached for certain, in samples per second."""

    @property
    def held(self) -> list[Ceiling]:
        """The measurements that no run exceeds."""
        return [one for one in self.seen if self.shown <= EXCEEDED_FROM * _upper_end(one)]

    @property
    def middle(self) -> float:
        """The median of those, of two the higher: other processes only slow a measurement down."""
        return median_high([one.samples_per_s for one in self.held])

    @property
    def credible(self) -> list[Ceiling]:
        """Those that agree with their median."""
        held = self.held
        return [
            one
            for one in held
            if 1 / _DISAGREE_FROM <= one.samples_per_s / self.middle <= _DISAGREE_FROM
        ]

    @property
    def is_in_doubt(self) -> bool:
        """Return True where one more measurement would settle it: runs exceed the only one, or two disagree."""
        if not self.held:
            return len(self.seen) == 1
        return len(self.seen) == len(self.held) == 2 and len(self.credible) == 1


@dataclass(slots=True)
class CeilingBook:
    """The ceilings measured so far in a search, by what they depend on.

    None where a trial could not measure it, and where runs have exceeded every measurement. All
    measurements are kept as evidence: one that runs exceed, or that others of the same side
    contradict, is no ceiling.
    """

    _settled: dict[_Key, Ceiling | None] = field(default_factory=dict)
    _evidence: dict[_Key, _Evidence] = field(default_factory=dict)

    def needs(self, side: Side, config: TrainingConfig) -> bool:
        """Return True where the side's ceiling was not tried yet, or must be measured again."""
        return _key(side, config) not in self._settled or self.is_in_doubt(side, config)

    def ceiling_of(self, side: Side, config: TrainingConfig) -> Ceiling | None:
        """Return the ceiling of a side; None where it was not measured, or no measurement is credible."""
        return self._settled.get(_key(side, config))

    def shown(self, side: Side, config: TrainingConfig) -> float:
        """Return the rate that a run with these settings of a side has reached for certain."""
        return self._evidence_of(side, config).shown

    def is_in_doubt(self, side: Side, config: TrainingConfig) -> bool:
        """Return True where a ceiling was measured and must be measured again, once."""
        return self._evidence_of(side, config).is_in_doubt

    def doubt(self, side: Side, config: TrainingConfig, ceiling: Ceiling) -> float:
        """Return how far the logarithm of a measurement lies from what runs and other measurements show.

        0 for a credible one.
        """
        evidence = self._evidence_of(side, config)
        if ceiling in evidence.credible:
            return 0.0
        likely = evidence.middle if evidence.held else evidence.shown
        return abs(log(max(likely, evidence.shown) / ceiling.samples_per_s))

    def keep(self, side: Side, config: TrainingConfig, ceiling: Ceiling | None) -> None:
        """Enter what was measured of a side with these settings; of credible measurements the longest counts."""
        evidence = self._evidence_of(side, config)
        if ceiling is not None and ceiling not in evidence.seen:
            evidence.seen.append(ceiling)
            self._settle(side, config)

    def show(self, config: TrainingConfig, samples_per_s: float) -> None:
        """Enter a rate that a run of this configuration has reached for certain: no side alone is slower.

        Args:
            config: What was run.
            samples_per_s: The lower end of the rate's interval.
        """
        for side in SIDES:
            evidence = self._evidence_of(side, config)
            if samples_per_s > evidence.shown:
                evidence.shown = samples_per_s
                self._settle(side, config)

    def give_up(self, side: Side, config: TrainingConfig) -> None:
        """Enter that a run with these settings of a side could not measure it."""
        self._settled.setdefault(_key(side, config), None)

    def _settle(self, side: Side, config: TrainingConfig) -> None:
        evidence = self._evidence_of(side, config)
        if evidence.seen:
            self._settled[_key(side, config)] = max(
                evidence.credible, key=lambda one: one.seconds, default=None
            )

    def _evidence_of(self, side: Side, config: TrainingConfig) -> _Evidence:
        return self._evidence.setdefault(_key(side, config), _Evidence())


def _upper_end(ceiling: Ceiling) -> float:
    """The rate that it may be, by its own error."""
    return ceiling.samples_per_s * (1 + _CERTAIN_SDS * (ceiling.relative_sd or 0.0))


class Headroom(FrozenModel):
    """Where a rate stands between the ceilings."""

    samples_per_s: float
    """The rate as it is."""
    loader_ceiling: float
    """Infinite where nothing is known of the loader."""
    device_ceiling: float
    """Samples per second of the device alone; infinite where nothing is known of it. Where the
    device waits for its host, at least what it would do without waiting, by the time in which it is
    busy."""
    copy_ceiling: float | None = None
    """Samples per second of copying batches to the device; None where nothing is copied, or it was
    not measured."""
    host_ceiling: float | None = None
    """Samples per second of the host that takes and launches batches; None where it is the device,
    or not measured."""
    lower: Literal["loader", "device", "copy", "host"]
    """The side whose ceiling is the lowest."""
    limit: Literal["loader", "device", "copy", "host"] | None
    """The side that limits the loop; None where no side alone does."""
    share_of_device: float
    """The rate over what the device can do on a batch in its memory."""
    share_of_lower: float
    """The rate over the lowest ceiling; noise may carry it above 1."""
    room: float
    """What other settings can still give at most, as a share of the rate, while the lowest one
    stays: 0.04 = 4 %."""


def headroom_of(
    samples_per_s: float,
    *,
    loader_ceiling: float,
    device_ceiling: float,
    copy_ceiling: float | None = None,
    host_ceiling: float | None = None,
    host_bound_busy: float | None = None,
) -> Headroom:
    """Compare a rate to the ceilings; of equal ones the device's counts as the lowest, then the loader's.

    A host that launches the loop's work too slowly may hold up the device alone as well, which then
    reaches the host's ceiling and not its own. Its busy time in the loop shows what it can do at
    least.

    Args:
        samples_per_s: The rate.
        loader_ceiling: Of the loader alone; infinite where nothing is known of it.
        device_ceiling: Of the device alone, as measured; infinite where nothing is known of it.
        copy_ceiling: Of the copies alone; None: nothing is copied, or it was not measured.
        host_ceiling: Of the host alone; None: the host is the device, or it was not measured.
        host_bound_busy: Share of the time in which the device is busy, of a loop whose device waits
            for its host; None: it does not, or this is not known.
    """
    is_held_alone = host_ceiling is None or device_ceiling >= _HOLDS_FROM * host_ceiling
    if host_bound_busy and is_held_alone:
        device_ceiling = max(device_ceiling, samples_per_s / host_bound_busy)
    known: dict[Literal["loader", "device", "copy", "host"], float]
    known = {"device": device_ceiling, "loader": loader_ceiling}
    if copy_ceiling is not None:
        known["copy"] = copy_ceiling
    if host_ceiling is not None:
        known["host"] = host_ceiling
    lower = min(known, key=known.__getitem__)
    lowest = known[lower]
    limit = lower if samples_per_s >= _HOLDS_FROM * lowest else None
    if limit is None and host_bound_busy and lower in {"device", "host"}:
        limit = "host"
    return Headroom(
        samples_per_s=samples_per_s,
        loader_ceiling=loader_ceiling,
        device_ceiling=device_ceiling,
        copy_ceiling=copy_ceiling,
        host_ceiling=host_ceiling,
        lower=lower,
        limit=limit,
        share_of_device=samples_per_s / device_ceiling,
        share_of_lower=samples_per_s / lowest,
        room=max(0.0, lowest / samples_per_s - 1.0),
    )


def overlaps(config: TrainingConfig, device_kind: str) -> bool:
    """Whether loading goes on beside training: in workers, or beside an accelerator's own work."""
    return config.num_workers > 0 or device_kind != "cpu"
