"""benchmarks/endurance.py, its made-up input: a broken promise is kept with its smallest input, and some are made."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from benchmarks.measures.endurance.fuzz import tried
from benchmarks.measures.endurance.fuzz_calls import calls
from benchmarks.measures.endurance.fuzz_commands import commands, try_command
from benchmarks.measures.endurance.fuzz_texts import documents, overrides
from benchmarks.measures.endurance.fuzz_tries import BrokenError, try_call, try_config, user_code


def test_the_smallest_input_that_breaks_a_promise_is_kept() -> None:
    def try_one(number: int) -> str:
        if number > 9:
            raise BrokenError("too large")
        return "small"

    found = tried(st.integers(0, 1000), try_one, number=1, examples=50)
    assert (found["fault"], found["input"]) == ("too large", "10")


def test_another_exception_and_what_is_written_are_broken_promises(tmp_path: Path) -> None:
    with pytest.raises(BrokenError, match="KeyError got through"):
        try_call(tmp_path, lambda: vars(object)["a"])
    with pytest.raises(BrokenError, match="something was written"):
        try_call(tmp_path, (tmp_path / "made").touch)


def test_made_up_configurations_are_plans_or_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    user_code(tmp_path)
    inputs = st.tuples(documents(), st.lists(overrides(), max_size=2).map(tuple))
    found = tried(inputs, lambda one: try_config(tmp_path, *one), number=7, examples=40)
    assert "fault" not in found, found
    assert sum(found["ended"].values()) == 40


def test_made_up_calls_have_a_result_or_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = tried(
        calls(tmp_path), lambda call: try_call(tmp_path, call, writes=True), number=7, examples=40
    )
    assert "fault" not in found, found
    assert sum(found["ended"].values()) == 40


def test_made_up_command_lines_end_as_documented(tmp_path: Path) -> None:
    user_code(tmp_path)
    found = tried(
        commands(tmp_path), lambda words: try_command(tmp_path, words), number=7, examples=3
    )
    assert "fault" not in found, found
    assert sum(found["ended"].values()) == 3
