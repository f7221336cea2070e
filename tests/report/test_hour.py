"""An hour of training: which parts have a row, and what a row shows in the space that it has."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from autotune.records.watched_run import RunShare
from autotune.report.blocks import Bullets
from autotune.report.hour import hour_lines, hour_rows, hour_section
from tests.report.cases import diagnosis_cases, make_share

CASES = diagnosis_cases()


def test_parts_below_one_per_cent_are_one_row() -> None:
    shares = [make_share("copy", 0.004), make_share("forward", 0.99), make_share("other", 0.006)]
    large, rest = hour_rows(shares)
    assert (large.fraction, large.is_sum) == (0.99, False)
    assert rest.fraction == pytest.approx(0.01)
    assert rest.is_sum


def test_a_single_small_part_keeps_its_row() -> None:
    rows = hour_rows([make_share("forward", 0.995), make_share("copy", 0.005, place="train.py:3")])
    assert [(row.is_sum, row.place) for row in rows] == [(False, ""), (False, "train.py:3")]


def test_largest_share_comes_first_and_empty_parts_are_left_out() -> None:
    shares = [make_share("startup", 0.2), make_share("copy", 0.0), make_share("forward", 0.8)]
    assert [row.fraction for row in hour_rows(shares)] == [0.8, 0.2]


@pytest.mark.parametrize(
    ("share", "interval"),
    [
        (make_share("forward", 0.5), ""),
        (make_share("forward", 0.5, (0.495, 0.505)), ""),
        (make_share("forward", 0.5, (0.4, 0.6)), "40 to 60 %"),
        (make_share("checkpoint", 0.5, (0.494, 0.512), seen=9), "49 to 51 %"),
        (make_share("checkpoint", 0.5, (0.499, 0.501), seen=9), ""),
        (make_share("checkpoint", 0.05, (0.0005, 0.2), seen=1), "<0.1 to 20 %"),
    ],
)
def test_interval_is_shown_if_it_is_wider_than_the_figure(share: RunShare, interval: str) -> None:
    assert hour_rows([share])[0].interval == interval


@pytest.mark.parametrize(
    ("seen", "period", "recurs"),
    [
        (None, "", ""),
        (9, "every 5 steps", "every 5 steps"),
        (1, "each epoch", "each epoch (seen once)"),
        (1, "", "seen once"),
    ],
)
def test_row_shows_how_often_it_was_seen(seen: int | None, period: str, recurs: str) -> None:
    assert hour_rows([make_share("validation", 0.5, seen=seen, period=period)])[0].recurs == recurs


@pytest.mark.parametrize(
    "place", ["train.py:41", f"{'a_long_folder/' * 9}train.py:41", "ファイル" * 30]
)
@pytest.mark.parametrize("width", [40, 60, 78, 200])
def test_lines_fit_and_keep_the_end_of_a_path(place: str, width: int) -> None:
    (line,) = hour_lines(hour_rows([make_share("checkpoint", 0.5, place=place)]), width)
    assert cell_len(line) <= width
    assert line.endswith(place[-3:])


def test_control_characters_in_a_place_are_not_printed() -> None:
    (line,) = hour_lines(hour_rows([make_share("copy", 0.5, place="a\x1b[31m\nb.py:1")]), 78)
    assert line.isprintable()


def test_what_was_not_observed_is_named() -> None:
    def footnote(name: str) -> tuple[str, ...]:
        notes = [
            block.sentences
            for block in hour_section(CASES[name]).blocks
            if isinstance(block, Bullets)
        ]
        return notes[0]

    assert "checkpoint" in footnote("nothing-recurs")[0]
    assert "checkpoint" not in footnote("checkpoints")[0]
    assert footnote("longest") == ()
    assert footnote("healthy") == ()
