"""Advise on what a run does besides its steps: checkpoints, validation, logging, garbage collections.

Takes a WatchedRun and the shares of an hour of it; returns findings, advice whose gain is that of
the whole run, and notes on what could not be timed. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.diagnosis.advice import LEAST_GAIN, advise_saving, gain_of
from autotune.diagnosis.hot_lines import costly_code
from autotune.diagnosis.run_shares import extrapolate, share_of
from autotune.messages import advice as messages
from autotune.messages import diagnosis as diagnosis_messages
from autotune.messages.advice import AdviceText
from autotune.note import Note
from autotune.records.measurement import Interval
from autotune.records.result import Advice, Bottleneck, Finding
from autotune.records.watched_run import Recurring, RunPart, RunShare, WatchedRun

_BOTTLENECKS: dict[RunPart, Bottleneck] = {
    "checkpoint": "checkpoint",
    "validation": "validation",
    "logging": "logging",
    "collection": "collection",
}
"""Parts that this module advises on."""
_AS_OFTEN = 0.1
"""Share of a part's time that its remedy leaves: a tenth as often. Source: our convention; published
configurations save and validate every 500 to 1,000 steps or more (torchtitan, Hugging Face)."""
_AUTOMATIC = "garbage collection"
"""Beginning of the name of collections that Python starts; see `worker/script/seams`."""


@dataclass(frozen=True, slots=True)
class _Largest:
    """The work that takes most of a part's time."""

    kind: Recurring
    period: str
    """How often it recurs, in words."""
    steps: int | None
    """Steps between two occurrences that its remedy leaves; None if unknown."""
    each_s: float
    """Seconds of an occurrence, with what always comes with it: torch.save and os.fsync."""
    each_bytes: int


def findings_of_parts(watched: WatchedRun, shares: Sequence[RunShare]) -> Iterator[Finding]:
    """Yield a finding for each of these parts of a run, of any share."""
    for share, largest in _largest_of_parts(watched, shares):
        what = largest.kind.what
        words = diagnosis_messages.recurring_evidence(
            share=share.fraction,
            what=f"a pass over {what}" if share.part == "validation" else what,
            place=largest.kind.place,
            period=largest.period,
            each_s=largest.each_s,
            each_bytes=largest.each_bytes,
        )
        yield Finding(
            bottleneck=_BOTTLENECKS[share.part],
            share=share.fraction,
            figures=dict(words.figures),
            evidence=words.text,
        )


def remedies_of_parts(watched: WatchedRun | None, shares: Sequence[RunShare]) -> Iterator[Advice]:
    """Yield a remedy for each of these parts that is worth it.

    The gain is that of the whole run if the part takes a tenth of its time; its interval goes from
    the lower end of the part's share to all of the upper end.

    Args:
        watched: The script's own run; None of a model and a dataset, which have no such parts.
        shares: The parts of an hour of it.
    """
    if watched is None:
        return
    for share, largest in _largest_of_parts(watched, shares):
        if gain_of(_saved(share.fraction)) < LEAST_GAIN:
            continue
        saved = Interval(value=_saved(share.fraction), low=_saved(share.low), high=share.high)
        yield advise_saving(
            _words(share.part, largest), saved, _BOTTLENECKS[share.part], place=largest.kind.place
        )


def remedies_of_code(watched: WatchedRun | None, shares: Sequence[RunShare]) -> Iterator[Advice]:
    """Yield how to shorten the script's own code, by the code that stacks show most often.

    The gain is that of the whole run if it takes a tenth of its time; at least half of it.
    """
    if watched is None or watched.stacks is None:
        return
    most = share_of(shares, "other")
    line = costly_code(
        watched.stacks,
        known={kind.place for kind in watched.recurring},
        saving={kind.place for kind in watched.recurring if kind.part == "checkpoint"},
    )
    if line is None or most < _LEAST_OWN:
        return
    fraction = min(most, line.fraction)
    saved = Interval(value=_saved(fraction), low=fraction / 2, high=fraction)
    words = messages.shorten_line(
        fraction=line.fraction,
        place=line.place,
        function=line.function,
        code=line.code,
        calls=line.calls,
        is_in_model=False,
    )
    yield advise_saving(words, saved, "script", place=line.place)


