"""How far the rates are from what loader and device can each do alone, in sentences.

Comes in: a RunSummary with ceilings, as far as they were measured. Goes out: sentences that are true in each case: a
ceiling that is missing, a rate above its ceiling, a baseline that is no reference.
"""

from __future__ import annotations

from autotune.records.ceilings import HOLDS_FROM, Standing, standing_of
from autotune.records.run_summary import RunSummary
from autotune.report.figures import Figures, summarise
from autotune.report.formatting import format_fraction
from autotune.settings.training_config import TrainingConfig

__all__ = ["find_standing", "say_standing"]

_NOISE = 0.10
"""A rate this far above a ceiling is no noise, the ceiling was measured too low: our own convention, over twice the 4 %
that two runs of the same settings may differ by on a CPU (core.measurement.RUN_SPREAD)."""
_NOTHING_LEFT = 0.005
_SMALL_ROOM = 0.5


def find_standing(figures: Figures | None) -> Standing | None:
    """Where a configuration's rate stands; None where it or a ceiling was not measured."""
    if figures is None or not figures.loader_ceiling or not figures.device_ceiling:
        return None
    return standing_of(
        figures.samples_per_s.value, loader_ceiling=figures.loader_ceiling, device_ceiling=figures.device_ceiling
    )


def say_standing(summary: RunSummary) -> tuple[str, ...]:
    """How much of the device is used today, what holds it, and what tuning can still give; a sentence each."""
    found = summary.recommendation
    if found is None:
        return ()
    best = summarise(summary, found.number)
    sentences = []
    if found.verdict != "baseline_infeasible":
        sentences.append(_say_present(summarise(summary, 0), summary.baseline))
    sentences.append(_say_best(best, is_own=found.number == 0))
    return tuple(filter(None, sentences))


def _say_present(figures: Figures | None, config: TrainingConfig) -> str:
    if figures is None:
        return ""
    standing = find_standing(figures)
    rate = figures.samples_per_s.value
    if standing is not None:
        if standing.share_of_lower > 1 + _NOISE:
            return _say_too_low(standing, "You run")
        share = _share(standing.share_of_device)
        return f"You run at {share} of what {_whose(config)} can do; {_holder(standing, config)}."
    if figures.device_ceiling and rate / figures.device_ceiling <= 1 + _NOISE:
        share = _share(rate / figures.device_ceiling)
        return f"You run at {share} of what {_whose(config)} can do; the loader alone was not measured."
    if figures.loader_ceiling:
        reached = _share(rate / figures.loader_ceiling)
        return f"You run at {reached} of what your loader delivers alone; the device alone was not measured."
    return ""


def _whose(config: TrainingConfig) -> str:
    return "this device" if config.world_size == 1 else f"these {config.world_size} devices"


def _holder(standing: Standing, config: TrainingConfig) -> str:
    if standing.share_of_lower >= HOLDS_FROM:
        device = "the device itself is" if config.world_size == 1 else "the devices themselves are"
        return "the loader is what holds it" if standing.lower == "loader" else f"{device} what holds it"
    if config.num_workers == 0:
        return "without workers, loading and computing take turns"
    return f"neither side alone holds it: it reaches {_share(standing.share_of_lower)} of the lower ceiling"


def _say_best(figures: Figures | None, *, is_own: bool) -> str:
    standing = find_standing(figures)
    if standing is None:
        return ""
    subject = "Your configuration" if is_own else "The best found"
    if standing.share_of_lower > 1 + _NOISE:
        return "" if is_own else _say_too_low(standing, "The best found runs")
    reached = f"{subject} reaches {_share(standing.share_of_lower)} of the lower ceiling, the {standing.lower}'s"
    if standing.room < _NOTHING_LEFT:
        return f"{reached}; unless that is raised, nothing is left for tuning."
    if standing.room <= _SMALL_ROOM:
        return f"{reached}; unless that is raised, tuning can't give more than {format_fraction(standing.room)}."
    return f"{reached}, which would allow {format_fraction(standing.room)} more."


def _say_too_low(standing: Standing, subject: str) -> str:
    share = format_fraction(standing.share_of_lower)
    return f"{subject} at {share} of the {standing.lower}'s ceiling as it was measured: too low to judge by."


def _share(fraction: float) -> str:
    """What noise carries above the whole is the whole."""
    return "all" if fraction >= 1 - _NOTHING_LEFT else format_fraction(fraction)
