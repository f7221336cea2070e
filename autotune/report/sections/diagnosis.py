"""A diagnosis on a console within 80 columns, and in Markdown: the answer, where the time goes, evidence, advice.

Comes in: a Diagnosis with its words. Goes out: text. Both forms lay out the same blocks.
"""

from __future__ import annotations

from math import isfinite

from rich.console import Console
from rich.text import Text

from autotune.diagnosis.bottlenecks import breakdown_of
from autotune.diagnosis.gains import NEAR_CEILING
from autotune.records.breakdown import PARTS
from autotune.records.ceilings import HOLDS_FROM, overlaps
from autotune.records.diagnosis import CurvePoint, Diagnosis
from autotune.report.blocks import MEASURED_BY, Block, Bullets, Facts, Section, Table
from autotune.report.figures import join_runs
from autotune.report.render.console_blocks import print_section
from autotune.report.render.markdown import render_sections
from autotune.report.sections.advice import advice_table
from autotune.report.sections.devices import device_facts
from autotune.report.sections.facts import describe_environment
from autotune.report.sections.ranks import rank_section
from autotune.report.sections.times import fullness_facts, loader_facts
from autotune.report.text import one_line
from autotune.report.wording.names import BOTTLENECKS, PART_NAMES, describe_settings
from autotune.report.wording.remarks import describe_exchange, say_setup
from autotune.report.wording.say import say
from autotune.report.wording.units import (
    NO_VALUE,
    format_bytes,
    format_duration,
    format_energy,
    format_fraction,
    format_interval,
    format_rate,
    format_short_time,
    show,
    text_bar,
)

__all__ = ["diagnosis_sections", "print_diagnosis", "render_diagnosis", "say_present"]

_NOT_MEASURED = "not measured"
_TEXTS = frozenset({"", "what", "evidence", MEASURED_BY, "settings"})


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """The answer first, then what it rests on."""
    console.print()
    console.print(Text(one_line(diagnosis.headline), style="bold green" if diagnosis.is_healthy else "bold"))
    console.print(Text(say_present(diagnosis)))
    for section in diagnosis_sections(diagnosis):
        print_section(section, console)


def render_diagnosis(diagnosis: Diagnosis) -> str:
    """The same in Markdown."""
    lead = (diagnosis.headline, say_present(diagnosis))
    machine = Section(title="Machine", blocks=(Facts(facts=describe_environment(diagnosis.evidence.environment)),))
    sections = (*diagnosis_sections(diagnosis), machine)
    return render_sections(f"autotune diagnose: {diagnosis.name}", lead, sections)


def say_present(diagnosis: Diagnosis) -> str:
    """Where today's rate stands, in a sentence or two."""
    headroom, evidence = diagnosis.standing, diagnosis.evidence
    share = format_fraction(min(1.0, headroom.share_of_device))
    rates = f"{format_rate(headroom.samples_per_s)} of {format_rate(headroom.device_ceiling)} samples/s"
    if evidence.measurement.device_ceiling is None:
        estimate = f"Judged by the waits for data, you run at about {share} of what this device can do ({rates})"
        return f"{estimate}; the device alone was {_NOT_MEASURED}; {_say_loader(diagnosis)}."
    present = f"You run at {share} of what this device can do ({rates})"
    if headroom.share_of_device >= NEAR_CEILING:
        return f"{present}: only the device's own settings can make it faster."
    present = f"{present}; {_say_loader(diagnosis)}"
    is_measured = evidence.measurement.loader_ceiling is not None
    if is_measured and headroom.lower == "loader" and headroom.share_of_lower >= HOLDS_FROM:
        return f"{present}: the loader is the bottleneck."
    if is_measured and not overlaps(evidence.config, evidence.environment.device_kind):
        return f"{present}, and without workers the two take turns."
    return f"{present}."


def _say_loader(diagnosis: Diagnosis) -> str:
    rate = diagnosis.standing.loader_ceiling
    if not isfinite(rate):
        return f"the loader alone was {_NOT_MEASURED}"
    if diagnosis.evidence.measurement.loader_ceiling is None:
        return f"the loader alone was {_NOT_MEASURED}, its items' costs allow {format_rate(rate)}"
    return f"the loader alone reaches {format_rate(rate)}"


def diagnosis_sections(diagnosis: Diagnosis) -> tuple[Section, ...]:
    """Everything below the headline; what was not measured is left out."""
    sections = (
        Section(title="Where the time goes", blocks=(_time(diagnosis),)),
        Section(title="Bottlenecks", blocks=(_findings(diagnosis),)),
        Section(title="What to do", blocks=(_advice(diagnosis),)),
        Section(title="Today's settings", blocks=(_today(diagnosis),)),
        *rank_section(diagnosis.evidence.measurement.ranks),
        Section(title="Inside the loader", blocks=(_loader(diagnosis),)),
        Section(title="Other settings, each side alone", blocks=(_curves(diagnosis),)),
        Section(title="Notes", blocks=(_notes(diagnosis),)),
    )
    return tuple(section for section in sections if any(map(_has_rows, section.blocks)))


