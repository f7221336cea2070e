"""Report a diagnosis on a console and in Markdown: the answer, where the time goes, advice, evidence.

Takes a Diagnosis; returns or prints text. A console shows a screen of it by default, and all of it on
request; Markdown always has all of it, from the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from autotune.diagnosis.bottlenecks import breakdown_of
from autotune.messages.diagnosis import BOTTLENECKS, CHECKS
from autotune.messages.units import format_count, show, show_gain_interval, show_interval, text_bar
from autotune.models.observations import points_by_side
from autotune.note import Note
from autotune.records.breakdown import PARTS
from autotune.records.ceilings import EXCEEDED_FROM
from autotune.records.result import Advice, Curves, Diagnosis
from autotune.report.blocks import (
    Block,
    Bullets,
    Paragraph,
    Section,
    Table,
    facts_with_values,
    filled,
    footnotes,
    tabulate,
)
from autotune.report.console import print_section, wrap_lines
from autotune.report.hour import describe_unobserved, has_hour, hour_lines, hour_rows, hour_section
from autotune.report.markdown import render_sections
from autotune.report.sections import (
    advice_table,
    bottleneck_table,
    describe_environment,
    device_facts,
    fullness_facts,
    length_facts,
    loader_facts,
    rank_section,
)
from autotune.report.sentences import (
    describe_exchange,
    describe_limit,
    describe_setup,
    show_share,
)
from autotune.report.words import (
    INTERVAL,
    PART_NAMES,
    describe_settings,
    one_line,
    shorten,
    shorten_path,
)

ADVICE_TITLE = "What to do"
"""Title of the last section that a notebook shows at once."""
_NOT_MEASURED = "not measured"
_NO_ADVICE = "Nothing measured gains 3 % or more."
_LEAST_RESTART = 0.001
"""Share of the time from which on restarts of epochs are shown: 0.1 % after rounding."""


def print_diagnosis(diagnosis: Diagnosis, console: Console, *, is_full: bool = False) -> None:
    """Print the answer first, then where the time goes and what to do.

    Args:
        diagnosis: The diagnosis.
        console: The console.
        is_full: Print all evidence, advice and notes. Otherwise at most 40 lines on 80 columns.
    """
    style = "bold green" if diagnosis.is_healthy else "bold"
    console.print()
    if not is_full:
        _print_screen(diagnosis, console, style)
        return
    console.print(Text(one_line(diagnosis.headline), style=style))
    console.print(Text(describe_present(diagnosis)))
    if has_hour(diagnosis):
        _print_hour(diagnosis, console)
    for section in _evidence_sections(diagnosis):
        print_section(section, console)


# The default form: each part has a highest number of lines.

_INDENT = "  "
_MOST_HEADLINE = 4
_MOST_UNOBSERVED = 2
_MOST_OF_ADVICE = 3
_MOST_DOUBTS = 3
"""Lines of the headline, of the sentence on what was not observed, and of a piece of advice; notes
that are shown. Source: with 14 lines of shares and three pieces of advice, these make less than 40
lines."""
_PIECES_SHOWN = 3
_LONGEST_PLACE = 40
"""Terminal cells. Source: our convention."""
_DOUBTS = frozenset(
    {
        "another_search",
        "breakdown_not_measured",
        "clock_lowered",
        "clock_moved",
        "cores_taken",
        "memory_growth",
        "others_on_device",
        "search_would_refuse",
    }
)
"""Codes of the notes to read before the answer can be trusted: a loaded machine, or a baseline near
its memory limit."""


def _print_screen(diagnosis: Diagnosis, console: Console, style: str) -> None:
    """Print the default form: headline, doubts, where the time goes, three pieces of advice."""
    for line in wrap_lines(diagnosis.headline, console, _MOST_HEADLINE):
        console.print(Text(line, style=style))
    if not has_hour(diagnosis):
        for line in wrap_lines(describe_present(diagnosis), console, _MOST_HEADLINE):
            console.print(Text(line))
    _print_doubts(diagnosis, console)
    if has_hour(diagnosis):
        _print_hour(diagnosis, console)
    else:
        for section in filled(_time_section(diagnosis, has_sources=False)):
            print_section(section, console)
    _print_advice(diagnosis, console)
    _print_end(diagnosis, console)


def _print_hour(diagnosis: Diagnosis, console: Console) -> None:
    """Print the shares of an hour of training, a line each, and what was not observed."""
    section = hour_section(diagnosis)
    console.print(Text(f"\n{section.title}", style="bold"))
    width = console.width - len(_INDENT)
    for line in hour_lines(hour_rows(diagnosis.shares), width):
        console.print(Text(_INDENT + line))
    for line in wrap_lines(
        describe_unobserved(diagnosis), console, _MOST_UNOBSERVED, indent=_INDENT
    ):
        console.print(Text(line, style="dim"))


def _print_advice(diagnosis: Diagnosis, console: Console) -> None:
    """Print the first three pieces of advice: gain, place, and what to do."""
    if diagnosis.verdict == "unknown" and not diagnosis.advice:  # no gain was measured
        return
    console.print(Text(f"\n{ADVICE_TITLE}", style="bold"))
    pieces = _first_pieces(diagnosis.advice)
    if not pieces:
        console.print(Text(_INDENT + _NO_ADVICE))
    for number, piece in enumerate(pieces, start=1):
        head = f"{_INDENT}{number}. "
        lines = wrap_lines(
            _describe_piece(piece, is_loaded=_is_loaded(diagnosis)),
            console,
            _MOST_OF_ADVICE,
            indent=" " * len(head),
        )
        lines = [head + lines[0].lstrip(), *lines[1:]]
        console.print(Text("\n".join(lines)))


def _first_pieces(advice: Sequence[Advice]) -> list[Advice]:
    """Return the first three pieces that differ: settings within those of an earlier one are left out."""
    shown: list[Advice] = []
    for piece in advice:
        settings = piece.settings.items()
        is_within = any(settings <= earlier.settings.items() for earlier in shown)
        if not piece.settings or not is_within:
            shown.append(piece)
    return shown[:_PIECES_SHOWN]


def _describe_piece(piece: Advice, *, is_loaded: bool) -> str:
    """Return a piece of advice: "+71 % (+55 % to +90 %), train.py:41: Save less often."."""
    head = []
    if piece.expected_gain is not None and not is_loaded:
        gain = show(piece.expected_gain, "gain")
        ends = piece.gain_interval
        head.append(gain if ends is None else f"{gain} ({show_gain_interval(ends.low, ends.high)})")
    if piece.place:
        head.append(shorten_path(piece.place, _LONGEST_PLACE))
    return ": ".join(filter(None, [", ".join(head), f"{piece.text}."]))


def _print_doubts(diagnosis: Diagnosis, console: Console) -> None:
    """Print the notes to read before the answer can be trusted, a line for each kind."""
    doubts: dict[str, Note] = {}
    for note in diagnosis.notes:
        if note.code in _DOUBTS:
            doubts.setdefault(note.code, note)
    for note in tuple(doubts.values())[:_MOST_DOUBTS]:
        console.print(Text(shorten(f"Note: {note}", console.width)))


def _print_end(diagnosis: Diagnosis, console: Console) -> None:
    """Print what could not be checked, and where the rest is, a line each."""
    console.print()
    if diagnosis.not_excluded:
        console.print(Text(_describe_not_excluded(diagnosis.not_excluded, console.width)))
    rest = ["evidence"]
    more = len(diagnosis.advice) - len(_first_pieces(diagnosis.advice))
    if more:
        rest.append(f"{more} more {'piece' if more == 1 else 'pieces'} of advice")
    if diagnosis.notes:
        rest.append(format_count(len(diagnosis.notes), "note"))
    console.print(Text(f"More: --full ({', '.join(rest)}), --json"))


def _describe_not_excluded(causes: Sequence[Note], width: int) -> str:
    """Return the causes in a line, with their reasons if all of these fit."""
    line = one_line(f"Not excluded: {'; '.join(map(str, causes))}")
    if cell_len(line) <= width:
        return line
    names = ", ".join(CHECKS[str(cause.figures["cause"])] for cause in causes)
    return shorten(f"Not excluded: {names}", width)


def render_diagnosis(diagnosis: Diagnosis) -> str:
    """Return the diagnosis in Markdown."""
    lead = [Paragraph(text=describe_present(diagnosis))]
    machine = Section(
        title="Machine",
        blocks=(facts_with_values(describe_environment(diagnosis.evidence.environment)),),
    )
    title = f"autotune diagnose: {diagnosis.name}"
    sections = (*diagnosis_sections(diagnosis), machine)
    return render_sections(title, diagnosis.headline, lead, sections)


def describe_present(diagnosis: Diagnosis) -> str:
    """Return the throughput relative to the device's ceiling and what limits it, in a sentence."""
    headroom = diagnosis.headroom
    evidence = diagnosis.evidence
    run = evidence.measurement
    throughput = show(headroom.samples_per_s, "rate")
    if diagnosis.verdict == "unknown":
        return f"You run at {throughput}; neither loader nor device was measured alone."
    if headroom.share_of_device > EXCEEDED_FROM:  # the ceiling was estimated too low
        return f"You run at {throughput}; the device alone was {_NOT_MEASURED}."
    # The sides that were not measured, and the limit as far as it is known without them
    ends = []
    if run.device_ceiling is None:
        ends.append(f"the device alone was {_NOT_MEASURED}")
    if run.loader_ceiling is None:
        ends.append(f"the loader alone was {_NOT_MEASURED}")
    if run.loader_ceiling is not None or headroom.limit in {"copy", "host"}:
        ends.append(describe_limit(headroom, evidence.config, evidence.environment.device_kind))
    limit = "; ".join(ends)
    who = "The steps run" if has_hour(diagnosis) else "You run"
    about = "about " if _is_device_estimated(diagnosis) else ""
    rate = show(headroom.samples_per_s, "plain_rate")
    rates = f"{rate} of {about}{show(headroom.device_ceiling, 'rate')}"
    if diagnosis.verdict == "script":
        return f"The script's own code slows the device alone as well ({rates}); {limit}."
    share = show_share(headroom.share_of_device)
    return f"{who} at {about}{share} of what this device can do ({rates}); {limit}."


