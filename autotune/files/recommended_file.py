"""recommended.yaml, out and in: the settings to use, with their evidence.

Comes in: the RunSummary of a search, or the path of a file. Goes out: the file's text, or the TrainingConfig in it.
`settings` is exact and is all that is read back; the rest is rounded, for people.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite
from os.path import isdir
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator

from autotune.analysis.decisions.run_spread import rate_of_runs
from autotune.errors import ConfigError
from autotune.files.recommended_header import header_of
from autotune.files.recommended_machine import describe_machine
from autotune.files.validation import validated
from autotune.files.yaml_document import KeyPath, Problem, read_document
from autotune.frozen import FrozenModel
from autotune.records.measurement import Interval, Measurement
from autotune.records.recommendation import Recommendation
from autotune.records.run_summary import RunSummary
from autotune.records.trial import runs_of
from autotune.settings.ddp_config import DdpConfig
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import ScriptFacts

__all__ = ["AppliedScript", "read_recommended", "read_script", "recommended_yaml"]

_FORMAT = 1
_DIGITS = 4  # our convention: finer than any measured figure here


def recommended_yaml(summary: RunSummary) -> str:
    """Return the text of recommended.yaml for a summary that has a recommendation."""
    recommendation = summary.recommendation
    assert recommendation is not None, "without a recommendation there is nothing to write"  # noqa: S101 -- a bug of ours
    script = summary.facts.script
    content = {
        "format": _FORMAT,
        "settings": recommendation.config.model_dump(),
        **({} if script is None else _script(summary, script)),
        "learning_rate": _learning_rate(recommendation),
        "evidence": _evidence(summary, recommendation),
        "same_batch": None if recommendation.same_batch is None else recommendation.same_batch.model_dump(),
        "baseline": summary.baseline.model_dump(),
        "machine": describe_machine(summary.environment),
    }
    return header_of(summary, recommendation) + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)


def read_recommended(path: str | Path) -> TrainingConfig:
    """The settings of a recommended.yaml.

    Raises:
        ConfigError: the file can't be read, is no recommended.yaml, or was changed to what breaks a rule.
    """
    path = Path(path)
    if isdir(path):  # noqa: PTH112 - unlike Path.is_dir, no error for a name that no file system takes
        raise ConfigError(f"{path}: is a folder; give the file, such as {path / 'recommended.yaml'}")
    document = read_document(path)
    settings = document.data.get("settings")
    if "format" not in document.data or not isinstance(settings, dict):
        raise ConfigError(
            f"{path}: is not a recommended.yaml (it has no `format` and `settings`); give one that autotune wrote"
        )
    number = document.data["format"]
    if number != _FORMAT or isinstance(number, bool):
        text = f"must be {_FORMAT}, but got {number!r}; read it with the autotune that wrote it, or search again"
        raise ConfigError(*map(str, document.placed([Problem(text=text, path=("format",))])))
    config, problems = validated(TrainingConfig, settings)
    broken = [problem for problem in document.problems if problem.path[:1] in {(), ("settings",)}]
    broken += document.placed([*_left_out(settings), *problems], below=("settings",))
    if config is None or broken:
        raise ConfigError(*map(str, broken))
    return config


def _malloc_switch(switch: str) -> str:
    """Refuse any other variable: one such as LD_PRELOAD would run code where the file is applied."""
    if re.fullmatch(r"MALLOC_(MMAP|TRIM)_THRESHOLD_=[0-9]+", switch) is None:
        raise ValueError(f"must be MALLOC_MMAP_THRESHOLD_=N or MALLOC_TRIM_THRESHOLD_=N, N whole, but got {switch!r}")
    return switch


class AppliedScript(FrozenModel):
    """What a recommended.yaml says of the script that it was found for."""

    command: tuple[str, ...]
    """As it was searched with, placeholders and all."""
    script: ScriptFacts
    """How its settings are reached."""
    malloc: tuple[Annotated[str, AfterValidator(_malloc_switch)], ...] = ()
    """What was set for glibc's malloc in trials, as NAME=value."""


def read_script(path: str | Path) -> AppliedScript:
    """What a recommended.yaml says of the script that it was found for.

    Raises:
        ConfigError: the file can't be read, or was not found for a command.
    """
    document = read_document(Path(path))
    given = {name: document.data.get(name) for name in ("command", "script", "malloc")}
    if given["command"] is None or given["script"] is None:
        raise ConfigError(
            f"{path}: must have been found for a command to be applied to one, but it was found for a model and a "
            "dataset; use autotune.load in your own loop, or search with autotune run -- python train.py"
        )
    found, problems = validated(AppliedScript, {name: value for name, value in given.items() if value is not None})
    if found is None:
        raise ConfigError(*map(str, document.placed(problems)))
    return found


def _script(summary: RunSummary, script: ScriptFacts) -> dict[str, Any]:
    kept = script.model_dump(mode="json", exclude={"unreached", "modules", "new_files"})
    malloc = list(summary.environment.malloc) if summary.environment.keeps_memory else []
    return {"command": list(summary.command), "malloc": malloc, "script": kept}


def _left_out(settings: dict[str, Any]) -> Iterator[Problem]:
    """The settings that are missing, in their order: a line that was lost must not turn into a default."""
    ddp = settings.get("ddp")
    paths: list[KeyPath] = [(name,) for name in TrainingConfig.model_fields if name not in settings]
    paths += [("ddp", name) for name in DdpConfig.model_fields if name not in ddp] if isinstance(ddp, dict) else []
    for path in paths:
        yield Problem(text="must be given: autotune writes every setting", path=path)


def _learning_rate(recommendation: Recommendation) -> dict[str, Any]:
    advice = recommendation.lr_advice
    figures = advice.model_dump(mode="json", include={"rule", "batch_ratio", "betas", "eps"})
    return {**figures, "batch_ratio": _rounded(advice.batch_ratio), "notes": [*map(str, advice.notes)]}


def _evidence(summary: RunSummary, recommendation: Recommendation) -> dict[str, Any]:
    runs = {"baseline": runs_of(summary.trials, 0), "recommended": runs_of(summary.trials, recommendation.number)}
    sources = (run.busy_source for measured in runs.values() for run in measured if run.busy_source is not None)
    peak = max((run.peak_memory_bytes for run in runs["recommended"]), default=None)
    return {
        "verdict": recommendation.verdict,
        "speedup": _interval(recommendation.speedup),
        "gain_probability": _rounded(recommendation.gain_probability),
        "samples_per_s": {
            name: _interval(rate_of_runs(own, summary.run_spread) if own else None) for name, own in runs.items()
        },
        "busy_fraction": {**{name: _busy(own) for name, own in runs.items()}, "source": next(sources, None)},
        "peak_memory_gib": None if peak is None else _rounded(peak / 2**30),
        "memory_limit_gib": _rounded(summary.limit_bytes / 2**30),
        "memory_source": summary.memory_source,
        "reasons": [*map(str, recommendation.reasons)],
        "trials": dict(Counter[str](trial.outcome for trial in summary.trials)),
        "runs": {name: len(own) for name, own in runs.items()},
    }


def _busy(runs: Sequence[Measurement]) -> float | None:
    fractions = [run.busy_fraction for run in runs if run.busy_fraction is not None]
    return _rounded(fmean(fractions)) if fractions else None


def _interval(figure: Interval | None) -> dict[str, float | None] | None:
    return None if figure is None else {name: _rounded(value) for name, value in figure}


def _rounded(value: float | None) -> float | None:
    """Four significant digits; None for what is not known, such as an interval's open end."""
    return float(f"{value:.{_DIGITS}g}") if value is not None and isfinite(value) else None
