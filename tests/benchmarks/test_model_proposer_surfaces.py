"""Guided searches on recorded surfaces, replayed: neither chance nor other trials end them early."""

from __future__ import annotations

import pytest

from benchmarks.replay.methods import METHODS
from benchmarks.replay.replay import SURFACES, read_surface


def regrets(name: str, seed: int) -> list[float]:
    """How far what a search would recommend after each trial lies under the best of the surface."""
    path = min(SURFACES.glob(f"{name}-*.jsonl"))
    surface = read_surface(path)
    return [surface.truth.regret(step.recommended) for step in METHODS["autotune"](surface, seed).steps]


@pytest.mark.parametrize("seed", range(2))
def test_a_lucky_window_of_a_bursty_reader_is_not_taken_for_the_best_there_is(seed: int) -> None:
    """Its windows tell little, for all that the model knows: held against the luckiest, nothing would seem worth it."""
    assert regrets("bursty", seed)[-1] < 0.05, "its best is known to 4 %"


@pytest.mark.parametrize("name", ["bursty", "sleeping_vectors"])
@pytest.mark.parametrize("seed", [0, 5])
def test_what_promises_most_is_tried_although_others_brought_nothing(name: str, seed: int) -> None:
    """Trials of the sampler and at the user's own batch said that it was time to end, a fifth under the best."""
    assert min(regrets(name, seed)) < 0.15
