from __future__ import annotations

import pytest

from autotune.records.trial import Outcome, TrialRecord, TrialResult
from autotune.tuning.entrant import Entrant, hung_among
from tests.factories import make_record


def entrant(number: int, *outcomes: Outcome) -> Entrant:
    return Entrant(make_record(number), [ended(number, outcome) for outcome in outcomes])


def ended(number: int, outcome: Outcome) -> TrialRecord:
    if outcome == "ok":
        return make_record(number)
    return make_record(number, result=TrialResult(outcome=outcome, reason="as it is told"), score=None)


@pytest.mark.parametrize(
    ("outcomes", "may_win"),
    [
        (["ok", "ok"], True),
        (["timeout"], True),
        (["timeout", "timeout"], True),
        (["ok", "crashed"], False),
        (["oom"], False),
    ],
)
def test_what_fails_can_not_win(outcomes: list[Outcome], may_win: bool) -> None:
    one = entrant(1, *outcomes)
    assert one.is_feasible == may_win
    assert one.confirmation(is_hung=False).is_feasible == may_win
    assert not one.confirmation(is_hung=True).is_feasible


@pytest.mark.parametrize(
    ("entrants", "hung"),
    [
        ([entrant(0, "ok", "ok"), entrant(1, "timeout", "timeout"), entrant(2, "ok", "timeout")], {1}),
        ([entrant(0, "ok", "ok", "ok"), entrant(1, "ok", "timeout", "timeout")], {1}),
        ([entrant(0, "timeout", "timeout"), entrant(1, "ok", "ok")], set()),
        ([entrant(0, "timeout", "timeout"), entrant(1, "timeout", "timeout")], set()),
        ([entrant(0, "timeout", "timeout"), entrant(1, "ok", "timeout", "timeout")], set()),
        ([entrant(0, "ok"), entrant(1, "timeout")], set()),
        ([entrant(0)], set()),
    ],
)
def test_what_runs_into_its_deadline_twice_hangs_unless_the_machine_does(
    entrants: list[Entrant], hung: set[int]
) -> None:
    assert hung_among(entrants) == hung
