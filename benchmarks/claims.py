"""Which claim of the pages rests on which results file: each figure calculated anew from the file's raw values.

claims.yaml lists the sentences, with a name and a format in place of each figure, and which calculation
(tables/claims.py) gives these from which file of results/. A sentence with its figures must stand in its document, word
for word. A calculation that gives several rows has as many sentences, such as the rows of a table.

    claims.py            each claim: document, file, revision and its age in commits, as written, as recomputed
    claims.py --update   writes the recomputed figures into the documents
Exit codes: 0; 1 a figure is not what its file says, or a sentence is not there.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from autotune.frozen import FrozenModel
from benchmarks import ROOT
from benchmarks.tables.claims import CALCULATIONS, Figures

__all__ = ["Claim", "ClaimsFile", "Told", "read_claims", "told_of", "uncovered", "updated"]

CLAIMS = ROOT / "benchmarks" / "claims.yaml"
RESULTS = ROOT / "benchmarks" / "results"
_FIGURE = r"[-+]?\d[\d.,]*(?<![.,])(?: %)?|-"
"""A number, with its percent sign; a dash where there is none."""


class Claim(FrozenModel):
    """A sentence whose figures a results file supports."""

    document: str
    file: str
    """The benchmark's name: results/NAME-MACHINE.json."""
    calculation: str
    says: str
    """With {name:format} in place of each figure; a format that ends in % puts a space before it."""


class ClaimsFile(FrozenModel):
    """claims.yaml."""

    claims: tuple[Claim, ...]
    not_measured: Mapping[str, tuple[str, ...]]
    """By document, wording with digits that no benchmark measures, such as names, sizes and targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A sentence as its file has it, and as it is written."""

    claim: Claim
    recomputed: str
    written: str | None
    """None: no such sentence stands in the document, whatever its figures."""

    @property
    def is_held(self) -> bool:
        """Whether it is written as it was recomputed."""
        return self.written == self.recomputed


class _Figures(Formatter):
    """Formats 0.042 by ".1%" as "4.2 %", and None as "-"."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or isinstance(value, str):
            return value or "-"
        shown = format(value, format_spec)
        return f"{shown[:-1]} %" if format_spec.endswith("%") else shown


_FORMATTER = _Figures()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--update", action="store_true", help="write the recomputed figures into the documents"
    )
    is_update = parser.parse_args().update
    claims = read_claims().claims
    if is_update:
        for document in {claim.document for claim in claims}:
            path = ROOT / document
            path.write_text(
                updated(path.read_text(), [claim for claim in claims if claim.document == document])
            )
    told = [one for claim in claims for one in told_of(claim)]
    _print(told)
    return 0 if all(one.is_held for one in told) else 1


def read_claims(path: Path = CLAIMS) -> ClaimsFile:
    """Read claims.yaml."""
    return ClaimsFile.model_validate(yaml.safe_load(path.read_text()))


def told_of(claim: Claim) -> Iterator[Told]:
    """Each sentence of a claim, recomputed and as its document has it."""
    text = (ROOT / claim.document).read_text()
    for figures in _rows(claim):
        found = re.search(_pattern(claim, figures), text)
        yield Told(
            claim=claim,
            recomputed=_on_one_line(_FORMATTER.format(claim.says, **figures)),
            written=None if found is None else _on_one_line(found[0]),
        )


def updated(text: str, claims: Sequence[Claim]) -> str:
    """A document with the recomputed figures in place of those written; line breaks stay."""
    for claim in claims:
        for figures in _rows(claim):
            found = re.search(_pattern(claim, figures), text)
            if found is not None:
                text = (
                    text[: found.start()] + _refilled(found, claim, figures) + text[found.end() :]
                )
    return text


def uncovered(text: str, document: str, claims: ClaimsFile) -> list[str]:
    """What of a document's text has digits and is in no claim, nor among what no benchmark measures."""
    for claim in claims.claims:
        if claim.document == document:
            for figures in _rows(claim):
                text = re.sub(_pattern(claim, figures), " ", text)
    for wording in claims.not_measured.get(document, ()):
        text = re.sub(_spaced(wording), " ", text)
    return [line for line in text.splitlines() if re.search(r"\d", line)]


def _rows(claim: Claim) -> Sequence[Figures]:
    found = CALCULATIONS[claim.calculation](_results_of(claim.file))
    return found if isinstance(found, list) else [found]


@lru_cache
def _document_of(file: str) -> Mapping[str, Any]:
    """The newest results file, of whichever machine, quick runs left out."""
    paths = [path for path in RESULTS.glob(f"{file}-*.json") if not path.stem.endswith("-quick")]
    documents: list[Mapping[str, Any]] = [json.loads(path.read_text()) for path in paths]
    return max(documents, key=lambda document: str(document["written"]))


def _results_of(file: str) -> Mapping[str, Any]:
    results: Mapping[str, Any] = _document_of(file)["results"]
    return results


def _pattern(claim: Claim, figures: Figures) -> str:
    """A sentence with any figures in place of its own; words that a calculation gives are those of this row.

    A row of a table is a whole line: others begin as it does.
    """
    parts = []
    for literal, name, _, _ in _FORMATTER.parse(claim.says):
        parts.append(_spaced(literal))
        if name is not None:
            value = figures[name]
            parts.append(f"({_spaced(value)})" if isinstance(value, str) else f"({_FIGURE})")
    sentence = "".join(parts)
    return f"(?m)^{sentence}$" if claim.says.startswith("|") else sentence


def _spaced(text: str) -> str:
    """A pattern for a text, however its lines are broken."""
    return re.sub(r"(?:\\ |\\\n|\s)+", lambda _: r"\s+", re.escape(text))


def _refilled(found: re.Match[str], claim: Claim, figures: Figures) -> str:
    text, at = found[0], 0
    fields = [
        (name, spec or "") for _, name, spec, _ in _FORMATTER.parse(claim.says) if name is not None
    ]
    pieces = list[str]()
    for number, (name, spec) in enumerate(fields, start=1):
        start, end = (edge - found.start() for edge in found.span(number))
        pieces += [text[at:start], _FORMATTER.format_field(figures[name], spec)]
        at = end
    return "".join([*pieces, text[at:]])


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _print(told: Sequence[Told]) -> None:
    for one in told:
        revisions = ", ".join(
            f"{revision} ({_age(revision)})" for revision in _revisions(one.claim.file)
        )
        print(f"{one.claim.document} <- {one.claim.file}, {one.claim.calculation}, {revisions}")
        print(
            f"  {one.recomputed}"
            if one.is_held
            else f"  file:    {one.recomputed}\n  written: {one.written}"
        )
    print(f"{sum(one.is_held for one in told)} of {len(told)} as their files have them")


def _revisions(file: str) -> list[str]:
    """Those that the file's parts were measured with; the file's own where its parts tell none."""
    found = dict.fromkeys(_told_revisions(_results_of(file)))
    return list(found) or [str(_document_of(file)["git_revision"])]


def _told_revisions(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("revision"), str):
            yield value["revision"]
        for part in value.values():
            yield from _told_revisions(part)
    elif isinstance(value, list):
        for part in value:
            yield from _told_revisions(part)


@lru_cache
def _age(revision: str) -> str:
    command = ["git", "rev-list", "--count", f"{revision.removesuffix('-changed')}..HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return f"{done.stdout.strip()} commits old" if done.returncode == 0 else "not in this history"


if __name__ == "__main__":
    sys.exit(main())
