"""Report a diagnosis on a console and in Markdown: the answer, the time breakdown, evidence, advice.

Takes a Diagnosis; returns or prints text. Both forms lay out the same blocks.
"""

from __future__ import annotations

from math import isfinite

from rich.console import Console
from rich.text import Text

from autotune.diagnosis.bottlenecks import breakdown_of
from autotune.messages.diagnosis import BOTTLENECKS
from autotune.messages.units import format_rate, show, show_interval, text_bar
from autotune.policy import POLICY
from autotune.records.breakdown import PARTS
from autotune.records.ceilings import EXCEEDED_FROM, SIDES, overlaps
from autotune.records.result import Curves, Diagnosis
from autotune.report.blocks import (
    MEASURED_BY,
    Block,
    Bullets,
    Paragraph,
    Section,
    Table,
    filled,
    known_facts,
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
from autotune.report.sentences import describe_exchange, describe_setup
from autotune.report.words import PART_NAMES, describe_settings, name_interval, one_line

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
        title="Machine", blocks=(known_facts(describe_environment(diagnosis.evidence.environment)),)
    )
    title = f"autotune diagnose: {diagnosis.name}"
    sections = (*diagnosis_sections(diagnosis), machine)
    return render_sections(title, diagnosis.headline, lead, sections)


def describe_present(diagnosis: Diagnosis) -> str:
    """Return the throughput relative to the ceilings, in a sentence or two."""
    headroom = diagnosis.standing
    share_of_device = headroom.share_of_device
    throughput = show(headroom.samples_per_s, "rate")
    if diagnosis.verdict == "unknown":
        return f"You run at {throughput}; neither loader nor device was measured alone."
    if share_of_device > EXCEEDED_FROM:  # the ceiling was measured too low
        return f"You run at {throughput}; {_describe_loader(diagnosis)}."
    share = show(min(1.0, share_of_device), "share")
    device = show(headroom.device_ceiling, "rate")
    if _is_device_estimated(diagnosis):
        device = f"about {device}"
    rates = f"{show(headroom.samples_per_s, 'plain_rate')} of {device}"
    if diagnosis.evidence.measurement.device_ceiling is None:
        estimate = f"Judged by the waits for data, you run at about {share} of what this device can do ({rates})"
        return f"{estimate}; the device alone was {_NOT_MEASURED}; {_describe_loader(diagnosis)}."
    present = f"You run at {share} of what this device can do ({rates})"
    if diagnosis.verdict == "script":
        present = f"The script's own code slows the device alone as well ({rates})"
    elif share_of_device >= POLICY.trials.near_ceiling:
        return f"{present}: only the device's own settings can make it faster."
    return f"{present}; {_describe_loader(diagnosis)}{_describe_limit(diagnosis)}."


def _describe_limit(diagnosis: Diagnosis) -> str:
    """Return the bottleneck as the end of a sentence; "" if it is the device, or no side alone."""
    headroom = diagnosis.standing
    evidence = diagnosis.evidence
    is_measured = evidence.measurement.loader_ceiling is not None
    if is_measured and headroom.limit == "loader":
        return ": the loader is the bottleneck"
    if headroom.limit == "copy":
        return ": copying batches to it is the bottleneck"
    if headroom.limit == "host":
        return ": the host that launches its work is the bottleneck"
    if is_measured and not overlaps(evidence.config, evidence.environment.device_kind):
        return ", and without workers the two alternate"
    return ""


def _is_device_estimated(diagnosis: Diagnosis) -> bool:
    """Return whether launching limited the device alone, so that its ceiling is an estimate."""
    measured = diagnosis.evidence.measurement.device_ceiling
    return measured is not None and diagnosis.standing.device_ceiling > measured


def _describe_loader(diagnosis: Diagnosis) -> str:
    ceiling = diagnosis.standing.loader_ceiling
    rate = show(ceiling, "plain_rate")
    if diagnosis.evidence.measurement.loader_ceiling is not None:
        return f"the loader alone reaches {rate}"
    if not isfinite(ceiling):
        return f"the loader alone was {_NOT_MEASURED}"
    return f"the loader alone was {_NOT_MEASURED}, its items' costs allow {rate}"


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
        advice = Bullets(sentences=())
    loader = {} if run.loader_costs is None else loader_facts(run.loader_costs)
    footnotes = [one_line(str(note)) for note in diagnosis.notes]
    footnotes += describe_setup({"your settings": [run]})
    notes = Bullets(sentences=tuple(footnotes))
    return filled(
        Section(title="Where the time goes", blocks=(_time(diagnosis),)),
        Section(title="Bottlenecks", blocks=(bottleneck_table(findings),)),
        Section(title="What to do", blocks=(advice,)),
        Section(title="Your settings", blocks=(known_facts(_list_figures(diagnosis)),)),
        *rank_section(run.ranks),
        Section(title="Inside the loader: what an item costs", blocks=(known_facts(loader),)),
        Section(title="Lengths: tokens and padding", blocks=(known_facts(length_facts(run)),)),
        Section(title="Other settings, each side alone", blocks=(_curves(curves),)),
        Section(title="Notes", blocks=(notes,)),
    )


