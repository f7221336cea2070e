"""Sum up the seconds of a run of the tests: by directory, by how many processes a test starts, and by fixture.

    python -m pytest -p tests.seconds --junitxml RUN.xml ...
    python -m tests.seconds RUN.xml --to benchmarks/results/NAME

As a plugin it notes with each test the processes that the test's own process starts, trials of a fork server among
them, and the seconds of each fixture that is set up for it. Not counted are what a started process starts in its turn,
and what multiprocessing starts other than by a fork.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from autotune.launch.local import LocalLauncher

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty"}
_MOST = 40
"""Rows of the tables of fixtures and of the slowest tests."""
_WORTH_S = 0.01
"""Of a fixture, to be noted: a parameter is a fixture as well."""
_started = 0
_set_up: list[tuple[str, float]] = []
Rows = list[dict[str, Any]]


def pytest_configure() -> None:
    """Count the processes that this process starts, and the trials that it has a fork server start."""
    launch = LocalLauncher.launch

    def count(event: str, _: object) -> None:
        global _started  # noqa: PLW0603 - an audit hook knows no test
        _started += event in _STARTS

    def counted(self: LocalLauncher, *arguments: Any) -> Any:
        count("os.fork", None)
        return launch(self, *arguments)

    sys.addaudithook(count)
    LocalLauncher.launch = counted  # type: ignore[method-assign, assignment] # while seconds are counted


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    """Note how long a fixture takes, without those that it asks for."""
    begun = perf_counter()
    try:
        return (yield)
    finally:
        if (took := perf_counter() - begun) > _WORTH_S:
            _set_up.append((fixturedef.argname, took))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Write down what was counted since the last test."""
    global _started  # noqa: PLW0603 - as above
    try:
        return (yield)
    finally:
        item.user_properties += [
            ("processes", _started),
            *((f"fixture {name}", took) for name, took in _set_up),
        ]
        _started = 0
        _set_up.clear()


def summarize(files: Iterable[Path]) -> dict[str, Any]:
    """Return the tables of all tests in some JUnit files; a test that stands in several counts with each run."""
    tests: Rows = [_test(case) for file in files for case in ET.parse(file).iter("testcase")]
    fixtures = [
        {"name": name, "seconds": took} for test in tests for name, took in test["fixtures"]
    ]
    starting = [test for test in tests if test["processes"]]
    return {
        "tests": len(tests),
        "functions": len({test["name"] for test in tests}),
        "tests_that_start_processes": len(starting),
        "seconds": round(sum(test["seconds"] for test in tests), 1),
        "outcomes": {row["name"]: row["count"] for row in _sums(tests, "outcome")},
        "by_kind": _sums(tests, "kind"),
        "by_directory": _sums(tests, "directory"),
        "by_fixture": _sums(fixtures, "name")[:_MOST],
        "slowest": _sums(tests, "name")[:_MOST],
        "starting": [row for row in _sums(starting, "name") if row["seconds"] >= 0.1],
    }


def _test(case: ET.Element) -> dict[str, Any]:
    place, name = (
        case.get("classname", "").removeprefix("tests."),
        case.get("name", "").partition("[")[0],
    )
    noted = [(str(one.get("name")), float(str(one.get("value")))) for one in case.iter("property")]
    processes = int(dict(noted).get("processes", 0))
    ended = (one.tag for one in case if one.tag in {"failure", "error", "skipped"})
    return {
        "name": f"{place}::{name}",
        "directory": "/".join(place.split(".")[:-1][:2]) or ".",
        "seconds": float(case.get("time", 0.0)),
        "outcome": next(ended, "passed"),
        "processes": processes,
        "kind": ("no process", "one process")[processes] if processes < 2 else "several processes",
        "fixtures": [
            (name.removeprefix("fixture "), took)
            for name, took in noted
            if name.startswith("fixture ")
        ],
    }


def _sums(rows: Iterable[Mapping[str, Any]], key: str) -> Rows:
    """Return count and seconds by a key, most seconds first."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[row[key]].append(row["seconds"])
    sums = [
        {"name": name, "count": len(all_s), "seconds": round(sum(all_s), 1)}
        for name, all_s in groups.items()
    ]
    return sorted(sums, key=lambda row: -row["seconds"])


def main() -> None:
    """Read the files, print the tables and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--to", type=Path)
    arguments = parser.parse_args()
    found = summarize(arguments.files)
    lines = [f"{name}: {told}" for name, told in found.items() if not isinstance(told, list)]
    for title, rows in ((name, told) for name, told in found.items() if isinstance(told, list)):
        lines += ["", f"{'seconds':>9} {'count':>6}  {title.replace('_', ' ')}"]
        lines += [f"{row['seconds']:9.1f} {row['count']:6}  {row['name']}" for row in rows]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if arguments.to is not None:
        arguments.to.with_suffix(".json").write_text(
            json.dumps(found, indent=1) + "\n", encoding="utf-8"
        )
        arguments.to.with_suffix(".txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
