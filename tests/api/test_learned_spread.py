"""What a search has learned of the spread between runs is kept, unless other programs have made it."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.api import search as api
from autotune.records.run_spread import RunSpread
from tests.factories import make_confirmation, make_recommendation, make_summary
from tests.report.cases import loaded


@pytest.mark.parametrize(
    ("others_cores", "source", "is_kept"),
    [(0.0, "workload", True), (1.0, "workload", False), (0.0, "assumed", False)],
)
def test_a_spread_is_kept_where_it_is_the_workloads_own(
    monkeypatch: pytest.MonkeyPatch, others_cores: float, source: Any, is_kept: bool
) -> None:
    kept: list[RunSpread] = []
    monkeypatch.setattr(api, "remember_spread", lambda _, __, spread: kept.append(spread))
    spread = RunSpread(sd=0.02, degrees_of_freedom=9.0, source=source)
    summary = loaded(others_cores, others_cores).model_copy(update={"run_spread": spread})
    api._remember_spread("machine", "work", summary)
    assert kept == ([spread] if is_kept else [])


@pytest.mark.parametrize(("rounds", "is_kept"), [(2, False), (3, True)])
def test_a_spread_that_rests_on_a_few_rounds_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, rounds: int, is_kept: bool
) -> None:
    kept: list[RunSpread] = []
    monkeypatch.setattr(api, "remember_spread", lambda _, __, spread: kept.append(spread))
    entrants = [make_confirmation(number, *[100.0] * rounds) for number in (0, 1)]
    spread = RunSpread(sd=0.02, degrees_of_freedom=9.0, source="workload")
    summary = make_summary(run_spread=spread, recommendation=make_recommendation(confirmations=tuple(entrants)))
    api._remember_spread("machine", "work", summary)
    assert bool(kept) == is_kept


def test_what_runs_of_the_device_alone_have_taught_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[RunSpread] = []
    monkeypatch.setattr(api, "remember_spread", lambda _, __, spread: kept.append(spread))
    device = RunSpread(sd=0.002, degrees_of_freedom=9.0, source="workload")
    spread = RunSpread(sd=0.08, degrees_of_freedom=3.0, device=device)
    api._remember_spread("machine", "work", make_summary(run_spread=spread))
    assert kept == [spread]
