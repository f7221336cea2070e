"""What may stand in the message of an error: one line of printable characters, of bounded length."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import AutotuneError, ConfigError, RunFolderError


@given(st.text(max_size=3000))
def test_a_problem_is_a_printable_line_of_bounded_length(text: str) -> None:
    error = ConfigError(text, "another")
    assert all(problem.isprintable() and len(problem) < 1100 for problem in error.problems)
    assert str(error).splitlines()[-1] == "another"


def test_an_endless_value_loses_its_middle() -> None:
    (problem,) = ConfigError("run_dir must exist, but " + "x" * 5000 + " does not").problems
    assert problem.startswith("run_dir must exist, but xxx")
    assert problem.endswith("xxx does not")
    assert "characters left out" in problem


@pytest.mark.parametrize("kind", [AutotuneError, RunFolderError])
def test_what_steers_a_terminal_is_an_escape_and_lines_stay(kind: type[AutotuneError]) -> None:
    error = kind("a\x1b[31m file\n\tbelow \udcff")
    assert str(error) == "a\\x1b[31m file\n\tbelow \\udcff"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_problems_outlast_pickling() -> None:
    error = ConfigError("lr: must be positive", "seed: must be whole")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems) == (str(error), error.problems)
