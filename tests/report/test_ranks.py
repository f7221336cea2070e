"""Several devices: which of them are compared, which ranks are shown, and that it fits the console."""

from __future__ import annotations

from pathlib import Path

from autotune.messages.units import NO_VALUE
from autotune.records.result import RunSummary
from autotune.report import sections as sections_of_ranks
from autotune.report.blocks import Section, filled
from autotune.report.sections import rank_section
from tests.factories import GROUP, TALK, make_group_summary, make_rank, make_summary
from tests.report.cases import group_cases, one_against
from tests.report.forms import as_markdown, as_page, columns_of, on_console, sentences_of, table_of
from tests.report.test_html import Reader
from tests.report.test_terminal import assert_fits


def scaling_sections(summary: RunSummary) -> tuple[Section, ...]:
    return filled(*sections_of_ranks.scaling_sections(summary, columns_of(summary)))


def test_the_answer_stands_in_every_form(tmp_path: Path) -> None:
    summary = make_group_summary()
    answer = sentences_of(scaling_sections(summary)[0].blocks)[0]
    assert answer in " ".join(on_console(summary, tmp_path).split())
    assert answer in as_markdown(summary, tmp_path)
    assert answer in Reader(as_page(summary, tmp_path).html).text


def test_one_device_asks_no_question() -> None:
    assert scaling_sections(make_summary()) == ()


def test_strategies_are_side_by_side() -> None:
    table = table_of(scaling_sections(make_group_summary())[0])
    assert table.row_kinds == ("", "", "recommended", "failed")
    assert table.rows[3][1:] == (NO_VALUE,) * 6


def test_unmeasured_figures_have_no_column() -> None:
    (section,) = rank_section(
        (make_rank(0, loader_ceiling=None, device_ceiling=None, busy_fraction=None),)
    )
    assert table_of(section).rows == (("0", "cuda:0", "3.4 %", "9.60 GiB"),)
    assert sentences_of(section.blocks) == []
    assert rank_section(()) == ()


def test_an_interval_without_an_end_is_unknown() -> None:
    vague = one_against(1050.0, noise=float("inf"))
    assert table_of(scaling_sections(vague)[0]).rows[1][3] == "unknown"


def test_what_was_refuted_is_no_answer() -> None:
    assert len(scaling_sections(group_cases()["all refuted"])) == 1


def test_ranks_are_the_fastest_groups() -> None:
    *_, ranks = scaling_sections(one_against(800.0, ranks=(make_rank(0), make_rank(1))))
    assert len(table_of(ranks).rows) == 2


def test_many_ranks_fit_80_columns(tmp_path: Path) -> None:
    ranks = tuple(
        make_rank(number, loader_ceiling=9_876_543.0, device_ceiling=8_765_432.0)
        for number in range(16)
    )
    config = GROUP.model_copy(update={"world_size": 16})
    summary = one_against(9_123_456.0, config, ranks=ranks, communication=TALK)
    text = on_console(summary, tmp_path)
    assert_fits(text)
    assert "9,123,456" in text
    assert "8,765,432" in text
    assert "…" not in text
