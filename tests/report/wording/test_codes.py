"""Every note that the package can hand on has its English: by its code, with the figures that the sentence needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

import pytest

import autotune
from autotune.note import Note, note
from autotune.report.wording.say import WORDINGS, say
from autotune.report.wording.template import fill

PACKAGE = Path(autotune.__file__).parent
SUFFIXES = ("_basis", "_evidence")
"""Of further sentences that go with a code."""
IMPORT = re.compile(r"^from autotune\.note import [^\n]*\bnote\b", flags=re.MULTILINE)


@dataclass(frozen=True)
class Call:
    """A `note(...)` in the source."""

    place: str
    codes: frozenset[str] | None
    """None where the code is no literal."""
    figures: frozenset[str] | None
    """The keywords; None where some come from a mapping."""


def calls_in(source: str, place: str = "") -> Iterator[Call]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "note":
            names = [keyword.arg for keyword in node.keywords]
            figures = None if None in names else frozenset(name for name in names if name is not None)
            codes = codes_of(node.args[0]) if node.args else None
            yield Call(place=f"{place}:{node.lineno}", codes=codes, figures=figures)


def codes_of(code: ast.expr) -> frozenset[str] | None:
    """A literal, or a choice between literals."""
    if isinstance(code, ast.Constant) and isinstance(code.value, str):
        return frozenset({code.value})
    if isinstance(code, ast.IfExp):
        parts = codes_of(code.body), codes_of(code.orelse)
        return None if None in parts else frozenset().union(*(part for part in parts if part))
    return None


def calls() -> list[Call]:
    """Those of every module that imports the function; elsewhere the name is another's."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    users = {path: source for path, source in sources.items() if IMPORT.search(source)}
    return [call for path, source in users.items() for call in calls_in(source, str(path.relative_to(PACKAGE)))]


def literals() -> set[str]:
    """Every text that stands in the package outside of the wording, keywords' values included."""
    trees = (
        ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py") if "wording" not in path.parts
    )
    texts = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {text for text in texts if isinstance(text, str)}


def placeholders(template: str) -> set[str]:
    """The figures that a template names, those in its units included: "{peak:beside={limit}}" names two."""
    names: set[str] = set()
    for _, name, spec, _ in Formatter().parse(template):
        if name is not None:
            names |= {name.partition(".")[0].partition("[")[0]} | placeholders(spec or "")
    return names


def test_every_code_has_its_wording() -> None:
    missing = [(call.place, code) for call in calls() for code in call.codes or () if code not in WORDINGS]
    assert missing == []


def test_every_wording_is_used() -> None:
    """By a literal somewhere: a diagnosis names some of its sentences by a kind and a suffix."""
    used = literals()
    assert {code for code in WORDINGS if not {code, *(code.removesuffix(end) for end in SUFFIXES)} & used} == set()


def test_each_call_gives_every_figure_that_its_template_names() -> None:
    for call in calls():
        for wording in (WORDINGS.get(code) for code in call.codes or ()):
            if isinstance(wording, str) and call.figures is not None:
                assert placeholders(wording) <= call.figures, call.place


def test_every_template_can_be_filled() -> None:
    for code, wording in WORDINGS.items():
        if isinstance(wording, str):
            assert None not in placeholders(wording), code
            list(Formatter().parse(wording))


def test_the_scan_sees_literals_choices_and_mappings() -> None:
    source = 'note("a", x=1)\nnote("b" if y else "c", **more)\nnote(name)\nother("d")\n'
    first, second, third = calls_in(source)
    assert (first.codes, first.figures) == (frozenset({"a"}), frozenset({"x"}))
    assert (second.codes, second.figures) == (frozenset({"b", "c"}), None)
    assert third.codes is None
    assert placeholders("{peak:beside={limit}} of {name.part}, {low:to={high}}") == {
        "peak",
        "limit",
        "name",
        "low",
        "high",
    }


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{size:bytes} at {rate:rate}", "3.00 GiB at 1,234 samples/s"),
        ("{share:share} in {wait:seconds}", "3.4 % in 2.14 ms"),
        ("{size:beside={limit}} of {limit:bytes}", "3.0 GiB of 16.0 GiB"),
        ("{low:to={high}} times", "2.35 to 2.47 times"),
        ("{count:,} of {name}", "1,200 of x"),
    ],
)
def test_a_template_writes_figures_in_their_units(template: str, sentence: str) -> None:
    figures = {"size": 3 * 2**30, "limit": 2**34, "rate": 1234.0, "share": 0.034, "wait": 2.14e-3, "count": 1200}
    said = fill(template, {**figures, "name": "x", "low": 2.351, "high": 2.474})
    assert said == sentence
    assert fill("{low:to={high}}", {"low": 2.0, "high": float("inf")}) == "unknown"


def test_a_stored_sentence_passes_and_an_unknown_code_is_shown_with_its_figures() -> None:
    assert say("A sentence of an older version.") == "A sentence of an older version."
    assert say(note("of_another_version", number=3)) == "of_another_version: number=3"
    assert isinstance(note("x"), Note)
