"""Units and settings as short strings."""

from __future__ import annotations

from math import inf

import pytest
from rich.cells import cell_len

from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.messages.units import (
    NO_VALUE,
    Unit,
    format_bytes_of,
    show,
    show_gain_interval,
    show_interval,
)
from autotune.report.words import cut_middle, format_setting, one_line, shorten, shorten_path
from tests.factories import FAST, GROUP

GIB = 2**30
MIB = 2**20


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("bytes", 0, "0 MiB"),
        ("bytes", 784, "784 B"),
        ("bytes", -2048, "-2 KiB"),
        ("bytes", 2**19, "0.50 MiB"),
        ("bytes", 512 * MIB, "512 MiB"),
        ("bytes", GIB, "1.00 GiB"),
        ("bytes", 139 * GIB, "139 GiB"),
        ("plain_rate", 0.01234, "0.01234"),
        ("plain_rate", 12.3456, "12.35"),
        ("plain_rate", 1234.5, "1,234"),
        ("plain_rate", 12_345_678.0, "12.35 M"),
        ("rate", 1234.5, "1,234 samples/s"),
        ("duration", -1, "0.0 s"),
        ("duration", 0.44, "0.4 s"),
        ("duration", 59.7, "1 min"),
        ("duration", 200.4, "3 min 20 s"),
        ("duration", 3600, "1 h"),
        ("duration", 7500, "2 h 5 min"),
        ("energy", 0.0, "0 mJ"),
        ("energy", 2.13e-4, "0.213 mJ"),
        ("energy", 0.2135, "214 mJ"),
        ("energy", 0.9996, "1 J"),
        ("energy", 1.27, "1.27 J"),
        ("share", 0, "0 %"),
        ("share", 0.0001, "<0.1 %"),
        ("share", 0.034, "3.4 %"),
        ("share", 0.9999, "100 %"),
        ("times", 1.004, "1.004"),
        ("times", 2.412, "2.41"),
        ("times", 12.34, "12.3"),
        ("gain", 0.4, "+40 %"),
        ("gain", -0.034, "-3 %"),
        ("gain", -0.001, "+0 %"),
        ("gain", 1.4, "2.4 times"),
        ("gain", inf, "unknown"),
        ("seconds", 0.0, "0 us"),
        ("seconds", 12.34e-6, "12.3 us"),
        ("seconds", 999.6e-6, "1 ms"),
        ("seconds", 1.234, "1.23 s"),
        ("seconds", 90.0, "1 min 30 s"),
        ("mean_count", 1.0, "1"),
        ("mean_count", 2.94, "2.9"),
        ("mean_count", 1280.0, "1,280"),
    ],
)
def test_figure_in_its_unit(unit: Unit, value: float, text: str) -> None:
    assert show(value, unit) == text
    assert show(None, unit) == NO_VALUE


def test_interval_without_an_end_is_unknown() -> None:
    assert show_interval(0, float("inf"), "plain_rate") == "unknown"


def test_prefetch_factor_without_workers() -> None:
    assert format_setting("prefetch_factor", TrainingConfig()) == "–"  # noqa: RUF001 - an en dash
    assert format_setting("prefetch_factor", TrainingConfig(num_workers=2)) == "torch's own"


def test_settings_of_ddp() -> None:
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


def test_foreign_text_is_plain() -> None:
    assert one_line("a\x1b[31m b\x1b[0m\n\n\tc\udc80\x07\x00") == "a b c"


def test_cut_text_counts_cells() -> None:
    cut = shorten("理由" * 10, 9)
    assert cell_len(cut) <= 9
    assert cut.endswith("…")
    assert shorten("short", 9) == "short"


def test_carriage_return_is_a_space() -> None:
    assert one_line("first\r\nsecond\rthird") == "first second third"


def test_long_text_keeps_both_ends() -> None:
    first, told, last = cut_middle("a" * 50 + "b" * 50, 20).split("\n")
    assert (first, last) == ("a" * 10, "b" * 10)
    assert "80" in told
    assert cut_middle("short", 20) == "short"


@pytest.mark.parametrize(
    ("size", "limit", "text"),
    [
        (15 * GIB, 16 * GIB, "15.0 GiB"),
        (300 * MIB, 16 * GIB, "300 MiB"),
        (16 * GIB, 16 * GIB, "16.0 GiB"),
        (16 * GIB + 30 * MIB, 16 * GIB, "16.03 GiB"),
        (513 * MIB, 512 * MIB, "513 MiB"),
    ],
)
def test_size_differs_from_its_limit(size: int, limit: int, text: str) -> None:
    assert format_bytes_of(size, limit) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.55, 0.9, "+55 to +90 %"),
        (-0.02, 0.31, "-2 to +31 %"),
        (0.8, 1.4, "+80 % to 2.4 times"),
        (1.1, 1.7, "2.1 to 2.7 times"),
        (0.2, inf, "at least +20 %"),
        (0.821, 0.823, ""),
    ],
)
def test_interval_of_a_gain_has_its_unit_once(low: float, high: float, text: str) -> None:
    assert show_gain_interval(low, high) == text


@pytest.mark.parametrize("width", [12, 24, 40])
@pytest.mark.parametrize("path", ["/a/long/path/" * 9 + "train.py:41", "長い道" * 30 + "n.py:41"])
def test_shortened_path_keeps_its_end(path: str, width: int) -> None:
    short = shorten_path(path, width)
    assert cell_len(short) <= width
    assert short.endswith("n.py:41")
    assert "…" in short
    assert shorten_path("train.py:41", width) == "train.py:41"
