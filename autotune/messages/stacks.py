"""Write evidence from sampled stacks, by line of the user's code, and reasons why there is none."""

from __future__ import annotations

from typing import Literal

from autotune.messages import message
from autotune.messages.units import format_bytes, format_fraction

# Evidence (without a full stop)


@message
def hot_item_line(
    fraction: float, place: str, function: str, code: str = "", calls: str = ""
) -> str:
    return f"{format_fraction(fraction)} of an item is {_line(place, function, code, calls)}"


@message
def hot_collate_line(
    fraction: float, place: str, function: str, code: str = "", calls: str = ""
) -> str:
    return f"{format_fraction(fraction)} of collating is {_line(place, function, code, calls)}"


@message
def hot_sampler_line(
    fraction: float, place: str, function: str, code: str = "", calls: str = ""
) -> str:
    line = _line(place, function, code, calls)
    return f"the sampler takes {format_fraction(fraction)} of the training thread's time in {line}"


@message
def hot_script_line(
    fraction: float, place: str, function: str, code: str = "", calls: str = ""
) -> str:
    line = _line(place, function, code, calls)
    return f"{format_fraction(fraction)} of the training thread's time is {line}"


@message
def hot_forward_line(
    fraction: float, place: str, function: str, code: str = "", calls: str = ""
) -> str:
    line = _line(place, function, code, calls)
    return f"{format_fraction(fraction)} of the forward pass is {line}"


@message
def waiting_line(fraction: float, place: str, function: str, code: str) -> str:
    line = _line(place, function, code, "")
    return f"the step waits at {line}, {format_fraction(fraction)} of the training thread's time"


def _line(place: str, function: str, code: str, calls: str) -> str:
    """Return a line of the user's code, or the function that it calls, or a library's file."""
    at = f"{place} in {function}"
    if code:
        at = f"{place} `{code}`"
    return f"{calls}, called at {at}" if calls else at


# Reasons for missing stacks


@message
def sampling_not_installed() -> str:
    return "stacks were not sampled: the program py-spy was not found; install it with pip install py-spy"


@message
def sampling_not_started(error: str) -> str:
    return f"stacks were not sampled: py-spy could not be started ({error})"


@message
def sampling_forbidden(reason: Literal["yama", "system"]) -> str:
    allow = "a container needs the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
    if reason == "yama":
        allow = "allow it with sysctl kernel.yama.ptrace_scope=1"
    return (
        f"stacks were not sampled: the system forbids a process to read another's memory; {allow}"
    )


@message
def sampling_not_begun() -> str:
    return "stacks were not sampled: py-spy had not begun when the seconds to sample were over"


@message
def sampling_failed(exit_code: int, last_line: str) -> str:
    ended = f"stacks were not sampled: py-spy ended with exit code {exit_code}"
    return f"{ended} ({last_line})" if last_line else ended


@message
def sampling_late(waited_s: float) -> str:
    return f"stacks were not sampled: py-spy had not ended {waited_s:g} s after it should have"


@message
def sampling_too_large(most_bytes: int) -> str:
    return f"stacks were not sampled: py-spy wrote {format_bytes(most_bytes)} or more"


@message
def sampling_found_nothing() -> str:
    return "stacks were not sampled: py-spy saw nothing of the training thread"
