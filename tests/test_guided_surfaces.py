"""Guided searches on a recorded surface, replayed: chance in a machine's rates does not end them early."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # scripts that stand beside each other, not a package
regret = importlib.import_module("regret")
BURSTY = min(importlib.import_module("replay").SURFACES.glob("bursty-*.jsonl"))


@pytest.mark.parametrize("seed", range(2))
def test_a_lucky_window_of_a_bursty_reader_is_not_taken_for_the_best_there_is(seed: int) -> None:
    """Its windows tell little, for all that the model knows: held against the luckiest, nothing would seem worth it."""
    curve, rates = regret._run(BURSTY, ("autotune", seed)), regret._surface(BURSTY).rates()
    (_, at_the_end), *_ = regret._regrets(curve, rates)[::-1]
    assert at_the_end < 0.1
