"""Lay out an hour of training: its parts as shares, largest first, and the parts not observed.

Takes a Diagnosis with shares; returns rows, a table for pages, and lines for a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from autotune.messages.diagnosis import RUN_PART_NAMES, not_observed
from autotune.messages.units import show, text_bar
from autotune.records.result import Diagnosis
from autotune.records.watched_run import RunPart, RunShare
from autotune.report.blocks import Section, Table, footnotes, tabulate
from autotune.report.words import INTERVAL, one_line, shorten, shorten_path

_LEAST_SHARE = 0.01
"""Share below which a part is summed up with others: half a minute of the hour. Source: our
convention."""
_UNCERTAIN_FROM = 0.02
"""Width of an interval from which it is shown for a part of every step: more than rounding hides.
Source: our convention."""
_SUM = "below 1 % each: "
_SEEN_ONCE = "seen once"
"""The period of what came a single time, in words of `diagnosis/run_shares`."""
_RECURRING: tuple[RunPart, ...] = ("checkpoint", "validation", "collection")
"""Parts that are named if none was observed."""
_LONGEST_BAR = 20
_SHORTEST_BAR = 6
_LONGEST_PLACE = 40
_SHORTEST_PLACE = 12
"""Terminal cells. Source: our convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HourRow:
    """A part of the hour, or the sum of the smallest parts."""

    name: str
    """Name of the part; of the sum the names of its parts."""
    fraction: float
    interval: str = ""
    """95 % interval of the share; empty if the share is certain."""
    recurs: str = ""
    """How often it recurs, and if it was seen once only; empty for parts of every step."""
    place: str = ""
    """File and line of the user's code; empty if unknown."""
    is_sum: bool = False
    """The sum of the smallest parts."""


def has_hour(diagnosis: Diagnosis) -> bool:
    """Return whether an hour of training is known: without a script's own run only its steps are."""
    return diagnosis.evidence.watched is not None and bool(diagnosis.shares)


def hour_section(diagnosis: Diagnosis) -> Section:
    """Return the section on the hour; without content if it is not known."""
    rows = hour_rows(diagnosis.shares) if has_hour(diagnosis) else ()
    unobserved = describe_unobserved(diagnosis)
    return Section(
        title="Where an hour of training goes",
        blocks=(
            _hour_table(rows),
            footnotes([unobserved] if unobserved else []),
        ),
    )


def hour_rows(shares: Sequence[RunShare]) -> tuple[HourRow, ...]:
    """Return the parts of at least 1 %, largest first, and the sum of the others."""
    ranked = sorted(shares, key=lambda share: -share.fraction)
    small = [share for share in ranked if 0 < share.fraction < _LEAST_SHARE]
    rows = [_row(share) for share in ranked if share.fraction >= _LEAST_SHARE]
    if len(small) == 1:
        rows.append(_row(small[0]))
    elif small:
        names = ", ".join(RUN_PART_NAMES[share.part] for share in small)
        whole = sum(share.fraction for share in small)
        rows.append(HourRow(name=f"{_SUM}{names}", fraction=whole, is_sum=True))
    return tuple(rows)


def _row(share: RunShare) -> HourRow:
    is_uncertain = share.seen is not None or share.high - share.low >= _UNCERTAIN_FROM
    interval = _show_ends(share) if is_uncertain else ""
    recurs = share.period
    if share.seen == 1 and recurs != _SEEN_ONCE:
        recurs = f"{recurs} ({_SEEN_ONCE})" if recurs else _SEEN_ONCE
    return HourRow(
        name=RUN_PART_NAMES[share.part],
        fraction=share.fraction,
        interval=interval,
        recurs=recurs,
        place=share.place,
    )


def _show_ends(share: RunShare) -> str:
    """Return the interval with one sign: "50 to 63 %"; "" if both ends look like the share."""
    ends = [show(end, "share") for end in (share.low, share.high)]
    if set(ends) == {show(share.fraction, "share")}:
        return ""
    return f"{ends[0].removesuffix(' %')} to {ends[1]}"


def describe_unobserved(diagnosis: Diagnosis) -> str:
    """Return a sentence on what recurs in trainings and was not observed; "" if all of it was."""
    watched = diagnosis.evidence.watched
    if watched is None or not diagnosis.shares:
        return ""
    seen = {share.part for share in diagnosis.shares if share.fraction > 0}
    missing = [part for part in _RECURRING if part not in seen]
    return str(not_observed(parts=missing, observed_s=watched.watched_s)) if missing else ""


def _hour_table(rows: Sequence[HourRow]) -> Table:
    return tabulate(
        (
            {
                "": row.name,
                "what": text_bar(row.fraction),
                "share": show(row.fraction, "share"),
                INTERVAL: row.interval,
                "recurs": row.recurs,
                "place": row.place,
            }
            for row in rows
        ),
        empty="",
    )


def hour_lines(rows: Sequence[HourRow], width: int) -> tuple[str, ...]:
    """Return a line of at most `width` terminal cells for each row: share, interval, bar, part and place.

    Bars take what the texts leave; then places are cut in their middle.
    """
    shares = [show(row.fraction, "share") for row in rows]
    intervals = [f"({row.interval})" if row.interval else "" for row in rows]
    texts = [_describe(row) for row in rows if not row.is_sum]
    share_width = max(map(len, shares), default=0)
    interval_width = max(map(len, intervals), default=0)
    longest_text = max(map(cell_len, texts), default=0)

    # Columns before the text: share, interval, bar
    gaps = 3 + (1 if interval_width else 0)
    left = width - share_width - interval_width - gaps
    bar_width = min(_LONGEST_BAR, max(_SHORTEST_BAR, left - longest_text))
    text_width = left - bar_width
    lines = []
    for row, share, interval in zip(rows, shares, intervals, strict=True):
        head = f"{share:>{share_width}}"
        if interval_width:
            head += f" {interval:<{interval_width}}"
        bar = text_bar(row.fraction, bar_width)
        lines.append(f"{head}  {bar:<{bar_width}} {_fit(row, text_width)}".rstrip())
    return tuple(lines)


def _describe(row: HourRow, place_width: int = _LONGEST_PLACE) -> str:
    """Return a row's part, how it recurs, and its place: "checkpoints every 5 steps, train.py:41"."""
    text = one_line(f"{row.name} {row.recurs}")
    return f"{text}, {shorten_path(row.place, place_width)}" if row.place else text


def _fit(row: HourRow, width: int) -> str:
    """Return a row's text within `width` terminal cells: the place gives way first."""
    text = _describe(row)
    excess = cell_len(text) - width
    if excess > 0 and row.place:
        shown = cell_len(shorten_path(row.place, _LONGEST_PLACE))
        text = _describe(row, max(shown - excess, _SHORTEST_PLACE))
    return shorten(text, width)
