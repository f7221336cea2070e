"""The directions of imports and the public names, read from the syntax trees; nothing of autotune is run for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

import autotune

Kind = Literal["module", "function", "typing"]

PACKAGE = Path(autotune.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
FILES = sorted(PACKAGE.rglob("*.py"))
EVERYWHERE: tuple[Kind, ...] = ("module", "function", "typing")

MAY_IMPORT: dict[str, set[str]] = {
    "__init__": {"api", "random_state", "core", "errors"},
    "__main__": {"cli"},
    "cli": {"api", "run_config", "report", "core", "errors"},
    "api": {"searching", "diagnosing", "probing", "wiring", "timing", "warm_start", "run_config", "run_folder"}
    | {"launch", "report", "protocol", "core", "errors"},
    "searching": {
        "confirm",
        "tune",
        "timing",
        "guided",
        "clock",
        "warm_start",
        "probing",
        "wiring",
        "run_config",
        "study",
    }
    | {"launch", "report", "run_folder", "protocol", "core", "errors", "by_value", "random_state", "interrupts"},
    "by_value": {"core"},
    "probing": {"timing", "launch", "protocol", "core", "errors"},
    "wiring": {"run_config", "run_folder", "launch", "core", "errors"},
    "diagnosing": {"probing", "wiring", "timing", "launch", "report", "protocol", "core", "errors"}
    | {"by_value", "random_state", "interrupts"},
    "confirm": {"race", "stressing", "extras", "tune", "study", "launch", "protocol", "core", "errors"},
    "race": {"tune", "core", "errors"},
    "stressing": {"tune", "launch", "protocol", "core", "errors"},
    "timing": {"clock", "study", "protocol", "core", "errors"},
    "tune": {"guided", "blaming", "timing", "guarding", "extras", "study", "launch", "protocol", "core", "errors"},
    "guided": {"study", "launch", "protocol", "core", "errors"},
    "blaming": {"study", "core", "errors"},
    "clock": set(),
    "warm_start": {"run_config", "run_folder", "study", "core", "errors"},
    "guarding": {"launch", "core", "errors"},
    "extras": {"protocol", "core", "errors"},
    "run_config": {"core", "errors"},
    "study": {"core", "errors"},
    "report": {"core", "errors"},
    "run_folder": {"protocol", "core", "errors"},
    "launch": {"protocol", "core", "errors"},
    "worker": {"protocol", "core", "errors"},
    "testing": {"protocol", "launch", "core", "errors"},
    "protocol": {"core", "errors"},
    "core": {"core", "errors"},
    "errors": set(),
    "interrupts": set(),
    "random_state": set(),
}
"""Each room, and the rooms that it may import (itself apart)."""

OWNERS: dict[str, dict[str, tuple[Kind, ...]]] = {
    "torch": {
        "worker": EVERYWHERE,
        "core/float32_precision.py": ("function", "typing"),
        "core/training_config.py": ("function", "typing"),
        "protocol": ("function", "typing"),
    },
    "pynvml": {"worker/nvml.py": ("function",), "launch/driver.py": ("function",)},
    "optuna": {"study": EVERYWHERE, "searching": ("typing",)},
    "yaml": {"run_config": EVERYWHERE},
    "rich": {"report": EVERYWHERE, "cli": ("function", "typing")},
    "click": {"cli": EVERYWHERE},
    "jinja2": {"report": EVERYWHERE},
    "ray": {
        f"launch/{name}.py": EVERYWHERE
        for name in ("ray_launcher", "ray_cluster", "ray_hosts", "ray_host", "ray_nodes")
    },
    "matplotlib": {"report/drawing.py": ("function", "typing")},
}
"""Each heavy or border package, the rooms or files that may import it, and where in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """An import statement: the dotted name, and whether it runs with the module, in a function or never."""

    name: str
    kind: Kind
    line: int


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_room_imports_only_the_rooms_below_it(path: Path) -> None:
    room = room_of(path)
    assert room in MAY_IMPORT, f"a new room needs its place in DESIGN.md and in MAY_IMPORT, but got {room}"
    imported = [(one, target_room(one)) for one in imports_of(path)]
    wrong = [f"line {one.line}: {one.name}" for one, to in imported if to not in {None, room, *MAY_IMPORT[room]}]
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_package_is_imported_by_its_owner_alone(path: Path) -> None:
    wrong = []
    for one in imports_of(path):
        owners = OWNERS.get(one.name.partition(".")[0])
        if owners is None:
            continue
        places = (room_of(path), path.relative_to(PACKAGE).as_posix())
        if one.kind not in {kind for place in places for kind in owners.get(place, ())}:
            wrong.append(f"line {one.line}: {one.name} ({one.kind})")
    assert not wrong


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


def test_contributors_are_told_the_same_rooms() -> None:
    rows = re.findall(r"^\| `(\w+)(?:\.py|/)` \|.*\|(.*)\|$", CONTRIBUTING.read_text(encoding="utf-8"), re.MULTILINE)
    told = {room: set(re.findall(r"`(\w+)`", allowed)) - {"errors"} for room, allowed in rows}
    unnamed = {"__init__", "__main__", "errors"}
    assert told == {room: to - {"errors", room} for room, to in MAY_IMPORT.items() if room not in unnamed}


def test_an_import_is_told_by_where_it_runs() -> None:
    source = """
import torch.nn as nn
if TYPE_CHECKING:
    from optuna import Study
else:
    import yaml
def f() -> None:
    from autotune.api import search as api
    from autotune import __version__
    class A:
        import click
"""
    found = [(one.name, one.kind) for one in walk(ast.parse(source).body, "module")]
    assert found == [
        ("torch.nn", "module"),
        ("optuna.Study", "typing"),
        ("yaml", "module"),
        ("autotune.api.search", "function"),
        ("autotune.__version__", "function"),
        ("click", "function"),
    ]


def room_of(path: Path) -> str:
    """The first part of a file's place in the package: "core", "api"."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def target_room(one: Import) -> str | None:
    """The room that an import reaches; None for other packages and for the version."""
    if one.name.partition(".")[0] != "autotune" or one.name == "autotune.__version__":
        return None
    return [*one.name.split("."), "__init__"][1]


def imports_of(path: Path) -> list[Import]:
    """Every import statement of a file."""
    return list(walk(ast.parse(path.read_text(encoding="utf-8")).body, "module"))


def walk(nodes: list[ast.stmt], kind: Kind) -> Iterator[Import]:
    """The imports below some statements, which are of a kind."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(name=alias.name, kind=kind, line=node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from (Import(name=f"{node.module}.{one.name}", kind=kind, line=node.lineno) for one in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from walk(node.body, "function" if kind == "module" else kind)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            yield from walk(node.body, "typing")
            yield from walk(node.orelse, kind)
        else:
            yield from walk(inner_statements(node), kind)


def inner_statements(node: ast.AST) -> list[ast.stmt]:
    """The statements directly inside another: the arms of a try or a match, the body of a class, a loop, a with."""
    found: list[ast.stmt] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            found.append(child)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            found.extend(child.body)
    return found


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
