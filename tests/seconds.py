"""Sum up the seconds of a run of the tests: by directory, by how many processes a test starts, and by fixture.

    python -m tests.seconds JUNIT.xml ... --to benchmarks/results/NAME

Reads JUnit files as pytest writes them (--junitxml) and writes NAME.json and NAME.txt. pytest records no fixtures: they
are read from the tests' source, those that a test asks for, and those that these ask for. A test starts several
processes where it starts a search, a group of ranks or a cluster, or more than one trial or subprocess. That may be in
its own code, in its fixtures', or in functions of its file that these call. This is a guess by names: it knows no
values. The server that all tests share counts for none.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
SHARED = frozenset({"tmp_path", "tmp_path_factory", "monkeypatch", "capsys", "capfd", "caplog", "request", "recwarn"})
"""Fixtures of pytest's own, which are not counted."""
HAS_PROCESS = frozenset(
    {
        "Cluster",
        "ForkServerLauncher",
        "FreshInterpreterLauncher",
        "Popen",
        "Process",
        "ProcessPoolExecutor",
        "Server",
        "check_call",
        "check_output",
        "fork",
        "fork_server",
        "subprocess",
    }
)
"""Names in the code of a test that starts a process."""
STARTS_ONE = frozenset(
    {
        "Popen",
        "curves",
        "describe",
        "fork",
        "guard",
        "guarded",
        "measured",
        "probe",
        "run",
        "run_limited",
        "stress",
        "trial",
    }
)
"""Calls that each start a process, where a test starts any."""
STARTS_SEVERAL = frozenset(
    {
        "TWO_RANKS",
        "assert_next_trial_works",
        "diagnose",
        "diagnose_plan",
        "ray",
        "run_group",
        "run_plan",
        "search",
        "torchrun",
        "world_size",
    }
)
"""Names in the code of a test that starts more than one, where it starts any."""
KINDS = ("no process", "simulated device", "one process", "several processes")
"""A test on the simulated device runs in a fork of its own."""
MOST = 40
"""Rows of a table that lists fixtures or tests."""


@dataclass(frozen=True)
class Code:
    """What a function of a test file asks for, and the names in its body, each as often as it stands there."""

    asked: tuple[str, ...]
    names: Counter[str]
    is_fixture: bool
    is_autouse: bool


@dataclass
class Sums:
    """Tests and their seconds, by some key."""

    tests: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    def add(self, key: str, seconds: float) -> None:
        """Count a test."""
        self.tests[key] += 1
        self.seconds[key] += seconds  # type: ignore[assignment] # a Counter of floats

    def rows(self, most: int | None = None) -> list[dict[str, object]]:
        """Return the rows, those with most seconds first."""
        keys = sorted(self.seconds, key=lambda key: -self.seconds[key])[:most]
        return [{"name": key, "tests": self.tests[key], "seconds": round(self.seconds[key], 1)} for key in keys]


def functions_in(path: Path) -> dict[str, Code]:
    """Return the functions of a file by name, those of its classes too; a file that is not there has none."""
    if not path.exists():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {node.name: _code(node) for node in nodes}


def _code(node: ast.FunctionDef) -> Code:
    words = [word for one in node.decorator_list for word in _words(one)]
    is_fixture = "fixture" in words
    given = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs) if argument.arg != "self"]
    used = [
        word
        for one in node.decorator_list
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "usefixtures"
        for word in _words(one)
    ]
    is_autouse = is_fixture and "autouse" in words
    asked = given if is_fixture or node.name.startswith("test_") else []
    return Code((*asked, *used), Counter(_words(node)), is_fixture, is_autouse)


