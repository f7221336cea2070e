"""What a search has its runs measure beside their windows, and the ceilings that runs know from one another.

Each ceiling is measured once for the settings that it depends on; a CeilingBook keeps it for all others.
"""

from __future__ import annotations

from autotune.protocol.jobs import NO_EXTRAS, Extras, WindowRules
from autotune.records.ceilings import CeilingBook, copy_key, device_key, host_ceiling_of, loader_key
from autotune.records.measurement import Ceilings
from autotune.records.trial import TrialResult
from autotune.settings.training_config import TrainingConfig

__all__ = ["everything", "extras_of", "with_ceilings"]

_STRETCH_SHARE = 0.1
"""Of the window's time, what a ceiling may take: our own convention, so that a trial takes a fifth more at most."""
_SHORTEST_STRETCH_S, _LONGEST_STRETCH_S = 0.2, 0.5
"""Bounds of it: some steps of most workloads, and no more than a ceiling's precision needs; our own convention."""


def extras_of(config: TrainingConfig, book: CeilingBook, window: WindowRules, *, is_baseline: bool) -> Extras:
    """The ceilings that no run has measured or tried to measure; for the baseline everything."""
    if is_baseline:
        return everything(window)
    return Extras(
        loader_ceiling=book.needs_loader(config),
        device_ceiling=book.needs_device(config),
        copy_ceiling=book.needs_copy(config),
        stretch_s=_stretch_s(window),
    )


def everything(window: WindowRules) -> Extras:
    """All ceilings, and where the time goes."""
    return Extras(
        loader_ceiling=True, device_ceiling=True, copy_ceiling=True, breakdown=True, stretch_s=_stretch_s(window)
    )


def with_ceilings(
    result: TrialResult, config: TrainingConfig, book: CeilingBook, *, asked: Extras = NO_EXTRAS
) -> TrialResult:
    """Enter what a run has measured into the book, and what it has not measured itself from the book.

    What was asked of it and is missing is entered as tried in vain.
    """
    measurement = result.measurement
    if measurement is None:
        return result
    own = measurement.ceilings or Ceilings()
    book.keep(config, loader=own.loader, device=own.device, copy=own.copy)
    book.give_up(
        config,
        loader=asked.loader_ceiling and own.loader is None,
        device=asked.device_ceiling and own.device is None,
        copy=asked.copy_ceiling and own.copy is None,
    )
    loader, device = book.loader.get(loader_key(config)), book.device.get(device_key(config))
    copy, window = book.copy.get(copy_key(config)), measurement.window
    known = {
        "loader_ceiling": loader and loader.samples_per_s,
        "device_ceiling": device and device.samples_per_s,
        "copy_ceiling": copy and copy.samples_per_s,
        "host_ceiling": None if window.is_held_by_device else host_ceiling_of(device, window.take_s),
    }
    missing = {name: rate for name, rate in known.items() if rate is not None and getattr(measurement, name) is None}
    return result.model_copy(update={"measurement": measurement.model_copy(update=missing)}) if missing else result


def _stretch_s(window: WindowRules) -> float:
    return min(max(_STRETCH_SHARE * window.max_s, _SHORTEST_STRETCH_S), _LONGEST_STRETCH_S)
