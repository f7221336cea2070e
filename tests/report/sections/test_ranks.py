"""Several devices in every form of the report: the answer, what holds the group, each rank's own figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.records.run_summary import RunSummary
from autotune.report.blocks import Bullets, Paragraph, Section, Table, filled
from autotune.report.sections import ranks as sections_of_ranks
from autotune.report.sections.ranks import rank_section
from autotune.report.wording.remarks import describe_exchange
from autotune.report.wording.units import NO_VALUE
from autotune.settings.training_config import TrainingConfig
from tests.factories import (
    BASELINE,
    FAST,
    GROUP,
    TALK,
    make_group_summary,
    make_measurement,
    make_rank,
    make_recommendation,
    make_summary,
    make_trial,
)
from tests.report.forms import as_markdown, as_page, columns_of, on_console
from tests.report.render.test_html import Reader
from tests.report.render.test_terminal import assert_fits, row_of

ANSWER = (
    "Yes, the second device helps: ddp × 2 trains 1.66 times as fast as one device "  # noqa: RUF001 - a times sign
    "(interval: 1.63 to 1.69), 83 % of 2 times. Main bottleneck: communication, 18 % of its time."
)


def scaling_sections(summary: RunSummary) -> tuple[Section, ...]:
    return filled(*sections_of_ranks.scaling_sections(summary, columns_of(summary)))


def say_answer(summary: RunSummary) -> str:
    block = scaling_sections(summary)[0].blocks[0]
    assert isinstance(block, Paragraph)
    return block.text


def table_of(section: Section) -> Table:
    return next(block for block in section.blocks if isinstance(block, Table))


def sentences_of(section: Section) -> str:
    return " ".join(sentence for block in section.blocks if isinstance(block, Bullets) for sentence in block.sentences)


def unconfirmed(rate: float, config: TrainingConfig = GROUP, **measured: Any) -> RunSummary:
    """The baseline at 1,000 samples/s against a group, each measured once; the baseline is recommended."""
    trials = (
        make_trial(0, BASELINE, measurement=make_measurement(1000.0)),
        make_trial(1, config, measurement=make_measurement(rate, **measured)),
    )
    own = {"config": BASELINE, "number": 0, "verdict": "already_best", "confirmations": ()}
    return make_summary(trials=trials, recommendation=make_recommendation(**own))


def test_the_answer_stands_with_its_interval_and_its_reason_in_every_form(tmp_path: Path) -> None:
    summary = make_group_summary()
    assert say_answer(summary) == ANSWER
    assert ANSWER in " ".join(on_console(summary, tmp_path).split())
    assert ANSWER in as_markdown(summary, tmp_path)
    assert ANSWER in Reader(as_page(summary, tmp_path).html).text


def test_one_device_asks_no_question(tmp_path: Path) -> None:
    assert scaling_sections(make_summary()) == ()
    assert "Do more devices help?" not in on_console(make_summary(), tmp_path)


def test_strategies_stand_side_by_side_with_efficiency_and_exchange() -> None:
    first = scaling_sections(make_group_summary())[0]
    nothing = (NO_VALUE,) * 5
    assert table_of(first).rows == (
        ("one device", "12,300", "11,920 to 12,691", NO_VALUE, NO_VALUE, NO_VALUE),
        ("dp × 2", "11,000", "10,586 to 11,431", "45 % (43 to 46)", NO_VALUE, NO_VALUE),  # noqa: RUF001 - a times sign
        ("ddp × 2", "20,399", "19,770 to 21,049", "83 % (81 to 85)", "20 %", "69 %"),  # noqa: RUF001 - a times sign
        ("ddp × 4", *nothing),  # noqa: RUF001 - a times sign
    )
    assert table_of(first).row_kinds == ("", "", "recommended", "failed")
    said = sentences_of(first)
    assert "one device: trial 1, chosen from 2, 3 runs in turns;" in said
    assert "ddp × 4: none of 1 ran well." in said  # noqa: RUF001 - a times sign


def test_what_holds_the_group_and_what_would_help_stand_with_their_figures() -> None:
    _, holds, helps, _ = scaling_sections(make_group_summary())
    assert holds.title == "Bottlenecks of ddp × 2"  # noqa: RUF001 - a times sign
    assert table_of(holds).rows[0][:2] == ("18 %", "communication")
    assert "exchanging 22.0 MiB of gradients makes a step 2.5 ms longer" in table_of(holds).rows[0][2]
    gain, _, text = table_of(helps).rows[0]
    assert gain == "+19 %"
    assert text.startswith("Set grad_accum_steps=8: 8 times the samples for each exchange")
    assert text.endswith("Basis: an exchange adds 2.5 ms to a step of 10 ms, and peak memory is 60 % of the limit.")


def test_each_ranks_own_figures_stand_in_a_row_and_the_uneven_one_is_named() -> None:
    *_, ranks = scaling_sections(make_group_summary())
    assert ranks.title == "Each rank of ddp × 2"  # noqa: RUF001 - a times sign
    assert table_of(ranks).rows == (
        ("0", "cuda:0", "30,000", "12,800", "3.4 %", "97 %", "9.60 GiB"),
        ("1", "cuda:1", "15,000", "12,800", "3.4 %", "97 %", "9.60 GiB"),
    )
    assert sentences_of(ranks).startswith("Rank 1 (cuda:1) is uneven: its loader alone gives 50")
    assert sentences_of(ranks).endswith("That does not limit the group here.")


def test_an_uneven_rank_that_sets_the_pace_is_what_holds_the_group() -> None:
    slow = (make_rank(0, device_ceiling=20_000.0), make_rank(1, device_ceiling=12_800.0))
    sections = scaling_sections(make_group_summary(ranks=slow))
    assert "rank 1 (cuda:1): its device alone gives 64" in str(table_of(sections[1]).rows)
    assert "does not limit the group" not in sentences_of(sections[-1])


def test_figures_of_a_rank_that_were_not_measured_have_no_value() -> None:
    (section,) = rank_section((make_rank(0, loader_ceiling=None, device_ceiling=None, busy_fraction=None),))
    assert table_of(section).rows == (("0", "cuda:0", NO_VALUE, NO_VALUE, "3.4 %", NO_VALUE, "9.60 GiB"),)
    assert sentences_of(section) == ""
    assert rank_section(()) == ()


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (2000.0, "Yes, the second device helps: "),
        (1000.0, "Not measurably: "),
        (800.0, "No, the second device does not help: "),
    ],
)
def test_each_verdict_is_said(rate: float, said: str) -> None:
    text = say_answer(unconfirmed(rate))
    assert text.startswith(said)
    assert ("None of the measured figures explains what limits it." in text) == (rate < 1900)


def test_more_than_two_devices_are_counted() -> None:
    four = GROUP.model_copy(update={"world_size": 4})
    assert say_answer(unconfirmed(3900.0, four)).startswith("Yes, 4 devices help: ddp × 4 ")  # noqa: RUF001 - a times sign
    assert say_answer(unconfirmed(900.0, four)).startswith("No, 4 devices do not help: ")


def test_an_interval_without_an_end_is_unknown() -> None:
    vague = unconfirmed(1050.0, noise=float("inf"))
    assert say_answer(vague).startswith("Not measurably: ")
    assert table_of(scaling_sections(vague)[0]).rows[1][2] == "unknown"


def test_what_was_refuted_is_no_answer() -> None:
    summary = make_group_summary()
    assert summary.recommendation is not None
    found = summary.recommendation.model_copy(update={"overloaded": (2, 3), "config": FAST, "number": 1})
    refuted = summary.model_copy(update={"recommendation": found})
    assert say_answer(refuted) == "Not known: no trial with more than one device ran well (3 trials)."
    assert len(scaling_sections(refuted)) == 1


def test_without_one_device_nothing_can_be_compared() -> None:
    summary = make_group_summary()
    groups = tuple(trial for trial in summary.trials if trial.number >= 2)
    assert say_answer(summary.model_copy(update={"trials": groups})).startswith("Not known: no trial on one device ")


def test_where_one_device_is_recommended_the_fastest_groups_ranks_are_shown() -> None:
    *_, ranks = scaling_sections(unconfirmed(800.0, ranks=(make_rank(0), make_rank(1))))
    assert ranks.title == "Each rank of ddp × 2"  # noqa: RUF001 - a times sign
    assert len(table_of(ranks).rows) == 2


def test_differences_beside_the_devices_are_told() -> None:
    said = sentences_of(scaling_sections(unconfirmed(800.0))[0])
    assert "also differs from the best single device in micro_batch_size, amp_dtype, num_workers," in said
    assert "strategy" not in said


def test_many_ranks_and_large_rates_fit_80_columns(tmp_path: Path) -> None:
    ranks = tuple(make_rank(number, loader_ceiling=9_876_543.0, device_ceiling=8_765_432.0) for number in range(16))
    config = GROUP.model_copy(update={"world_size": 16})
    summary = unconfirmed(9_123_456.0, config, ranks=ranks, communication=TALK)
    text = on_console(summary, tmp_path)
    assert_fits(text)
    assert "9,123,456" in text
    assert "8,765,432" in text
    assert "…" not in text


def test_the_settings_of_the_group_stand_in_the_result(tmp_path: Path) -> None:
    text = on_console(make_group_summary(), tmp_path)
    assert row_of(text, "strategy")[1:] == ["single", "ddp"]
    assert row_of(text, "world_size")[1:] == ["1", "2"]
    assert row_of(text, "global batch")[2:] == ["32", "256"]
    assert row_of(text, "ddp  ")[1] == NO_VALUE
    assert "comm_hook=bf16" in text


def test_talking_to_other_ranks_stands_with_where_the_time_goes(tmp_path: Path) -> None:
    said = describe_exchange(TALK)
    assert said == (
        "exchanging gradients makes a step 2.5 ms longer (20 % of it); 69 % of an exchange (8 ms by itself) is hidden"
    )
    time = as_markdown(make_group_summary(), tmp_path).partition("## Where the time goes")[2]
    assert f"recommended: {said}, counted as synchronising." in time.partition("## ")[0]


def test_a_baseline_on_several_devices_is_spoken_of_in_the_plural(tmp_path: Path) -> None:
    summary = make_group_summary(baseline=GROUP)
    known = {"loader_ceiling": 60_000.0, "device_ceiling": 25_600.0}
    own = make_trial(0, GROUP, measurement=make_measurement(20_000.0, **known))
    found = make_recommendation(config=GROUP, number=0, verdict="already_best", confirmations=())
    text = on_console(summary.model_copy(update={"trials": (own,), "recommendation": found}), tmp_path)
    assert "of what these 2 devices can do" in " ".join(text.split())