def _is_device_estimated(diagnosis: Diagnosis) -> bool:
    """Return whether the device's ceiling is an estimate: launching limited it, or it was not measured."""
    measured = diagnosis.evidence.measurement.device_ceiling
    return measured is None or diagnosis.headroom.device_ceiling > measured


def _is_loaded(diagnosis: Diagnosis) -> bool:
    """Return whether other programs slowed the measurements, so that gains may be an effect of that."""
    load = diagnosis.evidence.measurement.host_load
    return load is not None and load.is_loaded


def diagnosis_sections(diagnosis: Diagnosis) -> tuple[Section, ...]:
    """Return the sections below the headline, without what was not measured."""
    return (*filled(hour_section(diagnosis)), *_evidence_sections(diagnosis))


def _evidence_sections(diagnosis: Diagnosis) -> tuple[Section, ...]:
    """Return the sections below the hour."""
    run = diagnosis.evidence.measurement
    curves = diagnosis.evidence.curves
    findings = (
        (found.share, BOTTLENECKS[found.bottleneck], found.evidence) for found in diagnosis.findings
    )
    advice: Block = Bullets(sentences=(_NO_ADVICE,))
    if diagnosis.advice:
        advice = advice_table(diagnosis.advice, is_loaded=_is_loaded(diagnosis))
    elif diagnosis.verdict == "unknown":  # no gain was measured
        advice = tabulate(())
    loader = {} if run.loader_costs is None else loader_facts(run.loader_costs)
    notes = [one_line(str(note)) for note in diagnosis.notes]
    notes += describe_setup({"your settings": [run]})
    return filled(
        _time_section(diagnosis),
        Section(title="Bottlenecks", blocks=(bottleneck_table(findings),)),
        Section(title=ADVICE_TITLE, blocks=(advice,)),
        Section(
            title="Not excluded",
            blocks=(Bullets(sentences=tuple(map(str, diagnosis.not_excluded))),),
        ),
        Section(title="Your settings", blocks=(facts_with_values(_list_figures(diagnosis)),)),
        *rank_section(run.ranks),
        Section(title="Inside the loader: what an item costs", blocks=(facts_with_values(loader),)),
        Section(
            title="Lengths: tokens and padding", blocks=(facts_with_values(length_facts(run)),)
        ),
        Section(title="Other settings, each side alone", blocks=(_curves(curves),)),
        Section(title="Notes", blocks=(Bullets(sentences=tuple(notes)),)),
    )


