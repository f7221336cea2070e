"""Every note that the package can hand on has its English: by its code, with the figures that the sentence needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from jinja2 import meta, nodes

import autotune
from autotune.note import note
from autotune.report.wording.catalogue import load_english, load_sentences, make_environment
from autotune.report.wording.say import say

PACKAGE = Path(autotune.__file__).parent
FILES = sorted((PACKAGE / "report" / "wording" / "english").glob("*.yaml"))
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


@cache
def literals() -> frozenset[str]:
    """Every text that stands in the package, keywords' values included."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    texts = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return frozenset(text for text in texts if isinstance(text, str))


def needed(code: str) -> set[str]:
    """The figures that a sentence and its parts always ask for; none where a figure's presence decides what is said."""
    tree = make_environment().parse(load_sentences()[code])
    if any(test.name == "defined" for test in tree.find_all(nodes.Test)):
        return set()
    names = meta.find_undeclared_variables(tree) - make_environment().globals.keys()
    parts = [part for part in meta.find_referenced_templates(tree) if part is not None]
    given = {
        each.node.name
        for each in tree.find_all(nodes.Filter)
        if isinstance(each.node, nodes.Name) and each.name == "default"
    }
    return names.union(*map(needed, parts)) - given


def test_every_code_has_its_wording() -> None:
    missing = [(call.place, code) for call in calls() for code in call.codes or () if code not in load_sentences()]
    assert missing == []


def test_every_wording_is_used() -> None:
    """By a literal somewhere: a diagnosis names some of its sentences by a kind and a suffix."""
    used = literals()
    sentences = {code for code in load_sentences() if not code.startswith("_")}
    assert {code for code in sentences if not {code, *(code.removesuffix(end) for end in SUFFIXES)} & used} == set()


def test_what_a_sentence_chooses_by_is_a_text_of_the_package() -> None:
    """A choice by a kind or a reason that no room knows would never be taken."""
    used, chosen = literals(), set[str]()
    for template in load_sentences().values():
        for choice in make_environment().parse(template).find_all(nodes.Compare):
            chosen |= {text.value for text in choice.find_all(nodes.Const) if isinstance(text.value, str)}
    assert chosen <= used


def test_every_part_is_included_by_a_sentence() -> None:
    trees = (make_environment().parse(template) for template in load_sentences().values())
    included = {part for tree in trees for part in meta.find_referenced_templates(tree)}
    assert {code for code in load_sentences() if code.startswith("_")} <= included <= load_sentences().keys()


def test_a_code_stands_in_one_room_alone() -> None:
    assert sum(len(load_english(path.stem)) for path in FILES if path.stem != "words") == len(load_sentences())


def test_no_key_stands_twice_in_a_file() -> None:
    for path in FILES:
        keys = re.findall(r"^(\w+):", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert len(keys) == len(set(keys)) == len(load_english(path.stem)), path.name


def test_each_call_gives_every_figure_that_its_sentence_needs() -> None:
    for call in calls():
        for code in call.codes or ():
            if call.figures is not None:
                assert needed(code) <= call.figures, call.place


def test_every_template_can_be_read() -> None:
    for code in load_sentences():
        make_environment().get_template(code)


def test_the_scan_sees_literals_choices_and_mappings() -> None:
    source = 'note("a", x=1)\nnote("b" if y else "c", **more)\nnote(name)\nother("d")\n'
    first, second, third = calls_in(source)
    assert (first.codes, first.figures) == (frozenset({"a"}), frozenset({"x"}))
    assert (second.codes, second.figures) == (frozenset({"b", "c"}), None)
    assert third.codes is None


def test_the_figures_that_a_sentence_needs_are_those_of_its_parts_too() -> None:
    assert needed("largest_batch_that_ran") == {
        "error_bytes",
        "limit_bytes",
        "micro_batch_size",
        "peak_bytes",
        "predicted_bytes",
    }


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ size | bytes }} at {{ rate | rate }}", "3.00 GiB at 1,234 samples/s"),
        ("{{ share | share }} in {{ wait | seconds }}", "3.4 % in 2.14 ms"),
        ("{{ count | spec(',') }} of {{ name | capital }}", "1,200 of Xy"),
        ("{{ count | counted('trial') }}, {{ nothing | rate }}", "1,200 trials, \N{EN DASH}"),
    ],
)
def test_a_template_writes_figures_in_their_units(template: str, sentence: str) -> None:
    figures = {"size": 3 * 2**30, "rate": 1234.0, "share": 0.034, "wait": 2.14e-3, "count": 1200, "nothing": None}
    assert make_environment().from_string(template).render(**figures, name="xy") == sentence


def test_a_stored_sentence_passes_and_an_unknown_code_is_shown_with_its_figures() -> None:
    stored = "A sentence of an older version."
    assert say(stored) == stored
    assert say(note("of_another_version", number=3)) == "of_another_version: number=3"
