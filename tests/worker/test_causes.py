"""An exception in a line: the first one says it, and the last one where torch quotes a worker's traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch._utils import ExceptionWrapper

from autotune.worker.failures import cause_of, errors_in


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("too small\nby far"), "ValueError: too small"),
        (MemoryError(), "MemoryError: no message"),
        (
            OSError("Caught OSError in DataLoader worker process 0.\nTraceback ...\nOSError: gone"),
            "OSError: gone",
        ),
        (RuntimeError("x" * 1000), "RuntimeError: " + "x" * 286),
    ],
)
def test_cause_of(error: BaseException, said: str) -> None:
    assert cause_of(error) == said


def test_errors_in_a_chain() -> None:
    outer = ValueError("outer")
    outer.__cause__ = KeyError("inner")
    told = list(errors_in(outer))
    assert [text.first_line for text in told] == ["outer", "'inner'"]
    assert told[1].kinds[:2] == ("KeyError", "LookupError")


def test_quoted_error() -> None:
    error = raised_again(lambda: int("12 GiB of CUDA out of memory"[:2] + "x"))
    assert str(error).startswith("Caught ValueError")
    (told,) = errors_in(error)
    assert "12x" in told.first_line
    assert "CUDA" not in told.first_line
    assert (told.kinds[0], "CUDA" in told.stack) == ("ValueError", True)


def test_quoted_error_of_a_users_type() -> None:
    class OddError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} {two}")

    def fail() -> None:
        raise OddError(1, 2)

    error = raised_again(fail)
    assert isinstance(error, RuntimeError)
    told = next(errors_in(error))
    assert (told.kinds[0], told.message) == ("OddError", "1 2")


def raised_again(act: Callable[[], object]) -> BaseException:
    """What torch raises in the main thread of what another one has raised."""
    again: Any = ExceptionWrapper
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
        act()
    with pytest.raises(Exception) as quoted:  # noqa: PT011 - as above
        again(raised._excinfo, where="in a thread").reraise()
    return quoted.value
