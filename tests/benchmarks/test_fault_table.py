"""The table of faults: each is made somewhere, and what is seen of it can go against it."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.measures.endurance import fault_table
from benchmarks.measures.endurance.fault_table import FAULTS, PHASES
from benchmarks.measures.endurance.fault_verdict import Seen, faults_in

WORKLOAD = Path(fault_table.__file__).with_name("fault_workload.py")
ENDED = Seen(
    exit_code=2,
    output="",
    errors="error: the trial's process was ended by a segmentation fault (SIGSEGV)",
    summary=None,
    diagnosis="",
    curves="",
    struck=frozenset({"probe"}),
    strikes=1,
    took_s=5.0,
    logs={},
    deadline_s=20.0,
)
"""A search whose probe has met a segmentation fault."""


def test_each_fault_is_made_by_the_workload_under_its_name() -> None:
    made = set[str]()
    for node in ast.parse(WORKLOAD.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = [
            name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
        ]
        made |= {name.id for name in names} | (
            {node.name} if isinstance(node, ast.FunctionDef) else set()
        )
    assert {f"_{name}" for name in FAULTS} <= made


def test_the_table_has_as_many_cells_as_were_asked_for() -> None:
    assert len(FAULTS) >= 24
    assert len(FAULTS) * len(PHASES) >= 192


def test_what_ends_as_it_must_has_no_fault() -> None:
    assert [*faults_in(FAULTS["segfault"], ("probe",), ENDED)] == []


@pytest.mark.parametrize(
    ("seen", "named"),
    [
        (replace(ENDED, struck=frozenset()), "probe"),
        (replace(ENDED, exit_code=0), "exit code"),
        (replace(ENDED, errors="error: out of memory"), "'SIGSEGV'"),
        (replace(ENDED, errors='SIGSEGV at "/autotune/worker/rank.py"'), "code"),
    ],
)
def test_what_ends_otherwise_is_a_fault(seen: Seen, named: str) -> None:
    assert named in next(faults_in(FAULTS["segfault"], ("probe",), seen))


def test_a_harmless_fault_must_not_end_anything() -> None:
    (first, *_) = faults_in(FAULTS["cwd"], ("probe",), ENDED)
    assert "exit code 2" in first