def _time(diagnosis: Diagnosis) -> Block:
    breakdown = breakdown_of(diagnosis.evidence)
    if diagnosis.evidence.measurement.breakdown is None:
        named = {PART_NAMES["data_wait"]: breakdown.data_wait, "all else": breakdown.compute}
    else:
        named = {PART_NAMES[part]: breakdown.shares()[part] for part in PARTS}
    rows = [
        (name, text_bar(part.fraction), format_fraction(part.fraction), part.source) for name, part in named.items()
    ]
    restart = breakdown.restart_fraction
    if restart >= 0.001:
        source = breakdown.data_wait.source
        rows.insert(1, ("of it at epochs' ends", text_bar(restart), format_fraction(restart), source))
    return Table(heads=("", "what", "share", MEASURED_BY), rows=tuple(rows), texts=_TEXTS)


def _findings(diagnosis: Diagnosis) -> Block:
    rows = tuple((format_fraction(it.share), BOTTLENECKS[it.bottleneck], it.evidence) for it in diagnosis.findings)
    return Table(heads=("share", "what", "evidence"), rows=rows, texts=_TEXTS)


def _advice(diagnosis: Diagnosis) -> Block:
    if not diagnosis.advice:
        return Bullets(sentences=("Nothing that was measured promises 3 % or more.",))
    return advice_table(diagnosis.advice)


def _today(diagnosis: Diagnosis) -> Block:
    evidence, headroom = diagnosis.evidence, diagnosis.standing
    run, roofline = evidence.measurement, evidence.curves.roofline
    low, high = run.samples_per_s_ci
    facts = {
        "settings": describe_settings(evidence.config),
        "rate": f"{format_rate(run.samples_per_s)} samples/s "
        f"({format_interval(format_rate(low), format_rate(high))}, 95 %)",
        "loader alone": _ceiling(headroom.loader_ceiling, run.loader_ceiling, "its items' costs"),
        "device alone": _ceiling(headroom.device_ceiling, run.device_ceiling, "the waits for data"),
        "peak memory": f"{format_bytes(run.peak_memory_bytes)} of {format_bytes(evidence.limit_bytes)}",
    }
    if run.busy_readings:
        readings = (f"{format_fraction(busy.fraction)} ({one_line(busy.source)})" for busy in run.busy_readings)
        facts["busy"] = ", ".join(readings)
    facts |= fullness_facts(run.fullness)
    if run.joules_per_sample is not None:
        facts["energy a sample"] = format_energy(run.joules_per_sample)
    facts |= device_facts(join_runs([run]))
    if run.communication is not None:
        facts["exchange"] = describe_exchange(run.communication)
    if roofline is not None:
        batch_s = evidence.config.micro_batch_size / headroom.device_ceiling
        moved = f"{format_bytes(round(roofline.moved_bytes))} moved"
        device = "the device" if run.device_ceiling is not None else "the device (an estimate)"
        facts["a batch"] = (
            f"{format_short_time(batch_s)} on {device}, {roofline.operators:,} operators, {moved}, "
            f"{roofline.flops / 1e9:,.3g} GFLOP"
        )
        facts["the device"] = (
            f"{roofline.peak_flops_per_s / 1e9:,.3g} GFLOP/s in a large matrix product, "
            f"{roofline.peak_bytes_per_s / 1e9:,.3g} GB/s in a large copy"
        )
    facts["diagnosed in"] = format_duration(diagnosis.wall_s)
    return Facts(facts=facts)


def _ceiling(rate: float, measured: float | None, basis: str) -> str:
    if measured is not None:
        return f"{format_rate(rate)} samples/s"
    return f"{_NOT_MEASURED} (about {format_rate(rate)} samples/s by {basis})" if isfinite(rate) else _NOT_MEASURED


def _loader(diagnosis: Diagnosis) -> Block:
    costs = diagnosis.evidence.measurement.loader_costs
    return Facts(facts={} if costs is None else loader_facts(costs))


def _curves(diagnosis: Diagnosis) -> Block:
    curves = diagnosis.evidence.curves
    points = [*(("loader", point) for point in curves.loader), *(("device", point) for point in curves.device)]
    rows = [
        (
            side,
            show(point.changes, "settings") or "today's",
            NO_VALUE if point.ceiling is None else format_rate(point.ceiling.samples_per_s),
        )
        for side, point in points
    ]
    return Table(heads=("", "settings", "samples/s"), rows=tuple(rows), texts=_TEXTS)


def _notes(diagnosis: Diagnosis) -> Block:
    figures = {"today's settings": join_runs([diagnosis.evidence.measurement])}
    notes = tuple(one_line(say(note)) for note in diagnosis.notes)
    return Bullets(sentences=(*notes, *say_setup(figures)))  # the notes have what disturbed the window


def _say_point(point: CurvePoint) -> str:
    return show(point.changes, "settings") or "today's"


def _say_rate(point: CurvePoint) -> str:
    return NO_VALUE if point.ceiling is None else format_rate(point.ceiling.samples_per_s)


def _has_rows(block: Block) -> bool:
    if isinstance(block, Table):
        return bool(block.rows)
    return bool(block.facts) if isinstance(block, Facts) else isinstance(block, Bullets) and bool(block.sentences)
