from __future__ import annotations

import pytest

from autotune.records.trial import Outcome, TrialRecord, TrialResult
from autotune.tuning.entrant import Entrant
from tests.factories import make_record


def ended(outcome: Outcome) -> TrialRecord:
    if outcome == "ok":
        return make_record()
    return make_record(result=TrialResult(outcome=outcome, reason="as it is told"), score=None)


@pytest.mark.parametrize(
    ("outcomes", "may_win"),
    [
        (["ok", "ok"], True),
        (["timeout"], True),
        (["ok", "timeout", "ok"], True),
        (["timeout", "timeout"], False),
        (["ok", "timeout", "timeout"], False),
        (["ok", "crashed"], False),
        (["oom"], False),
    ],
)
def test_what_fails_or_runs_into_its_deadline_twice_can_not_win(outcomes: list[Outcome], may_win: bool) -> None:
    entrant = Entrant(make_record(), [*map(ended, outcomes)])
    assert entrant.is_feasible == may_win
    assert entrant.confirmation().is_feasible == may_win
