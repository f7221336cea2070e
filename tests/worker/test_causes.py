"""An exception in a line: the first one says it, and the last one where torch quotes a worker's traceback."""

from __future__ import annotations

import pytest

from autotune.worker.causes import cause_of


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("too small\nby far"), "ValueError: too small"),
        (MemoryError(), "MemoryError: no message"),
        (OSError("Caught OSError in DataLoader worker process 0.\nTraceback ...\nOSError: gone"), "OSError: gone"),
        (RuntimeError("x" * 1000), "RuntimeError: " + "x" * 286),
    ],
)
def test_an_exception_is_told_by_its_type_and_the_line_that_says_it(error: BaseException, said: str) -> None:
    assert cause_of(error) == said
