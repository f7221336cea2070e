"""A report of thousands of trials shows those that tell most, and says how many it leaves out."""

from __future__ import annotations

from autotune.records.run_summary import RunSummary
from autotune.records.trial import Score, TrialResult
from autotune.report.sections.trials import trial_section, trial_table
from tests.factories import make_record, make_summary
from tests.report.forms import sentences_of


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


def test_of_many_trials_the_named_the_best_and_failures_are_shown_in_their_order() -> None:
    summary = summary_of(600)
    shown = numbers_shown(summary)
    assert len(shown) == 200
    assert shown == sorted(shown)
    assert summary.recommendation is not None
    assert {0, summary.recommendation.number, *range(1, 9)} <= {*shown}
    assert 9 in shown  # the first that failed
    assert any("200 of 600" in sentence for sentence in sentences_on(summary))


def test_of_few_trials_each_is_shown_and_nothing_is_said_of_it() -> None:
    summary = summary_of(30)
    assert numbers_shown(summary) == [*range(30)]
    assert len(sentences_on(summary)) == len(sentences_on(summary_of(600))) - 1
