"""Rules about the source itself; the directions of imports are import-linter's (pyproject.toml)."""

from __future__ import annotations

import ast
import re
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


def test_public_names_are_listed_sorted_and_there() -> None:
    faults = {}
    for path in FILES:
        fault = fault_of_names(path)
        if fault is not None:
            faults[path.relative_to(PACKAGE).as_posix()] = fault
    assert faults == {}
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


def fault_of_names(path: Path) -> str | None:
    """Return what is wrong with a module's `__all__`, or None."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    listed = listed_names(body)
    public = {
        one.name
        for one in body
        if isinstance(one, ast.FunctionDef | ast.ClassDef) and is_public(one)
    }
    if listed is None:
        return (
            "a module with public names needs an __all__"
            if public and path.name != "__main__.py"
            else None
        )
    if listed != sorted(listed, key=sort_key):
        return "__all__ must be sorted"
    if not public <= set(listed):
        return f"must be in __all__, or begin with _: {sorted(public - set(listed))}"
    if not set(listed) <= bound_names(body):
        return (
            f"__all__ has names that the module does not: {sorted(set(listed) - bound_names(body))}"
        )
    return None


def listed_names(body: list[ast.stmt]) -> list[str] | None:
    """Return what `__all__` holds; None where there is none."""
    for node in body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [
            "__all__"
        ]:
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def is_public(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return whether others may call it by its name; click calls a command."""
    is_command = any(ast.unparse(one).startswith("cli.command(") for one in node.decorator_list)
    return node.name[0] != "_" and not is_command


def bound_names(body: list[ast.stmt]) -> set[str]:
    """Return the names that a module's top level binds, imports included."""
    names = set()
    for node in body:
        for inner in [node] if isinstance(node, ast.FunctionDef | ast.ClassDef) else ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.ClassDef):
                names.add(inner.name)
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names.add(inner.id)
            elif isinstance(inner, ast.alias):
                names.add(inner.asname or inner.name)
    return names


def sort_key(name: str) -> tuple[int, list[tuple[str, int]]]:
    """Constants, then classes, then functions, numbers by value: the order that ruff (RUF022) keeps."""
    group = 0 if name.isupper() else 1 if name.lstrip("_")[0].isupper() else 2
    return group, [(text, int(number or 0)) for text, number in re.findall(r"(\D+)(\d*)", name)]


def test_what_a_search_begins_with_does_not_import_torch() -> None:
    """It takes seconds, and memory that trials would have."""
    code = "import sys, autotune.cli, autotune.api.search, autotune.api.commands; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
