"""Figures and errors inside sentences: reasons, evidence, advice. Tables are formatted in report/."""

from __future__ import annotations

__all__ = ["first_line", "say_bytes", "say_gain", "say_mib", "say_rate", "say_seconds", "say_settings", "say_share"]

_BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"))
_TWICE = 1.0


def first_line(error: BaseException) -> str:
    """What an exception says, in its first line; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def say_seconds(seconds: float) -> str:
    """A short time with two digits or more: "2.1 ms", "340 us", "1.2 s"."""
    for scale, unit in _TIME_UNITS:
        if seconds >= scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def say_bytes(size: float) -> str:
    """A size with two digits or more: "3.2 GiB", "512 B"."""
    for scale, unit in _BYTE_UNITS:
        if size >= scale:
            return f"{_digits(size / scale)} {unit}"
    return f"{_digits(size)} B"


def say_mib(size: float) -> str:
    """A size beside a limit, in whole MiB: "14,336 MiB"."""
    return f"{size / 2**20:,.0f} MiB"


def say_rate(samples_per_s: float) -> str:
    """A rate: "1,234 samples/s", "9.8 samples/s"."""
    return f"{_digits(samples_per_s)} samples/s"


def say_share(fraction: float) -> str:
    """A share as per cent with two digits or more, in sentences and tables alike: "3.4 %", "97 %"."""
    percent = 100 * fraction
    if 0 < percent < 0.1:
        return "<0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def say_gain(gain: float) -> str:
    """What a change of the rate amounts to: "+23 %", from twice the rate on "2.4 times"."""
    return f"+{100 * gain:.0f} %" if gain < _TWICE else f"{_digits(1 + gain)} times"


def say_settings(settings: dict[str, object]) -> str:
    """Settings as a user writes them: "num_workers=4, persistent_workers=True"."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