_LEAST_OWN = 0.10
"""Share of the run in the script's own code from which it is advised on. Source: our convention, as
for findings."""


def notes_on_parts(watched: WatchedRun | None) -> Iterator[Note]:
    """Yield notes on trackers that could not be timed, and on saves that may cost more in training."""
    if watched is None:
        return
    for kind in watched.recurring:
        if kind.is_muted:
            calls = kind.count / max(1, watched.steps)
            yield diagnosis_messages.tracker_not_timed(what=kind.what, calls_per_step=calls)
    files = watched.written_elsewhere
    if files:
        yield diagnosis_messages.written_elsewhere(files=len(files), first=files[0])


def _saved(fraction: float) -> float:
    """Return the share of the run that is saved if a part with this share shrinks."""
    return (1.0 - _AS_OFTEN) * fraction


def _largest_of_parts(
    watched: WatchedRun, shares: Sequence[RunShare]
) -> Iterator[tuple[RunShare, _Largest]]:
    """Yield the shares of these parts, each with the work that takes most of it."""
    periods = {(one.kind.part, one.kind.what, one.kind.place): one for one in extrapolate(watched)}
    for share in shares:
        kinds = [kind for kind in watched.recurring if kind.part == share.part and kind.count]
        if share.part not in _BOTTLENECKS or not kinds:
            continue
        largest = max(kinds, key=lambda kind: kind.total_s)
        together = [kind for kind in kinds if kind.count == largest.count]
        of = periods.get((largest.part, largest.what, largest.place))
        period = "every step" if of is None else of.period
        yield (
            share,
            _Largest(
                kind=largest,
                period=period,
                steps=_steps_instead(largest, period),
                each_s=sum(kind.total_s for kind in together) / largest.count,
                each_bytes=sum(kind.written_bytes for kind in together) // largest.count,
            ),
        )


def _steps_instead(kind: Recurring, period: str) -> int | None:
    """Return the steps between two occurrences that the remedy leaves; None if epochs or chance set it."""
    if len(kind.at_steps) < 2 or "epoch" in period:
        return None
    apart = (kind.at_steps[-1] - kind.at_steps[0]) / (len(kind.at_steps) - 1)
    return round(max(1.0, apart) / _AS_OFTEN)


def _words(part: RunPart, largest: _Largest) -> AdviceText:
    kind = largest.kind
    if part == "checkpoint":
        return messages.save_less_often(
            what=kind.what,
            place=kind.place,
            period=largest.period,
            each_s=largest.each_s,
            each_bytes=largest.each_bytes,
            is_asynchronous=kind.what.endswith("async_save"),
            steps=largest.steps,
        )
    if part == "validation":
        return messages.validate_less(
            what=kind.what,
            place=kind.place,
            period=largest.period,
            each_s=largest.each_s,
            steps=largest.steps,
        )
    if part == "logging":
        return messages.log_less_often(
            what=kind.what,
            place=kind.place,
            period=largest.period,
            each_s=largest.each_s,
            has_histograms="histogram" in kind.what.lower(),
            steps=largest.steps,
        )
    if kind.what.startswith(_AUTOMATIC):
        return messages.freeze_objects(what=kind.what, period=largest.period, each_s=largest.each_s)
    if kind.what.endswith("empty_cache"):
        return messages.keep_cache(
            what=kind.what, place=kind.place, period=largest.period, each_s=largest.each_s
        )
    return messages.collect_less_often(
        what=kind.what,
        place=kind.place,
        period=largest.period,
        each_s=largest.each_s,
        steps=largest.steps,
    )
