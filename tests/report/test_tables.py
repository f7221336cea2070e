"""Bars of time and plots as tables: what a drawing shows stands in them."""

from __future__ import annotations

from autotune.messages.units import NO_VALUE, format_bytes, format_rate
from autotune.records.breakdown import PARTS, Part
from autotune.records.result import RunSummary
from autotune.records.trial import TrialRecord
from autotune.report.blocks import Paragraph, Table, TimeBar, TimeBars, bar_table, plot_blocks
from tests.factories import (
    BASELINE,
    FAST,
    make_measurement,
    make_rich_summary,
    make_summary,
    make_trial,
)
from tests.report.forms import plots_of


def table_of(summary: RunSummary, name: str) -> tuple[Table, str]:
    """A plot's table, and the words below it."""
    (plot,) = (plot for plot in plots_of(summary) if plot.name == name)
    table, words = plot_blocks(plot)
    assert isinstance(table, Table)
    assert isinstance(words, Paragraph)
    return table, words.text


def with_score(trial: TrialRecord, value: float) -> TrialRecord:
    assert trial.score is not None
    return trial.model_copy(update={"score": trial.score.model_copy(update={"value": value})})


def test_a_longer_time_is_a_longer_bar_and_shares_are_of_their_own_whole() -> None:
    slow = TimeBar(title="slow", caption="2 s", length=1.0, parts=parts_of(wait=0.6))
    fast = TimeBar(title="fast", caption="1 s", length=0.5, parts=parts_of(wait=0.2))
    table = bar_table(TimeBars(bars=(slow, fast)))
    assert table.heads == ("", "slow", "fast")
    assert [row[0] for row in table.rows] == [
        "in all",
        "waiting for data",
        "copying",
        "computing",
        "synchronising",
        "idle",
    ]
    assert table.rows[0][1:] == ("█" * 30 + " 2 s", "█" * 15 + " 1 s")
    assert table.rows[1][1:] == ("█" * 18 + " 60 %", "█" * 3 + " 20 %")
    assert table.rows[5][1:] == ("0 %", "0 %")


def parts_of(*, wait: float) -> tuple[tuple[Part, float], ...]:
    shares: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    return tuple({**shares, "data_wait": wait, "compute": 1 - wait}.items())


def test_a_rate_within_the_limit_comes_before_a_higher_one_over_it() -> None:
    over = make_trial(2, FAST, "over_memory", measurement=make_measurement(20_000.0, gib=17.0))
    table, _ = table_of(make_summary(trials=(*make_summary().trials[:2], over)), "rate-by-batch")
    assert table.rows[-1] == ("128", NO_VALUE, "12,346", "2", "1", "0")


def test_rates_by_workers_have_a_row_for_each_number_of_them() -> None:
    table, _ = table_of(make_summary(), "rate-by-workers")
    assert [row[0] for row in table.rows] == ["0", "4"]
    assert table.rows[0][1] == format_rate(5123.4)


def test_memory_is_the_highest_measured_beside_what_the_fitted_line_says() -> None:
    summary = make_summary()
    table, _ = table_of(summary, "memory")
    assert table.rows[0][1:3] == ("3.00 GiB", "2.10 GiB")
    assert table.rows[-1][:2] == ("256", NO_VALUE)
    assert table.rows[-1][2].startswith("16.9 GiB (")
    (plot,) = (plot for plot in plots_of(summary) if plot.name == "memory")
    at_batch = {x: (y, error) for x, y, error in plot.trends[0].points}
    said = (
        " ± ".join(format_bytes(round(value * 2**30)) for value in at_batch[batch])
        for batch in (32, 128, 256)
    )
    assert [row[3] for row in table.rows] == list(said)


def test_a_line_says_nothing_of_batches_beyond_its_own() -> None:
    tiny = make_trial(
        9, BASELINE.model_copy(update={"micro_batch_size": 8}), measurement=make_measurement(1000.0)
    )
    table, _ = table_of(make_summary(trials=(*make_summary().trials, tiny)), "memory")
    place = table.heads.index("fitted line, bfloat16")
    assert [row[place] == NO_VALUE for row in table.rows] == [True, False, False, False]


def test_a_limit_far_above_is_said_as_well() -> None:
    _, words = table_of(make_summary(limit_bytes=10**15), "memory")
    assert words.count("931,323 GiB") == 1


def test_the_history_has_every_trials_score_and_the_best_so_far() -> None:
    trials = make_summary().trials
    scored = [
        with_score(trial, value)
        for trial, value in zip(trials[:4], (1.0, 3.0, 2.0, 9.0), strict=True)
    ]
    table, _ = table_of(make_summary(trials=(*scored, *trials[4:])), "history")
    assert [(row[1].partition(" ")[0], row[2]) for row in table.rows[:6]] == [
        ("1.000", "1.000"),
        ("3.000", "3.000"),
        ("2.000", "3.000"),
        ("9.000", "3.000"),
        ("1.000", "3.000"),
        (NO_VALUE, "3.000"),
    ]
    assert len(table.rows) == len(trials)


def test_before_anything_counts_there_is_no_best() -> None:
    failed = make_trial(0, BASELINE, "oom", reason="no memory", violation=0.2)
    table, _ = table_of(make_summary(trials=(failed, *make_summary().trials[1:])), "history")
    assert table.rows[0] == ("0", NO_VALUE, NO_VALUE)


def test_a_long_history_keeps_its_ends_and_each_new_best_and_says_what_is_left_out() -> None:
    trials = [
        make_trial(index, BASELINE, measurement=make_measurement(1000.0)) for index in range(200)
    ]
    values = {0: 1.0, 3: 1.25, 101: 1.5}
    trials = [with_score(trial, values.get(trial.number, 0.5)) for trial in trials]
    table, words = table_of(make_summary(trials=tuple(trials), recommendation=None), "history")
    numbers = [int(row[0]) for row in table.rows]
    assert numbers == sorted(numbers)
    assert {0, 3, 101, 199} <= set(numbers)
    assert 30 <= len(numbers) <= 34
    assert table.rows[-1] == ("199", "0.500", "1.500")
    assert f"{len(numbers)} of 200" in words


def test_a_short_table_is_whole_and_does_not_say_so() -> None:
    for plot in plots_of(make_rich_summary()):
        assert table_of(make_rich_summary(), plot.name)[1].endswith(plot.caption)
