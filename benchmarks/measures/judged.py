"""Hold the document of a diagnosis against what it should have found: cause, remedy, false remedies, promise. Pure.

Comes in: the JSON of `autotune diagnose --json` and an expectation. Goes out: figures for the results file. The
document is read as plain JSON, with defaults for what an older version did not write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.cases.complaints.expectations import ANY, Expectation, Remedies
from benchmarks.measures.pairs import mean_ratio

Document = Mapping[str, Any]


def judge(document: Document, expected: Expectation, source: str = "") -> dict[str, Any]:
    """Return whether a diagnosis names the right cause, and where it has the right remedy.

    Args:
        document: The diagnosis.
        expected: The right answer.
        source: Text of train.py, whose lines the diagnosis may name.

    Returns:
        Figures: `is_cause_right`; `rank` of the first right remedy among the advice, from 1, None if there is none;
        `is_first` and `is_headline`; the kinds of `false_above`; `promised`, the gain of that remedy.
    """
    advice = document["advice"]
    rank = None
    for number, piece in enumerate(advice, start=1):
        if is_one_of(piece, expected.right, source):
            rank = number
            break
    above = advice if rank is None else advice[: rank - 1]
    false_above = [named(piece) for piece in above if is_one_of(piece, expected.wrong, source)]
    return {
        "verdict": document["verdict"],
        "headline": document["headline"],
        "is_cause_right": is_cause_right(document, expected, source),
        "rank": rank,
        "is_first": rank == 1,
        "is_headline": rank is not None and is_in_headline(advice[rank - 1], document),
        "false_above": false_above,
        "advice": [named(piece) for piece in advice],
        "promised": None if rank is None else promise(advice[rank - 1]),
    }


def is_cause_right(document: Document, expected: Expectation, source: str = "") -> bool:
    """Return whether the first finding is an accepted one, and the answer says what it must."""
    if expected.causes and document["verdict"] not in expected.causes:
        return False
    if not expected.says:
        return True
    answer = [document["headline"], document["findings"][0]["evidence"]]
    answer += [note["text"] for note in document.get("notes", ()) if "text" in note]
    # What is no matter of speed makes no finding: any of the advice may answer it.
    advice = document["advice"] if not expected.causes else document["advice"][:1]
    answer += [piece["text"] + " " + piece["basis"] for piece in advice]
    return any(_is_said(expected.says, text, source) for text in answer)


def is_one_of(piece: Mapping[str, Any], remedies: Remedies, source: str = "") -> bool:
    """Return whether a piece of advice is one of these remedies: by kind, setting or words."""
    if piece["kind"] in remedies.kinds:
        return True
    for name, value in piece.get("settings", {}).items():
        accepted = remedies.settings.get(name)
        if accepted is not None and (accepted == ANY or _holds(accepted, value)):
            return True
    if not remedies.words:
        return False
    return _is_said(remedies.words, piece["text"] + " " + piece.get("place", ""), source)


def _is_said(pattern: str, text: str, source: str) -> bool:
    """Return whether a text contains a pattern, with the script's lines that it names."""
    whole = "\n".join([text, *_named_lines(text, source)])
    return bool(re.search(pattern, whole, re.IGNORECASE | re.DOTALL))


def _named_lines(text: str, source: str) -> list[str]:
    """Return each line of train.py that a text names as train.py:41, and the functions that it is in."""
    lines = source.splitlines()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    found = []
    for match in re.finditer(r"train\.py:(\d+)", text):
        number = int(match[1])
        found += lines[number - 1 : number]
        for node in functions:
            if node.lineno <= number <= (node.end_lineno or node.lineno):
                found.append(node.name)
    return found


def _holds(accepted: Sequence[object], value: object) -> bool:
    """Return whether a value is one of these; False is not 0."""
    return any(each == value and type(each) is type(value) for each in accepted)


def is_in_headline(piece: Mapping[str, Any], document: Document) -> bool:
    """Return whether the headline names this piece of advice."""
    if piece["text"].rstrip(".") in document["headline"]:
        return True
    settings = piece.get("settings")
    notes = document.get("headline_notes", ())
    return bool(settings) and any(
        note.get("figures", {}).get("settings") == settings for note in notes
    )


def named(piece: Mapping[str, Any]) -> str:
    """Return a piece of advice in a word or two: its kind, and the settings that it changes."""
    settings = ", ".join(f"{name}={value}" for name, value in piece.get("settings", {}).items())
    return f"{piece['kind']}({settings})" if settings else str(piece["kind"])


def promise(piece: Mapping[str, Any]) -> dict[str, float | None] | None:
    """Return the gain that a piece of advice promises, with its interval; None if it promises none."""
    gain = piece.get("expected_gain")
    if gain is None:
        return None
    figures = piece.get("figures", {})
    interval = piece.get("gain_interval") or {}
    return {
        "gain": gain,
        "low": interval.get("low", figures.get("gain_low")),
        "high": interval.get("high", figures.get("gain_high")),
    }


def reach(
    pairs: Sequence[tuple[float, float]], promised: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the gain that pairs of runs reached, and whether it is what was promised.

    Args:
        pairs: Throughput of the script as it is, and of its fix.
        promised: What `promise` gave.

    Returns:
        Figures: the `pairs`, the median `gain`, the 95 % interval of the mean; `is_within`: the median lies within the
        promised interval, None if none was promised.
    """
    ratios = [fixed / plain for plain, fixed in pairs]
    interval = mean_ratio(ratios)
    low, high = interval.low - 1, interval.high - 1
    is_within = None
    if promised is not None and promised["low"] is not None and promised["high"] is not None:
        is_within = bool(promised["low"] <= median(ratios) - 1 <= promised["high"])
    return {
        "pairs": [list(pair) for pair in pairs],
        "gain": median(ratios) - 1,
        "low": low,
        "high": high,
        "is_within": is_within,
    }


def summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the shares of all cases that a diagnosis answers right.

    A diagnosis that failed is wrong in each respect. `within` counts only cases with a promise that were followed.
    """
    cases = [found.get("judged") for found in results.values()]
    followed = [found["reached"]["is_within"] for found in results.values() if found.get("reached")]
    kept = [one for one in followed if one is not None]
    count = len(cases)

    def share(holds: Sequence[bool]) -> float | None:
        return sum(holds) / count if count else None

    return {
        "cases": count,
        "failed": sum(one is None for one in cases),
        "cause": share([one is not None and one["is_cause_right"] for one in cases]),
        "first": share([one is not None and one["is_first"] for one in cases]),
        "headline": share([one is not None and one["is_headline"] for one in cases]),
        "no_false_above": share([one is not None and not one["false_above"] for one in cases]),
        "promises": len(kept),
        "within": sum(kept) / len(kept) if kept else None,
    }