def _time(diagnosis: Diagnosis) -> Table:
    breakdown = breakdown_of(diagnosis.evidence)
    shares = breakdown.shares()
    if diagnosis.verdict == "unknown":
        named = {}
    elif diagnosis.evidence.measurement.breakdown is None:
        named = {PART_NAMES["data_wait"]: breakdown.data_wait, "all else": breakdown.compute}
    else:
        named = {PART_NAMES[part]: shares[part] for part in PARTS if shares[part].fraction > 0}
    rows = [
        (name, text_bar(part.fraction), show(part.fraction, "share"), part.source)
        for name, part in named.items()
    ]
    restart = breakdown.restart_fraction
    if restart >= _LEAST_RESTART:
        source = breakdown.data_wait.source
        rows.insert(1, ("of it at epochs' ends", text_bar(restart), show(restart, "share"), source))
    return Table(heads=("", "what", "share", MEASURED_BY), rows=tuple(rows))


def _list_figures(diagnosis: Diagnosis) -> dict[str, str]:
    evidence = diagnosis.evidence
    headroom = diagnosis.standing
    run = evidence.measurement
    rate = show(run.samples_per_s, "rate")
    kind = name_interval(evidence.run_variation, [run.window.is_held_by_device])
    interval = show_interval(*run.samples_per_s_ci, "plain_rate")
    busy = [f"{show(one.fraction, 'share')} ({one_line(one.source)})" for one in run.busy_readings]
    return {
        "settings": describe_settings(evidence.config),
        "throughput": f"{rate} ({kind}: {interval})",
        "loader alone": _ceiling(headroom.loader_ceiling, run.loader_ceiling, "its items' costs"),
        "device alone": _device_alone(diagnosis),
        "copying alone": show(headroom.copy_ceiling, "rate"),
        "host alone": show(headroom.host_ceiling, "rate"),
        "peak memory": f"{show(run.peak_memory_bytes, 'bytes')} of {show(evidence.limit_bytes, 'bytes')}",
        "busy": ", ".join(busy),
        **fullness_facts(run.fullness),
        "energy a sample": show(run.joules_per_sample, "energy"),
        **device_facts([run]),
        "exchange": "" if run.communication is None else describe_exchange(run.communication),
        **_roofline(diagnosis),
        "diagnosed in": show(diagnosis.wall_s, "duration"),
    }


def _device_alone(diagnosis: Diagnosis) -> str:
    ceiling = diagnosis.standing.device_ceiling
    measured = diagnosis.evidence.measurement.device_ceiling
    if _is_device_estimated(diagnosis):
        return f"{show(measured, 'rate')}, limited by launching (about {show(ceiling, 'rate')} by its busy time)"
    return _ceiling(ceiling, measured, "the waits for data")


def _ceiling(rate: float, measured: float | None, basis: str) -> str:
    if measured is not None:
        return show(rate, "rate")
    if not isfinite(rate):
        return _NOT_MEASURED
    return f"{_NOT_MEASURED} (about {show(rate, 'rate')} by {basis})"


def _roofline(diagnosis: Diagnosis) -> dict[str, str]:
    evidence = diagnosis.evidence
    roofline = diagnosis.evidence.curves.roofline
    if roofline is None:
        return {}
    batch = show(evidence.config.micro_batch_size / diagnosis.standing.device_ceiling, "seconds")
    estimate = " (an estimate)" if evidence.measurement.device_ceiling is None else ""
    return {
        "a batch": f"{batch} on the device{estimate}, {roofline.operators:,} operators, "
        f"{show(roofline.moved_bytes, 'bytes')} moved, {format_rate(roofline.flops / 1e9)} GFLOP",
        "the device": f"{format_rate(roofline.peak_flops_per_s / 1e9)} GFLOP/s in a large matrix product, "
        f"{format_rate(roofline.peak_bytes_per_s / 1e9)} GB/s in a large copy",
    }


def _curves(curves: Curves) -> Table:
    """Tabulate settings measured on one side alone; empty if only yours were."""
    tried = [
        (side, point) for side in SIDES for point in getattr(curves, side) if not point.is_left_out
    ]
    if not any(point.changes and point.ceiling is not None for _, point in tried):
        return tabulate(())
    return tabulate(
        {
            "": side,
            "settings": show(point.changes, "settings") or "yours",
            "samples/s": show(point.ceiling and point.ceiling.samples_per_s, "plain_rate"),
        }
        for side, point in tried
    )
