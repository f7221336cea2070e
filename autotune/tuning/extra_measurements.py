"""What a search has its runs measure beside their windows, and the ceilings that runs know from one another.

Each ceiling is measured once for the settings that it depends on; a CeilingBook keeps it for all others.
"""

from __future__ import annotations

from autotune.policy import POLICY, Time
from autotune.protocol.jobs import NO_EXTRAS, Extras, WindowRules
from autotune.records.ceilings import EXCEEDED_FROM, SIDES, CeilingBook, host_ceiling_of
from autotune.records.measurement import Ceilings, Measurement, keep_ceilings
from autotune.records.trial import TrialResult
from autotune.settings.training_config import TrainingConfig

__all__ = ["everything", "extras_of", "with_ceilings", "with_settled_ceilings"]


def extras_of(
    config: TrainingConfig, book: CeilingBook, window: WindowRules, *, is_baseline: bool, limits: Time = POLICY.time
) -> Extras:
    """The ceilings that no run has measured or tried to measure; for the baseline everything."""
    if is_baseline:
        return everything(window, limits)
    return Extras(
        loader_ceiling=book.needs("loader", config),
        device_ceiling=book.needs("device", config),
        copy_ceiling=book.needs("copy", config),
        stretch_s=_stretch_s(window, limits),
    )


def everything(window: WindowRules, limits: Time = POLICY.time) -> Extras:
    """All ceilings, and where the time goes."""
    return Extras(
        loader_ceiling=True,
        device_ceiling=True,
        copy_ceiling=True,
        breakdown=True,
        stretch_s=_stretch_s(window, limits),
    )


def with_ceilings(
    result: TrialResult, config: TrainingConfig, book: CeilingBook, *, asked: Extras = NO_EXTRAS
) -> TrialResult:
    """Enter what a run has measured into the book, and return the run with the ceilings that the book then has.

    What was asked of it and is missing is entered as tried in vain. A ceiling that this or another run exceeds, or that
    other measurements contradict, stands in `ceilings` alone, with what was measured.
    """
    measurement = result.measurement
    if measurement is None:
        return result
    own = measurement.ceilings or Ceilings()
    keep_ceilings(book, config, measurement)
    for side in SIDES:
        if getattr(asked, f"{side}_ceiling") and getattr(own, side) is None:
            book.give_up(side, config)
    settled = with_settled_ceilings(measurement, config, book)
    return result if settled is measurement else result.model_copy(update={"measurement": settled})


def with_settled_ceilings(measurement: Measurement, config: TrainingConfig, book: CeilingBook) -> Measurement:
    """Return a run with the ceilings of the book, without those that its own rate exceeds.

    What a run has measured and the book has no side for stays: a group's ceilings are made from those of its ranks.
    """
    own, window = measurement.ceilings or Ceilings(), measurement.window
    was_measured = {f"{side}_ceiling": getattr(own, side) is not None for side in SIDES}
    known = dict[str, float | None]()
    for side in SIDES:
        ceiling = book.ceiling_of(side, config)
        known[f"{side}_ceiling"] = None if ceiling is None else ceiling.samples_per_s
    device = book.ceiling_of("device", config)
    known["host_ceiling"] = None if window.is_held_by_device else host_ceiling_of(device, window.take_s)
    changed = dict[str, float | None]()
    for name, rate in known.items():
        before: float | None = getattr(measurement, name)
        settled = rate if before is None or was_measured.get(name, False) else before
        if settled is not None and measurement.samples_per_s_ci[0] > EXCEEDED_FROM * settled:
            settled = None
        if settled != before:
            changed[name] = settled
    return measurement.model_copy(update=changed) if changed else measurement


def _stretch_s(window: WindowRules, limits: Time) -> float:
    return min(max(limits.ceiling_share * window.max_s, limits.shortest_ceiling_s), limits.longest_ceiling_s)
