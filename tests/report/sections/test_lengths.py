"""Rates in tokens beside samples, and padding, wherever batches have lengths; not a word where they have none."""

from __future__ import annotations

import json
from typing import Any

from autotune.analysis.decisions.run_spread import assumed_spread
from autotune.report.figures import Figures, join_runs
from autotune.report.sections.lengths import length_facts, length_section, padding_of
from tests.factories import make_measurement
from tests.report.cases import LENGTHS, TOKENS


def figures(**measured: Any) -> Figures:
    return join_runs([make_measurement(100.0, **measured)], assumed_spread("cpu"))


def test_the_batches_own_mask_tells_before_the_items_do() -> None:
    assert padding_of(figures(tokens=TOKENS, lengths=LENGTHS)) == 0.4
    unmasked = TOKENS.model_copy(update={"padding": None})
    assert padding_of(figures(tokens=unmasked, lengths=LENGTHS)) == 0.39
    assert padding_of(figures(tokens=unmasked)) is None


def test_without_lengths_nothing_is_shown() -> None:
    assert length_facts(figures()) == {}
    section = length_section({"baseline": figures()})
    assert [block for block in section.blocks if getattr(block, "rows", ()) or getattr(block, "sentences", ())] == []


def test_figures_of_tokens_are_part_of_the_document() -> None:
    found = json.loads(figures(tokens=TOKENS).model_dump_json())
    assert found["tokens_per_s"] == 5000.0
    assert found["tokens"]["padding"] == 0.4
