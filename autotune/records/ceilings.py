"""Ceilings: the throughput of loader, device, copies and host, each alone, and the headroom below them.

A loader's ceiling depends on the loader's settings, a device's on the step's, a copy's on where
batches lie and on their layout. So each ceiling is measured once for these settings and kept in a
`CeilingBook`.
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
"""Ratio of a run's throughput to a ceiling from which the ceiling was measured too low, since a run
can't exceed one side alone. Our own convention; runs of the same settings differ by 1 to 3 %."""
_DISAGREE_FROM = 1.5
"""Ratio between two measurements of one side from which other processes slowed one of them: our own
convention. Stretches of 0.2 s differ by up to a fifth on two shared cores (benchmarks/surfaces)."""
_CERTAIN_SDS = 2.0
"""Standard errors of a ceiling that a run must exceed in addition: about a 95 % interval."""
_HOLDS_FROM = 0.85
"""Share of the lowest ceiling from which that side counts as the bottleneck: our convention."""

_Limit = Literal["loader", "device", "copy", "host"]
SIDES: tuple[Side, ...] = ("loader", "device", "copy")
"""Sides that are measured alone."""
_VALUES = {
    side: [setting.value for setting in SETTINGS if side in setting.sides and not setting.is_of_ddp]
    for side in SIDES
}
"""Functions of a configuration that return the values each side depends on."""


class Ceiling(FrozenModel):
    """Throughput of one side alone."""

    samples_per_s: float
    """Throughput in samples/s."""
    samples: int
    """Samples delivered."""
    seconds: float
    """Wall seconds of the stretch."""
    batches: int
    """Batches delivered."""
    host_s: float | None = None
    """Of the device: seconds in which the host launches a batch's work without waiting for it, the
    minimum of a few steps. None if the host is the device, for float16 without a fused optimizer,
    and without time for a step."""
    relative_sd: float | None = None
    """Relative standard error by the stretch's own blocks: large for a loader that pauses. None if
    unknown."""


def host_ceiling_of(device: Ceiling | None, take_s: float | None) -> float | None:
    """Return the throughput of a host that alternately takes ready batches and launches their work.

    Args:
        device: The device's ceiling, with the seconds of launching.
        take_s: Seconds of taking a ready batch; None for none.

    Returns:
        None if the seconds of launching are unknown.
    """
    if device is None or device.host_s is None:
        return None
    return device.samples / device.batches / (device.host_s + (take_s or 0.0))


def loader_key(config: TrainingConfig) -> tuple[object, ...]:
    """Return the settings that a loader's throughput depends on, with torch's defaults for unset ones."""
    return _key("loader", config)


def device_key(config: TrainingConfig) -> tuple[object, ...]:
    """Return the settings that a step's time depends on: all but the loader's and the learning rate."""
    return _key("device", config)


def _key(side: Side, config: TrainingConfig) -> tuple[object, ...]:
    """Return a side with the settings that it depends on.

    Copies do not depend on the batch, since starting a copy takes microseconds.
    """
    values = [value(config) for value in _VALUES[side]]
    if side == "loader" and not config.has_workers:
        values.append(config.intra_op_threads)  # the trial's own process makes the items
    return (side, *values)


@dataclass(slots=True)
class _Evidence:
    """Measurements of one side in one setting."""

    is_given_up: bool = False
    """A run could not measure the side."""
    seen: list[Ceiling] = field(default_factory=list)
    """All measurements of the side alone."""
    shown: float = 0.0
    """Throughput that a run certainly reached, in samples/s."""

    @property
    def held(self) -> list[Ceiling]:
        """Measurements whose interval no run exceeds."""
        held = []
        for one in self.seen:
            upper_end = one.samples_per_s * (1 + _CERTAIN_SDS * (one.relative_sd or 0.0))
            if self.shown <= EXCEEDED_FROM * upper_end:
                held.append(one)
        return held

    @property
    def middle(self) -> float:
        """Median of those, of two the higher: other processes only slow a measurement down."""
        return median_high([one.samples_per_s for one in self.held])

    @property
    def credible(self) -> list[Ceiling]:
        """Those within a factor of their median."""
        return [
            one
            for one in self.held
            if 1 / _DISAGREE_FROM <= one.samples_per_s / self.middle <= _DISAGREE_FROM
        ]

    @property
    def is_in_doubt(self) -> bool:
        """Return True if one more measurement would decide: runs exceed the only one, or two disagree."""
        if not self.held:
            return len(self.seen) == 1
        return len(self.seen) == len(self.held) == 2 and len(self.credible) == 1