def _words(node: ast.AST) -> Iterator[str]:
    """Yield names, attributes, keywords and short strings below a node."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
        elif isinstance(one, ast.Attribute):
            yield one.attr
        elif isinstance(one, ast.keyword) and one.arg is not None:
            yield one.arg
        elif isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value.isidentifier():
            yield one.value


def visible_from(path: Path) -> dict[str, Code]:
    """Return the functions that a test file sees: its own, and the fixtures of the conftest.py above it."""
    found: dict[str, Code] = {}
    for folder in [*path.relative_to(ROOT).parents][::-1]:
        own = functions_in(ROOT / folder / "conftest.py")
        found |= {name: code for name, code in own.items() if code.is_fixture}
    return found | functions_in(path)


def reached(test: str, seen: Mapping[str, Code]) -> tuple[frozenset[str], Counter[str]]:
    """Return the fixtures that a test has, and the names in all code that it reaches."""
    own = [name for name, code in seen.items() if code.is_autouse and not name.startswith("_")]
    waiting, done, names = [test, *own], set[str](), Counter[str]()
    while waiting:
        name = waiting.pop()
        if name in done or name not in seen:
            continue
        done.add(name)
        names += seen[name].names
        called = [word for word in seen[name].names if word in seen and not seen[word].is_fixture]
        waiting += [*seen[name].asked, *(word for word in called if not word.startswith("test_"))]
    fixtures = {name for name in done if seen[name].is_fixture} | set(seen[test].asked if test in seen else ())
    return frozenset(name for name in fixtures if name in seen and seen[name].is_fixture), names


def kind_of(fixtures: Iterable[str], names: Counter[str]) -> str:
    """Return which of KINDS a test is."""
    if not (HAS_PROCESS & {*fixtures, *names}):
        return KINDS[1] if "on_simulated_device" in names else KINDS[0]
    started = sum(names[word] for word in STARTS_ONE)
    return KINDS[3] if started > 1 or STARTS_SEVERAL & {*names} else KINDS[2]


def file_of(classname: str) -> Path:
    """Return the file of a test that JUnit calls "tests.api.test_search" or "tests.api.test_search.TestClass"."""
    parts = classname.split(".")
    while parts:
        path = ROOT.joinpath(*parts).with_suffix(".py")
        if path.exists():
            return path
        parts = parts[:-1]
    return ROOT / "tests" / "gone.py"


def summarize(files: Sequence[Path]) -> dict[str, object]:
    """Return the tables of all tests in some JUnit files; a test that stands in several counts with each run."""
    by_folder, by_kind, by_fixture, by_test = Sums(), Sums(), Sums(), Sums()
    seen: dict[Path, dict[str, Code]] = {}
    outcomes = Counter[str]()
    for case in (case for file in files for case in ET.parse(file).iter("testcase")):
        path, name = file_of(case.get("classname", "")), case.get("name", "").partition("[")[0]
        seconds = float(case.get("time", 0.0))
        if path not in seen:
            seen[path] = visible_from(path)
        fixtures, names = reached(name, seen[path])
        place = path.relative_to(ROOT / "tests").parent
        by_folder.add("/".join(place.parts[:2]) or ".", seconds)
        by_kind.add(kind_of(fixtures, names), seconds)
        by_test.add(f"{path.relative_to(ROOT / 'tests')}::{name}", seconds)
        for fixture in fixtures - SHARED:
            by_fixture.add(fixture, seconds)
        outcomes[next((one.tag for one in case if one.tag in {"failure", "error", "skipped"}), "passed")] += 1
    return {
        "tests": sum(by_kind.tests.values()),
        "functions": len(by_test.tests),
        "seconds": round(sum(by_kind.seconds.values()), 1),
        "outcomes": dict(outcomes),
        "by_directory": by_folder.rows(),
        "by_kind": by_kind.rows(),
        "by_fixture": by_fixture.rows(MOST),
        "slowest": by_test.rows(MOST),
    }


def table_of(found: Mapping[str, object]) -> str:
    """Return the tables as text."""
    lines = [f"{found['tests']} tests of {found['functions']} functions, {found['seconds']} s: {found['outcomes']}"]
    for title in ("by_kind", "by_directory", "by_fixture", "slowest"):
        rows = found[title]
        assert isinstance(rows, list)
        lines += ["", f"{'seconds':>9} {'tests':>6}  {title.replace('_', ' ')}"]
        lines += [f"{row['seconds']:9.1f} {row['tests']:6}  {row['name']}" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the files, print the tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--to", type=Path)
    arguments = parser.parse_args()
    found = summarize(arguments.files)
    text = table_of(found)
    sys.stdout.write(text)
    if arguments.to is not None:
        arguments.to.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        arguments.to.with_suffix(".txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
