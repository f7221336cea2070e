"""Rates in tokens beside samples, and padding, wherever batches have lengths; not a word where they have none."""

from __future__ import annotations

import json
from typing import Any

from autotune.analysis.decisions.run_spread import assumed_spread
from autotune.records.lengths import BucketForecast, Lengths, PackForecast, Tokens
from autotune.report.figures import Figures, join_runs
from autotune.report.sections.lengths import length_facts, length_section, padding_of
from autotune.report.wording.units import NO_VALUE
from tests.factories import make_measurement

TOKENS = Tokens(per_sample=50.0, relative_sd=0.02, batches=90, shortest=20, longest=80, padding=0.4)
BUCKETS = BucketForecast(
    pool_batches=50, random_padding=0.42, bucket_padding=0.05, device_time=0.6, device_time_ci=(0.5, 0.7)
)
LENGTHS = Lengths(items=500, mean=30.0, median=25.0, longest=90, batch_samples=32, padding=0.39, buckets=BUCKETS)


def figures(**measured: Any) -> Figures:
    return join_runs([make_measurement(100.0, **measured)], assumed_spread("cpu"))


def test_rates_are_told_in_tokens_with_their_padding() -> None:
    facts = length_facts(figures(tokens=TOKENS, lengths=LENGTHS))
    assert facts["tokens/s"] == "5,000"
    assert facts["padding"] == "40 %"
    assert facts["device time of like lengths"] == "60 % of today's (50 % to 70 %)"


def test_full_rows_stand_beside_batches_of_like_lengths_where_they_were_forecast() -> None:
    rows = PackForecast(row_tokens=90, samples_per_row=2.9, padding=0.02, device_time=0.5, device_time_ci=(0.4, 0.6))
    facts = length_facts(figures(tokens=TOKENS, lengths=LENGTHS.model_copy(update={"packed": rows})))
    assert facts["padding of full rows"] == "2.0 %"
    assert facts["device time of full rows"] == "50 % of today's (40 % to 60 %)"
    without = length_facts(figures(tokens=TOKENS, lengths=LENGTHS))
    assert {without[f"{name} of full rows"] for name in ("padding", "device time")} == {NO_VALUE}


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
