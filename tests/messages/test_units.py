"""Units and settings as short strings."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.messages.units import (
    NO_VALUE,
    UNITS,
    format_bytes,
    format_bytes_of,
    format_duration,
    format_energy,
    format_fraction,
    format_interval,
    format_rate,
    format_short_time,
    format_times,
    show,
)
from autotune.report.words import cut_middle, format_setting, one_line, shorten
from tests.factories import FAST, GROUP


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 MiB"),
        (2**19, "0.50 MiB"),
        (512 * 2**20, "512 MiB"),
        (2**30, "1.00 GiB"),
        (139 * 2**30, "139 GiB"),
    ],
)
def test_bytes_are_mib_below_one_gib(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0.01234, "0.01234"),
        (12.3456, "12.35"),
        (999.6, "999.6"),
        (1234.5, "1,234"),
        (12_345_678.0, "12.35 M"),
    ],
)
def test_a_rate_keeps_four_digits(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.44, "0.4 s"),
        (59.7, "1 min"),
        (200.4, "3 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
    ],
)
def test_a_duration_shows_its_two_largest_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("joules", "text"),
    [
        (0.0, "0 mJ"),
        (2.13e-4, "0.213 mJ"),
        (0.0841, "84.1 mJ"),
        (0.2135, "214 mJ"),
        (0.9996, "1 J"),
        (1.27, "1.27 J"),
    ],
)
def test_energy_is_in_joules_or_thousandths_of_them(joules: float, text: str) -> None:
    assert format_energy(joules) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0, "0 %"), (0.0001, "<0.1 %"), (0.034, "3.4 %"), (0.41, "41 %"), (0.9999, "100 %")],
)
def test_a_fraction_is_shown_as_per_cent(fraction: float, text: str) -> None:
    assert format_fraction(fraction) == text


def test_a_small_gain_can_be_told_from_none() -> None:
    assert (format_times(1.004), format_times(2.412), format_times(12.34)) == (
        "1.004",
        "2.41",
        "12.3",
    )


def test_an_interval_without_an_end_is_unknown() -> None:
    assert format_interval(format_rate(0), format_rate(float("inf"))) == "unknown"


def test_a_prefetch_factor_without_workers_is_no_value() -> None:
    assert format_setting("prefetch_factor", TrainingConfig()) == "–"  # noqa: RUF001 - an en dash
    assert format_setting("prefetch_factor", TrainingConfig(num_workers=2)) == "torch's own"


def test_settings_of_ddp_go_by_their_own_names_and_have_no_value_without_it() -> None:
    assert format_setting("ddp", GROUP) == "bucket_cap_mb=50, comm_hook=bf16"
    assert format_setting("ddp.bucket_cap_mb", GROUP) == "50"
    assert format_setting("ddp.static_graph", GROUP) == "off"
    assert format_setting("ddp.first_bucket_mb", GROUP) == "torch's own"
    for config in (
        GROUP.model_copy(update={"ddp": None}),
        GROUP.model_copy(update={"ddp": DdpConfig()}),
    ):
        assert (format_setting("ddp", config), format_setting("ddp.broadcast_buffers", config)) == (
            "torch's own",
            "on",
        )
    assert (format_setting("ddp", FAST), format_setting("ddp.static_graph", FAST)) == ("–", "–")  # noqa: RUF001 - an en dash


def test_foreign_text_loses_escapes_line_ends_and_lone_surrogates() -> None:
    assert one_line("a\x1b[31m b\x1b[0m\n\n\tc\udc80\x07\x00") == "a b c"


def test_cut_text_counts_cells_and_ends_in_an_ellipsis() -> None:
    cut = shorten("理由" * 10, 9)
    assert cell_len(cut) <= 9
    assert cut.endswith("…")
    assert shorten("short", 9) == "short"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (12.34e-6, "12.3 us"),
        (999.6e-6, "1 ms"),
        (0.1234, "123 ms"),
        (1.234, "1.23 s"),
        (90.0, "1 min 30 s"),
    ],
)
def test_a_short_time_has_three_digits_and_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_short_time(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 MiB"), (784, "784 B"), (3072, "3 KiB"), (-2048, "-2 KiB")]
)
def test_a_small_size_is_no_rounded_nothing(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_no_carriage_return_swallows_what_stands_before_it() -> None:
    assert one_line("first\r\nsecond\rthird") == "first second third"


def test_a_long_text_keeps_both_its_ends() -> None:
    first, told, last = cut_middle("a" * 50 + "b" * 50, 20).split("\n")
    assert (first, last) == ("a" * 10, "b" * 10)
    assert "80" in told
    assert cut_middle("short", 20) == "short"


@pytest.mark.parametrize(
    ("size", "limit", "text"),
    [
        (15 * 2**30, 16 * 2**30, "15.0 GiB"),
        (300 * 2**20, 16 * 2**30, "300 MiB"),
        (16 * 2**30, 16 * 2**30, "16.0 GiB"),
        (16 * 2**30 + 30 * 2**20, 16 * 2**30, "16.03 GiB"),
        (513 * 2**20, 512 * 2**20, "513 MiB"),
    ],
)
def test_a_size_beside_a_limit_has_its_unit_and_can_be_told_from_it(
    size: int, limit: int, text: str
) -> None:
    assert format_bytes_of(size, limit) == text


@pytest.mark.parametrize(
    ("number", "text"), [(1.0, "1"), (2.94, "2.9"), (128.0, "128"), (1280.0, "1,280")]
)
def test_a_mean_count_has_no_power_of_ten(number: float, text: str) -> None:
    assert show(number, "mean_count") == text


def test_a_figure_that_is_missing_has_no_value_in_any_unit() -> None:
    assert {show(None, unit) for unit in UNITS} == {NO_VALUE}
    assert (show(0.034, "share"), show(1234.5, "rate"), show(1.4, "gain")) == (
        "3.4 %",
        "1,234 samples/s",
        "2.4 times",
    )
