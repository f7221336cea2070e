"""Rules about the source itself; the directions of imports are import-linter's (pyproject.toml)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import autotune

PACKAGE = Path(autotune.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted({path.parent for path in FILES} - {PACKAGE})
TESTS = Path(__file__).parent
SENTENCE_WORDS = 6
"""A text of this many words is a sentence, which only a golden file holds."""


def test_each_public_name_of_the_package_is_there() -> None:
    assert [name for name in autotune.__all__ if getattr(autotune, name, None) is None] == []


def test_each_room_says_what_it_owns_what_comes_in_and_what_goes_out() -> None:
    silent = []
    for room in ROOMS:
        docstring = (
            ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
        )
        if len(docstring.splitlines()) < 2:
            silent.append(room.relative_to(PACKAGE).as_posix())
    assert silent == []


def test_no_test_asserts_on_a_sentence() -> None:
    """Golden files hold sentences (tests/golden.py); a test asserts on types, fields, codes and values."""
    places = []
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not calls_assert_golden(tree):
            name = path.relative_to(TESTS).as_posix()
            places += [f"{name}:{line}" for line in asserted_sentences(tree)]
    assert places == []


def calls_assert_golden(tree: ast.Module) -> bool:
    """Return whether a module compares a text with a golden file."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(
        isinstance(call.func, ast.Name) and call.func.id == "assert_golden" for call in calls
    )


def asserted_sentences(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each sentence inside the condition of an `assert` or a `match=`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            asserted: ast.expr = node.test
        elif isinstance(node, ast.keyword) and node.arg == "match":
            asserted = node.value
        else:
            continue
        for inner in ast.walk(asserted):
            if not isinstance(inner, ast.Constant) or not isinstance(inner.value, str):
                continue
            if len(inner.value.split()) >= SENTENCE_WORDS:
                yield inner.lineno


def test_what_a_search_begins_with_does_not_import_torch() -> None:
    """It takes seconds, and memory that trials would have."""
    code = "import sys, autotune.cli, autotune.api.search, autotune.api.commands; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
