"""The costly code of a script is its own: no line that calls the model, saves, or validates."""

from __future__ import annotations

from autotune.diagnosis.hot_lines import costly_code
from autotune.records.stacks import StackLine, StackPart, Stacks


def line(part: StackPart, place: str, function: str, fraction: float) -> StackLine:
    return StackLine(part=part, place=place, function=function, fraction=fraction)


def stacks(*lines: StackLine) -> Stacks:
    return Stacks(seconds=4.0, samples=200, main=lines)


def test_a_helper_function_counts_with_all_of_its_lines() -> None:
    found = costly_code(
        stacks(
            line("other", "train.py:10", "ema", 0.2),
            line("other", "train.py:11", "ema", 0.15),
            line("other", "train.py:30", "main", 0.3),
            line("backward", "train.py:31", "main", 0.3),
        )
    )
    assert found is not None
    assert (found.place, round(found.fraction, 2)) == ("train.py:10", 0.35)


def test_lines_that_call_the_model_are_left_out() -> None:
    found = costly_code(
        stacks(
            line("other", "train.py:30", "main", 0.4),
            line("forward", "train.py:30", "main", 0.4),
        )
    )
    assert found is None


def test_functions_that_validate_are_no_forward_pass() -> None:
    seen = stacks(
        line("forward", "train.py:38", "evaluate", 0.4),
        line("item", "train.py:37", "evaluate", 0.1),
    )
    known = {"train.py:37"}
    assert costly_code(seen, "forward", known=known, saving=known) is None
    assert costly_code(seen, "forward") is not None
