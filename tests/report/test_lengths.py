"""Rates in tokens beside samples, and padding, wherever batches have lengths; not a word where they have none."""

from __future__ import annotations

from typing import Any

from autotune.records.measurement import Measurement
from autotune.report.sections import length_facts, length_section, padding_of
from tests.factories import make_measurement
from tests.report.cases import LENGTHS, TOKENS


def figures(**measured: Any) -> Measurement:
    return make_measurement(100.0, **measured)


def test_padding_is_of_the_mask_first() -> None:
    assert padding_of(figures(tokens=TOKENS, lengths=LENGTHS)) == 0.4
    unmasked = TOKENS.model_copy(update={"padding": None})
    assert padding_of(figures(tokens=unmasked, lengths=LENGTHS)) == 0.39
    assert padding_of(figures(tokens=unmasked)) is None


def test_without_lengths_nothing_is_shown() -> None:
    assert length_facts(figures()) == {}
    section = length_section({"baseline": figures()})
    assert [
        block
        for block in section.blocks
        if getattr(block, "rows", ()) or getattr(block, "sentences", ())
    ] == []
