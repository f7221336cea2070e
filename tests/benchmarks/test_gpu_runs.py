"""Replays of recorded GPU runs: equals of the best are rarely stopped, and large gains of two runs are proven."""

from __future__ import annotations

import pytest

from benchmarks.gpu_runs import count_stops, judge, totals
from benchmarks.replay.gpu_runs import RecordedSearch, read_runs_alike, read_searches

SEARCHES = {search.name: search for search in read_searches()}


def test_what_is_as_good_as_the_best_within_5_percent_is_hardly_ever_stopped() -> None:
    """All that is still stopped are runs of a baseline and of ResNet-50 that differ by more than a fifth."""
    rows = [row for runs in read_runs_alike(list(SEARCHES.values())) for row in count_stops(runs)]
    found = totals(rows)
    assert [found[f"device, {share}"]["now"] for share in ("100%", "95%")] == [0, 0]
    assert found["device, 95%"]["before"] >= 20
    for share in ("100%", "95%"):
        assert found[f"host, {share}"]["before"] >= 0.1 * found[f"host, {share}"]["pairs"]
        assert found[f"host, {share}"]["now"] <= 0.02 * found[f"host, {share}"]["pairs"]


@pytest.mark.parametrize(
    ("name", "least"),
    [("H200, starved, linear", 9.0), ("H100, starved, linear", 20.0), ("H100, gpt2", 9.0)],
)
def test_a_gain_of_nine_times_in_two_runs_of_each_is_proven(name: str, least: float) -> None:
    found = judge(SEARCHES[name])
    assert (found["verdict_then"], found["verdict"]) == ("unconfirmed", "faster")
    value, low, _ = found["measured"]
    assert value > least
    assert low > 0.75 * value


def test_a_gain_of_a_quarter_in_two_runs_of_each_stays_unproven_where_runs_differ_by_8_percent() -> (
    None
):
    assert judge(SEARCHES["H200, precision_guard, healthy"])["verdict"] == "unconfirmed"


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_what_was_proven_stays_proven(search: RecordedSearch) -> None:
    if search.verdict == "faster":
        assert judge(search)["verdict"] == "faster"


def test_what_is_proven_ran_twice_as_did_the_baseline() -> None:
    assert "proven" in judge(SEARCHES["H200, starved, linear"])["reasons"]
    assert [len(record.runs) for record in SEARCHES["H200, starved, linear"].records][:3] == [
        2,
        1,
        2,
    ]