def _time_section(diagnosis: Diagnosis, *, has_sources: bool = True) -> Section:
    """Return the time breakdown of the steps, with the sources of its figures as a footnote."""
    title = "Where the time of a step goes" if has_hour(diagnosis) else "Where the time goes"
    table, sources = _time(diagnosis)
    return Section(title=title, blocks=(table, sources) if has_sources else (table,))


def _time(diagnosis: Diagnosis) -> tuple[Table, Bullets]:
    breakdown = breakdown_of(diagnosis.evidence)
    shares = breakdown.shares()
    if diagnosis.verdict == "unknown":
        named = {}
    elif diagnosis.evidence.measurement.breakdown is None:
        named = {PART_NAMES["data_wait"]: breakdown.data_wait, "all else": breakdown.compute}
    else:
        named = {PART_NAMES[part]: shares[part] for part in PARTS if shares[part].fraction > 0}
    fractions = {}
    for name, part in named.items():
        fractions[name] = part.fraction
        if name == PART_NAMES["data_wait"] and breakdown.restart_fraction >= _LEAST_RESTART:
            fractions["of it at epochs' ends"] = breakdown.restart_fraction
    rows = (
        {"": name, "what": text_bar(fraction), "share": show(fraction, "share")}
        for name, fraction in fractions.items()
    )
    sources = "; ".join(dict.fromkeys(part.source for part in named.values()))
    return tabulate(rows), footnotes([f"Measured by: {sources}."] if named else [])


