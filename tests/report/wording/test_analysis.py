"""The sentences for what the analysis notes."""

from __future__ import annotations

import pytest

from autotune.note import note
from autotune.report.wording import say

MIB = 2**20


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("largest_batch_of_limit", "The largest micro batch that the limit of 1,000 MiB allows is 64"),
        ("largest_batch_of_space", "The largest micro batch of the space, 64, stays within 1,000 MiB"),
        ("largest_batch_that_ran", "The largest micro batch that ran within 1,000 MiB is 64"),
    ],
)
def test_the_largest_batch_stands_beside_its_prediction_where_there_is_one(code: str, sentence: str) -> None:
    figures = {"micro_batch_size": 64, "limit_bytes": 1000 * MIB, "peak_bytes": 456 * MIB}
    alone = note(code, **figures, predicted_bytes=None, error_bytes=None)
    assert say(alone) == f"{sentence} (measured peak: 456 MiB)."
    predicted = note(code, **figures, predicted_bytes=450.0 * MIB, error_bytes=9.0 * MIB)
    assert say(predicted) == f"{sentence} (measured peak: 456 MiB; predicted from other batches: 450 MiB ± 9.00 MiB)."


def test_a_trial_that_was_stopped_early_is_compared_to_its_threshold() -> None:
    reason = note(
        "stopped_early", samples_per_s=500.0, half_width=6.4, threshold_number=3, threshold_samples_per_s=1_000.0
    )
    assert say(reason) == "stopped early: 500 ± 6 samples/s are below the 1,000 that it takes to compete with trial 3"
