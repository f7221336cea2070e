"""Trials and their runs: of thousands those that tell most; every run of what ran more than once."""

from __future__ import annotations

from autotune.records.measurement import Interval
from autotune.records.result import RunSummary
from autotune.records.trial import Score, TrialResult
from autotune.report.blocks import filled
from autotune.report.sections import repeat_section, trial_section, trial_table
from tests.factories import (
    make_recommendation,
    make_record,
    make_summary,
    make_trials,
    run_again,
    run_once,
)
from tests.report.forms import sentences_of, table_of


def summary_of(count: int) -> RunSummary:
    """Trials whose scores fall, after a first one; each tenth one has crashed."""
    trials = [
        make_record(number, result=TrialResult(outcome="crashed", reason="boom"), score=None)
        if number % 10 == 9
        else make_record(number, score=Score(value=1.0 - number / 10_000, feasible=True))
        for number in range(count)
    ]
    return make_summary(trials=trials)


def numbers_shown(summary: RunSummary) -> list[int]:
    return [int(row[0]) for row in trial_table(summary).rows]


def sentences_on(summary: RunSummary) -> list[str]:
    return sentences_of(trial_section(summary, trial_table(summary)).blocks)


def test_many_trials_are_thinned_out() -> None:
    summary = summary_of(600)
    shown = numbers_shown(summary)
    assert len(shown) == 200
    assert shown == sorted(shown)
    assert summary.recommendation is not None
    assert {0, summary.recommendation.number, *range(1, 9)} <= {*shown}
    assert 9 in shown  # the first that failed
    assert any("200 of 600" in sentence for sentence in sentences_on(summary))


def test_few_trials_are_all_shown() -> None:
    summary = summary_of(30)
    assert numbers_shown(summary) == [*range(30)]
    assert len(sentences_on(summary)) == len(sentences_on(summary_of(600))) - 1


def test_repeated_trials_are_shown() -> None:
    trials = list(summary_of(600).trials)
    trials[598] = run_again(trials[598], 50.0)
    assert 598 in numbers_shown(make_summary(trials=trials))


def test_repeats_are_in_the_order_of_their_ends() -> None:
    first, second, *others = make_trials()
    late = first.repeats[-1].model_copy(update={"at_s": 1e4})
    first = first.model_copy(update={"results": (*first.results[:2], late)})
    table = table_of(repeat_section(make_summary(trials=(first, second, *others))))
    places = [(row[0], row[1]) for row in table.rows]
    assert places[-1] == ("3", "0")
    assert places.index(("2", "0")) < places.index(("2", "1")) < places.index(("3", "1"))
    assert len(places) == 9


def test_trials_that_ran_once_are_no_repeats() -> None:
    measured = Interval(value=2.5, low=2.4, high=2.6)
    summary = make_summary(
        trials=run_once(make_trials()),
        recommendation=make_recommendation(measured_speedup=measured),
    )
    assert filled(repeat_section(summary)) == ()


def test_each_repeat_says_how_it_ended() -> None:
    first, *others = make_trials()
    over = TrialResult(
        outcome="over_memory", reason="too much", measurement=first.measurement, at_s=1e4
    )
    again = run_again(first, None).with_run(over)
    table = table_of(repeat_section(make_summary(trials=(again, *others))))
    place = table.heads.index("outcome")
    ended = {(row[0], row[1]): row[place] for row in table.rows}
    assert (ended["1", "0"], ended["4", "0"], ended["5", "0"]) == (
        "ok",
        "crashed",
        "over the limit",
    )


def test_refuted_trial_is_marked() -> None:
    first, second, *others = make_trials()
    table = trial_table(
        make_summary(trials=(first, second, run_again(others[0], None), *others[1:]))
    )
    assert table.row_kinds[:3] == ("baseline", "recommended", "failed")
    assert table.rows[2][-1].endswith("ValueError: no")
    assert table.rows[1][-1] == ""
