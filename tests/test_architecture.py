"""Public names, and the size of rooms and files; the directions of imports are import-linter's (pyproject.toml)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autotune

PACKAGE = Path(autotune.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted({path.parent for path in FILES} - {PACKAGE})

MOST_MODULES = {"": 8, "records": 19}
"""Modules of a folder, `__init__` not counted; of one that is not named, MOST_MODULES_ELSEWHERE."""
MOST_MODULES_ELSEWHERE = 12
MOST_LINES = 300
LONG_FILES = {
    "analysis/forecast/rate_model.py": "the model's terms, its fit and its forecast share their parameters",
    "settings/training_config.py": "one type for all settings, each field its own documentation",
    "study/study.py": "the facade of Optuna's study: what it hands out and what it is told are one state",
    "tuning/loop.py": "what runs next, and what follows from how it ended, is the search read from above",
    "worker/measure/loop.py": "warm-up and window are one loop, whose order is what is measured",
}
"""Files that may be longer, at most five, each with its reason."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_public_names_are_listed_sorted_and_there(path: Path) -> None:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    listed = listed_names(body)
    public = {one.name for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef) and is_public(one)}
    if listed is None:
        assert not public or path.name == "__main__.py", "a module with public names needs an __all__"
        return
    assert listed == sorted(listed, key=sort_key)
    assert public <= set(listed), "a public function or class belongs into __all__, any other begins with _"
    assert set(listed) <= bound_names(body)


@pytest.mark.parametrize("name", autotune.__all__)
def test_each_public_name_of_the_package_exists(name: str) -> None:
    assert getattr(autotune, name) is not None


def test_a_folder_holds_few_modules() -> None:
    modules = [path for path in FILES if path.name != "__init__.py"]
    counts = {room: sum(path.parent == room for path in modules) for room in (PACKAGE, *ROOMS)}
    names = {room.relative_to(PACKAGE).as_posix().removeprefix("."): count for room, count in counts.items()}
    assert {name for name, count in names.items() if count > MOST_MODULES.get(name, MOST_MODULES_ELSEWHERE)} == set()


def test_few_files_are_long_and_each_has_its_reason() -> None:
    lines = {path.relative_to(PACKAGE).as_posix(): len(path.read_text("utf-8").splitlines()) for path in FILES}
    assert {name for name, count in lines.items() if count > MOST_LINES} == set(LONG_FILES)
    assert len(LONG_FILES) <= 5


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.relative_to(PACKAGE).as_posix())
def test_each_room_says_what_it_owns_what_comes_in_and_what_goes_out(room: Path) -> None:
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert len(docstring.splitlines()) > 1


def listed_names(body: list[ast.stmt]) -> list[str] | None:
    """What `__all__` holds; None where there is none."""
    for node in body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def is_public(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether others may call it by its name; a command is called by click."""
    is_command = any(ast.unparse(one).startswith("cli.command(") for one in node.decorator_list)
    return node.name[0] != "_" and not is_command


def bound_names(body: list[ast.stmt]) -> set[str]:
    """The names that a module's top level binds, imports included."""
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
    code = "import sys, autotune.cli, autotune.api.search, autotune.api.apply; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
