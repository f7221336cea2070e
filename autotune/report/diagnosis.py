"""Report a diagnosis on a console and in Markdown: the answer, the time breakdown, evidence, advice.

Takes a Diagnosis; returns or prints text. Both forms lay out the same blocks.
"""

from __future__ import annotations

from math import isfinite

from rich.console import Console
from rich.text import Text

from autotune.diagnosis.bottlenecks import breakdown_of
from autotune.messages.diagnosis import BOTTLENECKS
from autotune.messages.units import show, show_interval, text_bar
from autotune.models.observations import points_by_side
from autotune.records.breakdown import PARTS
from autotune.records.ceilings import EXCEEDED_FROM
from autotune.records.result import Curves, Diagnosis
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
from autotune.report.console import print_section
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
from autotune.report.words import INTERVAL, PART_NAMES, describe_settings, one_line

_NOT_MEASURED = "not measured"
_NO_ADVICE = "Nothing measured gains 3 % or more."
_LEAST_RESTART = 0.001
"""Share of the time from which on restarts of epochs are shown: 0.1 % after rounding."""


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print the answer first, then the evidence."""
    console.print()
    style = "bold green" if diagnosis.is_healthy else "bold"
    console.print(Text(one_line(diagnosis.headline), style=style))
    console.print(Text(describe_present(diagnosis)))
    for section in diagnosis_sections(diagnosis):
        print_section(section, console)


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
    about = "about " if _is_device_estimated(diagnosis) else ""
    rate = show(headroom.samples_per_s, "plain_rate")
    rates = f"{rate} of {about}{show(headroom.device_ceiling, 'rate')}"
    if diagnosis.verdict == "script":
        return f"The script's own code slows the device alone as well ({rates}); {limit}."
    share = show_share(headroom.share_of_device)
    return f"You run at {about}{share} of what this device can do ({rates}); {limit}."


def _is_device_estimated(diagnosis: Diagnosis) -> bool:
    """Return whether the device's ceiling is an estimate: launching limited it, or it was not measured."""
    measured = diagnosis.evidence.measurement.device_ceiling
    return measured is None or diagnosis.headroom.device_ceiling > measured


def diagnosis_sections(diagnosis: Diagnosis) -> tuple[Section, ...]:
    """Return the sections below the headline, without what was not measured."""
    run = diagnosis.evidence.measurement
    curves = diagnosis.evidence.curves
    findings = (
        (found.share, BOTTLENECKS[found.bottleneck], found.evidence) for found in diagnosis.findings
    )
    is_loaded = run.host_load is not None and run.host_load.is_loaded
    advice: Block = Bullets(sentences=(_NO_ADVICE,))
    if diagnosis.advice:
        advice = advice_table(diagnosis.advice, is_loaded=is_loaded)
    elif diagnosis.verdict == "unknown":  # no gain was measured
        advice = tabulate(())
    loader = {} if run.loader_costs is None else loader_facts(run.loader_costs)
    notes = [one_line(str(note)) for note in diagnosis.notes]
    notes += describe_setup({"your settings": [run]})
    return filled(
        Section(title="Where the time goes", blocks=_time(diagnosis)),
        Section(title="Bottlenecks", blocks=(bottleneck_table(findings),)),
        Section(title="What to do", blocks=(advice,)),
        Section(title="Your settings", blocks=(facts_with_values(_list_figures(diagnosis)),)),
        *rank_section(run.ranks),
        Section(title="Inside the loader: what an item costs", blocks=(facts_with_values(loader),)),
        Section(
            title="Lengths: tokens and padding", blocks=(facts_with_values(length_facts(run)),)
        ),
        Section(title="Other settings, each side alone", blocks=(_curves(curves),)),
        Section(title="Notes", blocks=(Bullets(sentences=tuple(notes)),)),
    )


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
