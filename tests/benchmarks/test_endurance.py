"""benchmarks/endurance.py: cases are written down as they end, gone on with, and judged together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

import pytest

from benchmarks import endurance
from benchmarks.endurance import go_on, judged
from benchmarks.measures.endurance.part import Part
from benchmarks.measures.part_guard import Figures
from benchmarks.measures.recording import Recording


def run(case: str, folder: Path) -> Figures:
    """Cases are named by how they end; those that ended well told where they ran."""
    match case:
        case "dies":
            os._exit(3)
        case "raises":
            raise KeyError("no trial")
        case "breaks":
            return {"fault": "trial lost"}
    return {"folder": str(folder), "was_empty": not list(folder.iterdir())}


def count(cases: Mapping[str, Figures]) -> Figures:
    return {"promises": {"nothing_lost": not any("fault" in found for found in cases.values())}}


def part(*cases: str) -> Part:
    def named(_: bool) -> Sequence[str]:
        return cases

    return Part(proves="nothing is lost", cases=named, run=run, judge=count, limit_s=60.0)


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(
        benchmark="endurance", arguments={}, machine={}, path=tmp_path / "found.json", started="now"
    )


def test_a_case_that_dies_raises_or_breaks_a_promise_is_told_and_the_next_one_runs(
    recording: Recording,
) -> None:
    go_on("soak", part("dies", "raises", "breaks", "well"), recording, inf, quick=False)
    found = recording.results["soak"]
    assert (found["tried"], found["of"]) == (4, 4)
    assert found["errors"] == ["dies", "raises"]
    assert found["faults"] == {"breaks": "trial lost"}
    assert found["promises"] == {"nothing_lost": False}
    assert "KeyError: 'no trial'" in found["cases"]["raises"]["error"]
    assert found["cases"]["well"]["was_empty"]
    assert not Path(found["cases"]["well"]["folder"]).exists()


def test_a_further_call_tries_what_is_missing_alone(recording: Recording) -> None:
    go_on("soak", part("first"), recording, inf, quick=False)
    before = recording.results["soak"]["cases"]["first"]
    go_on("soak", part("first", "second"), recording, inf, quick=False)
    assert [*recording.results["soak"]["cases"]] == ["first", "second"]
    assert recording.results["soak"]["cases"]["first"] == before


def test_no_case_begins_once_the_time_of_a_call_is_over(recording: Recording) -> None:
    go_on("soak", part("first"), recording, 0.0, quick=False)
    assert recording.results == {}


def test_a_promise_is_not_kept_where_a_case_did_not_end() -> None:
    found = judged(part("a", "b"), {"a": {"error": "KeyError"}}, quick=False)
    assert found == {
        "tried": 1,
        "of": 2,
        "errors": ["a"],
        "faults": {},
        "promises": {"nothing_lost": None},
    }


@pytest.mark.parametrize("is_quick", [True, False])
def test_every_part_names_each_of_its_cases_once_and_always_alike(is_quick: bool) -> None:
    for each in endurance.PARTS.values():
        cases = [*each.cases(is_quick)]
        assert cases
        assert len(cases) == len(set(cases))
        assert cases == [*each.cases(is_quick)]
