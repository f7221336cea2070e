"""A part of the endurance benchmark: named cases, each tried in a process of its own, and what they tell together."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.measures.part_guard import Figures

__all__ = ["TORCHS_CACHE", "Part", "error_in", "without_places"]

TORCHS_CACHE = "torchinductor_"
"""How the name of a cache begins that torch makes once for all processes of a user, in the folder for temporary files.

Source: torch/_inductor/runtime/cache_dir_utils.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One promise, and the cases that it is held against."""

    proves: str
    """In one line, for people."""
    cases: Callable[[bool], Sequence[str]]
    """Their names, in order; few of them where True is given, for a quick run. The same names in every call."""
    run: Callable[[str, Path], Figures]
    """Try a case; the folder is empty, its own, and removed afterwards. What it finds, JSON; "fault": a sentence, where
    the promise was broken. An exception is written down as an error of the case."""
    judge: Callable[[Mapping[str, Figures]], Figures]
    """Of all cases tried so far, errors apart: figures for people; "promises": each True, False, or None where it could
    not be judged."""
    limit_s: float
    """A case that takes longer is ended, with all that it has started, and is an error."""


def error_in(told: str) -> str:
    """What a command says from its error on; "" where it says none. Notes before it may name whatever else runs."""
    return told[place:] if (place := told.find("error: ")) >= 0 else ""


def without_places(found: Figures, folder: Path) -> Figures:
    """Figures whose texts name neither the case's folder nor this machine's: what is kept speaks of the project."""
    text = json.dumps(found, ensure_ascii=False)
    for place, name in (
        (folder, "CASE"),
        (sys.prefix, "VENV"),
        (sys.base_prefix, "PYTHON"),
        (ROOT, "PROJECT"),
    ):
        text = text.replace(str(place), name)
    kept: dict[str, Any] = json.loads(text)
    return kept
