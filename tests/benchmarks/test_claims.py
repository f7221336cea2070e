"""Every figure of docs/certainty.md, and of the tables of benchmarks/README.md, is what its results file says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import ROOT, claims
from benchmarks.claims import Claim, ClaimsFile, read_claims, told_of, uncovered, updated
from benchmarks.tables.claims import CALCULATIONS

CLAIMS = read_claims()
TEXT = "Before.\nA trial lies 4.2 %\n  beside it in 3 pairs; 15 s.\nAfter 7 s.\n"
ONE = Claim(
    document="PAGE.md",
    file="one",
    calculation="one",
    says="A trial lies {error:.1%} beside it in {pairs} pairs",
)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A document and two results files of its own; the newer one: an error of 12.3 % in 4 pairs."""
    (tmp_path / "PAGE.md").write_text(TEXT)
    for name, written, error in (("before", "2026-01-01", 0.9), ("here", "2026-01-02", 0.1234)):
        document = {"git_revision": "abc", "written": written, "results": {"error": error}}
        (tmp_path / f"one-{name}.json").write_text(json.dumps(document))
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    monkeypatch.setitem(CALCULATIONS, "one", lambda results: {**results, "pairs": 4})
    claims._document_of.cache_clear()
    yield tmp_path / "PAGE.md"
    claims._document_of.cache_clear()


@pytest.mark.parametrize("claim", CLAIMS.claims, ids=[one.says[:40] for one in CLAIMS.claims])
def test_what_is_written_is_what_the_file_says(claim: Claim) -> None:
    for told in told_of(claim):
        assert told.written == told.recomputed, "python -m benchmarks.claims --update"


def test_every_figure_of_how_sure_it_is_stands_in_the_list() -> None:
    assert (
        uncovered((ROOT / "docs" / "certainty.md").read_text(), "docs/certainty.md", CLAIMS) == []
    )


def test_every_row_of_a_table_with_figures_is_in_the_list() -> None:
    rows = [
        line
        for line in (ROOT / "benchmarks" / "README.md").read_text().splitlines()
        if line.startswith("|")
    ]
    assert uncovered("\n".join(rows), "benchmarks/README.md", CLAIMS) == []


def test_a_figure_that_differs_from_its_file_is_told_as_written_and_as_recomputed(
    page: Path,
) -> None:
    (told,) = told_of(ONE)
    assert told.written is not None
    assert [part in told.written for part in ("4.2 %", "3 pairs")] == [True, True]
    assert [part in str(told.recomputed) for part in ("12.3 %", "4 pairs")] == [True, True]
    assert not told.is_held
    page.write_text("Nothing.")
    assert [one.written for one in told_of(ONE)] == [None]


def test_an_update_changes_the_figures_and_nothing_else(page: Path) -> None:
    changed = updated(page.read_text(), [ONE])
    assert changed == TEXT.replace("4.2 %", "12.3 %").replace("3 pairs", "4 pairs")
    page.write_text(changed)
    assert [one.is_held for one in told_of(ONE)] == [True]


def test_a_row_that_another_one_begins_with_is_not_taken_for_it(page: Path) -> None:
    row = Claim(document="PAGE.md", file="one", calculation="one", says="| one | {error:.1%} |")
    page.write_text("| one | 4.2 % | 7 |\n| one | 12.3 % |\n")
    assert [one.is_held for one in told_of(row)] == [True]
    assert updated(page.read_text(), [row]) == page.read_text()


@pytest.mark.usefixtures("page")
def test_what_is_in_no_claim_is_found_by_its_digits() -> None:
    known = ClaimsFile(claims=(ONE,), not_measured={"PAGE.md": ("After 7 s",)})
    assert uncovered(TEXT, "PAGE.md", known) == [" ; 15 s."]


def test_each_calculation_is_used_and_each_claim_has_one() -> None:
    assert {claim.calculation for claim in CLAIMS.claims} == set(CALCULATIONS)
