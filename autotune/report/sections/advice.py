"""A diagnosis' codes with their words filled in, and advice as a table.

Comes in: a Diagnosis, a Finding's or a group's bottleneck, or Advice, as codes with figures. Goes out: the same with
sentences, or a Table.
"""

from __future__ import annotations

from collections.abc import Iterable

from autotune.diagnosis.scaling_bottlenecks import ScalingBottleneck
from autotune.messages.units import show
from autotune.records.diagnosis import Advice, Diagnosis, Finding
from autotune.report.blocks import Table, tabulate
from autotune.report.wording.catalogue import fill
from autotune.report.wording.say import say

__all__ = ["advice_in_words", "advice_table", "bottleneck_table", "diagnosis_in_words", "say_group_evidence"]


def diagnosis_in_words(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with its headline, evidence, advice and notes in sentences."""
    words = {
        "headline": " ".join(map(say, diagnosis.headline_notes)),
        "findings": tuple(map(_finding_in_words, diagnosis.findings)),
        "advice": tuple(map(advice_in_words, diagnosis.advice)),
        "notes": tuple(map(say, diagnosis.remarks)),
    }
    return diagnosis.model_copy(update=words)


def advice_in_words(advice: Advice) -> Advice:
    """The advice with its text and basis."""
    figures = {**advice.figures, "settings": advice.settings}
    words = {"text": fill(advice.kind, figures), "basis": fill(f"{advice.kind}_basis", figures)}
    return advice.model_copy(update=words)


def say_group_evidence(bottleneck: ScalingBottleneck) -> str:
    """The figures that show a group's bottleneck, in a sentence without its full stop."""
    return fill(f"{bottleneck.cause}_evidence", bottleneck.figures)


def advice_table(advice: Iterable[Advice], *, is_loaded: bool = False) -> Table:
    """Lay out advice: its gain, the rate that it should reach, what to do and the basis.

    Args:
        advice: With its words.
        is_loaded: Other programs held the measurements up: gains and rates are left out, which may be their doing.
    """
    rows = (
        {
            "gain": show(piece.expected_gain, "gain"),
            "samples/s": show(piece.expected_samples_per_s, "plain_rate"),
            "advice": f"{piece.text}. Basis: {piece.basis}.",
        }
        for piece in advice
    )
    return tabulate(rows, heads=("advice",) if is_loaded else ())


def bottleneck_table(found: Iterable[tuple[float, str, str]]) -> Table:
    """Bottlenecks: the share of the time that each takes, its name, and the figures that show it."""
    rows = tuple((show(share, "share"), name, evidence) for share, name, evidence in found)
    return Table(heads=("share", "what", "evidence"), rows=rows)


def _finding_in_words(finding: Finding) -> Finding:
    figures = {**finding.figures, "share": finding.share}
    return finding.model_copy(update={"evidence": fill(f"{finding.bottleneck}_evidence", figures)})
