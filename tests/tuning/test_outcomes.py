"""What the stages hand on: trials teach the spread where rounds are too few to tell it, and there alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.testing import FakeLauncher
from autotune.tuning.outcomes import has_few_rounds
from tests.factories import make_confirmation
from tests.factories.searches import NARROW, make_search


@pytest.mark.parametrize(("rounds", "learned"), [(1, 2.0), (2, 2.0), (3, 0.0)])
def test_trials_and_the_runs_that_confirm_them_teach_the_spread_of_few_rounds(
    tmp_path: Path, rounds: int, learned: float
) -> None:
    search = make_search(tmp_path, FakeLauncher(), **NARROW)
    search.run()
    found = search.outcome()
    numbers = [record.number for record in found.records if record.is_feasible][:2]
    entrants = [make_confirmation(number, *[100.0] * rounds) for number in numbers]
    taught = found.taught_by(entrants)
    assert taught.spread.degrees_of_freedom == found.spread.degrees_of_freedom + learned
    assert all(has_few_rounds(entrant) == (learned > 0) for entrant in entrants)
    assert taught.prior_spread == found.prior_spread
