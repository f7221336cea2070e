"""What a sample is worth in a batch."""

from __future__ import annotations

from math import inf

import pytest

from autotune.space.efficiency import efficiency


@pytest.mark.parametrize(
    ("scale", "batch", "other", "expected"),
    [
        (0.0, 32, 128, 0.25),
        (32.0, 32, 128, 0.4),
        (1e12, 32, 128, 1.0),
        (inf, 32, 128, 1.0),
        (32.0, 128, 32, 2.5),
        (7.0, 32, 32, 1.0),
    ],
    ids=["without noise", "as much as the batch", "much noise", "noise alone", "a smaller batch", "the same batch"],
)
def test_the_more_noise_there_is_the_more_a_sample_of_a_larger_batch_is_worth(
    scale: float, batch: int, other: int, expected: float
) -> None:
    assert efficiency(scale, batch, other) == pytest.approx(expected)