def _list_figures(diagnosis: Diagnosis) -> dict[str, str]:
    evidence = diagnosis.evidence
    headroom = diagnosis.headroom
    run = evidence.measurement
    interval = show_interval(*run.samples_per_s_ci, "plain_rate")
    busy = [f"{show(one.fraction, 'share')} ({one_line(one.source)})" for one in run.busy_readings]
    device = _ceiling(headroom.device_ceiling, run.device_ceiling, "the waits for data")
    if run.device_ceiling is not None and _is_device_estimated(diagnosis):
        device = (
            f"{show(run.device_ceiling, 'rate')}, limited by launching (about "
            f"{show(headroom.device_ceiling, 'rate')} by its busy time)"
        )
    return {
        "settings": describe_settings(evidence.config),
        "throughput": f"{show(run.samples_per_s, 'rate')} ({INTERVAL}: {interval})",
        "loader alone": _ceiling(headroom.loader_ceiling, run.loader_ceiling, "its items' costs"),
        "device alone": device,
        "copying alone": show(headroom.copy_ceiling, "rate"),
        "host alone": show(headroom.host_ceiling, "rate"),
        "peak memory": f"{show(run.peak_memory_bytes, 'bytes')} of {show(evidence.limit_bytes, 'bytes')}",
        "busy": ", ".join(busy),
        **fullness_facts(run.fullness),
        "energy a sample": show(run.joules_per_sample, "energy"),
        **device_facts([run]),
        "exchange": "" if run.communication is None else describe_exchange(run.communication),
        "diagnosed in": show(diagnosis.wall_s, "duration"),
    }


def _ceiling(rate: float, measured: float | None, basis: str) -> str:
    if measured is not None:
        return show(rate, "rate")
    if not isfinite(rate):
        return _NOT_MEASURED
    return f"{_NOT_MEASURED} (about {show(rate, 'rate')} by {basis})"


def _curves(curves: Curves) -> Table:
    """Tabulate settings measured on one side alone; empty if only yours were."""
    tried = [
        (side, point)
        for side, points in points_by_side(curves)
        for point in points
        if not point.is_left_out
    ]
    if not any(point.changes and point.ceiling for _, point in tried):
        return tabulate(())
    return tabulate(
        {
            "": side,
            "settings": show(point.changes, "settings") or "yours",
            "samples/s": show(point.ceiling and point.ceiling.samples_per_s, "plain_rate"),
        }
        for side, point in tried
    )
