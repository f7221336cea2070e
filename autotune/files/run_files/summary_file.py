"""summary.json and trials.jsonl, read back: what is whole, or which of the two is damaged, and where.

Comes in: the two paths, or the bytes of lines. Goes out: a RunSummary, records.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import from_json

from autotune.errors import ConfigError
from autotune.protocol.disk import read_own
from autotune.records.run_summary import RunSummary
from autotune.records.trial import TrialRecord

__all__ = ["first_of", "read_summary_files", "record_of", "whole_lines"]


def read_summary_files(summary: Path, trials: Path) -> RunSummary:
    """The summary of a run, whose trials lie in another file.

    Raises:
        ConfigError: a file is missing, can't be read, or does not hold what it should; the message names it.
    """
    head, lines = _read(summary), whole_lines(_read(trials))
    joined = head.strip().removesuffix(b"}") + b', "trials": [' + b",".join(lines) + b"]}"
    try:
        found = RunSummary.model_validate_json(joined)
    except ValidationError as error:
        raise _of_this_version(summary.parent, _culprit(head, lines, error)) from error
    missing = sorted(_numbers_used(found) - {trial.number for trial in found.trials})
    if missing:
        raise _of_this_version(summary.parent, f"trials.jsonl lacks trial {missing[0]}, which summary.json speaks of")
    return found


def whole_lines(written: bytes) -> list[bytes]:
    """The lines of a file of JSON but for a last one that a kill has torn."""
    *lines, last = written.split(b"\n")
    try:
        from_json(last)
    except ValueError:
        return lines
    return [*lines, last]


def record_of(line: bytes) -> TrialRecord | None:
    """The trial that a line holds; None where it holds none of this version."""
    try:
        return TrialRecord.model_validate_json(line)
    except ValidationError:
        return None


def first_of(error: ValidationError) -> str:
    """Where and how data first breaks a rule, in a few words."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def _read(file: Path) -> bytes:
    try:
        return read_own(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        rule = f"a run folder must hold {file.name}, but {file.parent} does not ({error.strerror})"
        raise ConfigError(f"{rule}; name that of a finished search") from error
    except (OSError, ValueError) as error:  # a ValueError where the path is none
        reason = getattr(error, "strerror", None) or error
        rule = f"a run folder must hold {file.name} as a file that can be read, but {file}: {reason}"
        raise ConfigError(f"{rule}; name that of a finished search") from error


def _of_this_version(folder: Path, but: str) -> ConfigError:
    remedy = "run the same search again, which writes both files anew from study.db"
    return ConfigError(f"{folder} must be a run folder of this version of autotune, but {but}; {remedy}")


def _culprit(head: bytes, lines: Sequence[bytes], error: ValidationError) -> str:
    """Which file, and where in it, does not hold what it should."""
    try:
        is_object = isinstance(from_json(head), dict)
    except ValueError as broken:
        return f"summary.json is no JSON ({broken})"
    if not is_object:
        return "summary.json holds no JSON object"
    for place, line in enumerate(lines, start=1):
        try:
            TrialRecord.model_validate_json(line)
        except ValidationError as broken:
            return f"line {place} of trials.jsonl: {first_of(broken)}"
    return f"summary.json: {first_of(error)}"


def _numbers_used(summary: RunSummary) -> set[int]:
    """Return the trials that a summary can't do without: the baseline, what was chosen, and what ran more than once."""
    chosen = summary.recommendation
    return set() if chosen is None else {0, chosen.number, *(one.number for one in chosen.confirmations)}