@dataclass(slots=True)
class CeilingBook:
    """Ceilings measured so far in a search, by the settings that they depend on.

    All measurements are kept as evidence: one that runs exceed, or that others of its side
    contradict, is no ceiling.
    """

    _evidence: dict[tuple[object, ...], _Evidence] = field(default_factory=dict)

    def needs(self, side: Side, config: TrainingConfig) -> bool:
        """Return True if the side's ceiling was not tried yet, or must be measured again."""
        evidence = self._evidence_of(side, config)
        return not (evidence.seen or evidence.is_given_up) or evidence.is_in_doubt

    def ceiling_of(self, side: Side, config: TrainingConfig) -> Ceiling | None:
        """Return the longest credible measurement of a side; None if there is none."""
        credible = self._evidence_of(side, config).credible
        return max(credible, key=lambda one: one.seconds, default=None)

    def shown(self, side: Side, config: TrainingConfig) -> float:
        """Return the throughput that a run with these settings of a side certainly reached."""
        return self._evidence_of(side, config).shown

    def is_in_doubt(self, side: Side, config: TrainingConfig) -> bool:
        """Return True if a ceiling was measured and must be measured once more."""
        return self._evidence_of(side, config).is_in_doubt

    def doubt(self, side: Side, config: TrainingConfig, ceiling: Ceiling) -> float:
        """Return the distance of a measurement from what runs and other measurements show, as a logarithm.

        0 for a credible measurement.
        """
        evidence = self._evidence_of(side, config)
        if ceiling in evidence.credible:
            return 0.0
        likely = evidence.middle if evidence.held else evidence.shown
        return abs(log(max(likely, evidence.shown) / ceiling.samples_per_s))

    def keep(self, side: Side, config: TrainingConfig, ceiling: Ceiling | None) -> None:
        """Enter a measurement of a side with these settings."""
        evidence = self._evidence_of(side, config)
        if ceiling is not None and ceiling not in evidence.seen:
            evidence.seen.append(ceiling)

    def show(self, config: TrainingConfig, samples_per_s: float) -> None:
        """Enter a throughput that a run certainly reached: no side alone is slower.

        Args:
            config: Configuration of the run.
            samples_per_s: Lower end of its throughput's interval.
        """
        for side in SIDES:
            evidence = self._evidence_of(side, config)
            evidence.shown = max(evidence.shown, samples_per_s)

    def give_up(self, side: Side, config: TrainingConfig) -> None:
        """Enter that a run with these settings could not measure the side."""
        self._evidence_of(side, config).is_given_up = True

    def _evidence_of(self, side: Side, config: TrainingConfig) -> _Evidence:
        return self._evidence.setdefault(_key(side, config), _Evidence())


class Headroom(FrozenModel):
    """Position of a throughput below the ceilings, in samples/s."""

    samples_per_s: float
    """Current throughput."""
    loader_ceiling: float
    """Loader alone; infinite if unknown."""
    device_ceiling: float
    """Device alone; infinite if unknown. If the device waits for its host, at least its throughput
    without waiting, by its busy time."""
    copy_ceiling: float | None = None
    """Copying batches to the device; None if nothing is copied, or if not measured."""
    host_ceiling: float | None = None
    """Host that takes and launches batches; None if it is the device, or if not measured."""
    lower: _Limit
    """Side with the lowest ceiling."""
    limit: _Limit | None
    """Side that limits the loop; None if no single side does."""
    share_of_device: float
    """Throughput over the device's on batches in its memory."""
    share_of_lower: float
    """Throughput over the lowest ceiling; noise may push it above 1."""
    room: float
    """Most that other settings can gain while the lowest ceiling stays, as a share: 0.04 = 4 %."""


def headroom_of(
    samples_per_s: float,
    *,
    loader_ceiling: float,
    device_ceiling: float,
    copy_ceiling: float | None = None,
    host_ceiling: float | None = None,
    host_bound_busy: float | None = None,
) -> Headroom:
    """Compare a throughput with the ceilings; of equal ones the device's counts as the lowest, then the loader's.

    A host that launches too slowly may limit the device alone as well, which then reaches the
    host's ceiling, not its own. Its busy time in the loop gives a lower bound of its own ceiling.

    Args:
        samples_per_s: Current throughput.
        loader_ceiling: Loader alone; infinite if unknown.
        device_ceiling: Device alone, as measured; infinite if unknown.
        copy_ceiling: Copies alone; None if nothing is copied, or if not measured.
        host_ceiling: Host alone; None if the host is the device, or if not measured.
        host_bound_busy: Busy share of a device that waits for its host; None if it does not, or if
            unknown.
    """
    # A device limited by its host: raise its ceiling to what its busy time shows
    is_held_alone = host_ceiling is None or device_ceiling >= _HOLDS_FROM * host_ceiling
    if host_bound_busy and is_held_alone:
        device_ceiling = max(device_ceiling, samples_per_s / host_bound_busy)

    ceilings: dict[_Limit, float | None] = {
        "device": device_ceiling,
        "loader": loader_ceiling,
        "copy": copy_ceiling,
        "host": host_ceiling,
    }
    known = {side: ceiling for side, ceiling in ceilings.items() if ceiling is not None}

    # The side that limits the loop
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
    """Return whether loading overlaps with training: in workers, or with an accelerator's work."""
    return config.has_workers or device_kind != "cpu"
