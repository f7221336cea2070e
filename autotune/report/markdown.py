"""report.md: the summary with every trial, the confirmation's rounds and the machine.

Comes in: a RunSummary and its run folder. Goes out: GitHub-flavoured Markdown. Text that stems from the user's code is
escaped; tracebacks stand in fences longer than any run of backticks inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from autotune.core.measurement import Measurement
from autotune.core.recommendation import Confirmation
from autotune.core.result import RunSummary
from autotune.core.trial import TrialRecord
from autotune.report.content import (
    FailureGroup,
    describe_environment,
    describe_workload,
    group_failures,
    list_advice,
    list_files,
    list_reasons,
    list_remarks,
    say_course,
    say_headline,
)
from autotune.report.figures import make_columns, make_rows
from autotune.report.formatting import (
    NO_VALUE,
    describe_settings,
    format_bytes,
    format_duration,
    format_fraction,
    format_interval,
    format_rate,
    name_outcome,
    one_line,
    shorten,
    without_controls,
)

__all__ = ["render_markdown"]

_MARKS = re.compile(r"([\\`*_{}\[\]<>|~&#$])")
_BACKTICKS = re.compile(r"`+")
_LONGEST_REASON = 160  # cells of a table; "Failures" has the whole
_TRIAL_HEADERS = ("#", "settings", "outcome", "samples/s", "95 % interval", "busy", "peak memory", "reason")
_ROUND_HEADERS = ("round", "#", "settings", "samples/s", "95 % interval", "busy", "data wait", "peak memory")


def render_markdown(summary: RunSummary, run_dir: Path) -> str:
    """The whole report."""
    columns = make_columns(summary)
    rows = make_rows(columns, summary.limit_bytes)
    result = _table(("", *(column.title for column in columns)), [(row.label.strip(), *row.cells) for row in rows])
    parts = [
        f"# autotune: {_escape(summary.name)}",
        f"**{_escape(say_headline(summary))}**",
        result,
        _list(list_remarks(summary, columns)),
        *_section("Why", _list(list_reasons(summary))),
        *_section("Learning rate", _list(list_advice(summary))),
        *_section("Notes", _list(summary.notes)),
        *_section("Trials", _escape(say_course(summary)), _trials(summary.trials)),
        *_section("Confirmation", _confirmation(summary)),
        *_section("Failures", *map(_failure, group_failures(summary))),
        *_section("Workload", _facts(describe_workload(summary.facts))),
        *_section("Machine", _facts(describe_environment(summary.environment))),
        *_section("Run", _facts(_describe_run(summary))),
        *_section("Files", _facts({"report.md": "this report", **list_files(run_dir)})),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, *parts: str) -> tuple[str, ...]:
    return (f"## {title}", *parts) if any(parts) else ()


def _trials(trials: Iterable[TrialRecord]) -> str:
    return _table(_TRIAL_HEADERS, [_trial(trial) for trial in trials])


def _trial(trial: TrialRecord) -> tuple[str, ...]:
    rate, interval, busy, _, memory = _measured(trial.measurement)
    reason = shorten(trial.reason, _LONGEST_REASON)
    outcome = name_outcome(trial.outcome)
    return (str(trial.number), describe_settings(trial.config), outcome, rate, interval, busy, memory, reason)


def _confirmation(summary: RunSummary) -> str:
    confirmations = summary.recommendation.confirmations if summary.recommendation is not None else ()
    count = max((len(one.rounds) for one in confirmations), default=0)
    rows = [_round(index, one) for index in range(count) for one in confirmations if index < len(one.rounds)]
    return _table(_ROUND_HEADERS, rows) if rows else ""


def _round(index: int, one: Confirmation) -> tuple[str, ...]:
    run = one.rounds[index]
    figures = _measured(run) if run is not None else ("failed", *_measured(None)[1:])
    return (str(index + 1), str(one.number), describe_settings(one.config), *figures)


def _measured(run: Measurement | None) -> tuple[str, str, str, str, str]:
    """Rate, its interval, busy, data wait, peak memory."""
    if run is None:
        return NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE
    low, high = run.samples_per_s_ci
    return (
        format_rate(run.samples_per_s),
        format_interval(format_rate(low), format_rate(high)),
        NO_VALUE if run.busy_fraction is None else format_fraction(run.busy_fraction),
        format_fraction(run.data_wait_fraction),
        format_bytes(run.peak_memory_bytes),
    )


def _failure(group: FailureGroup) -> str:
    head = f"**{len(group.trials)} {name_outcome(group.outcome)}** ({group.numbers}): {_escape(group.reason)}"
    failure = group.trials[0].result.failure
    return head if failure is None else f"{head}\n\n{_fence(failure.traceback)}"


def _describe_run(summary: RunSummary) -> dict[str, str]:
    objective, budget = summary.objective, summary.budget
    timeout = "none" if budget.timeout_s is None else format_duration(budget.timeout_s)
    return {
        "autotune": summary.autotune_version,
        "seed": str(summary.seed),
        "baseline": describe_settings(summary.baseline),
        "memory limit": f"{format_bytes(summary.limit_bytes)}, {summary.memory_source}",
        "busy weight": f"{objective.busy_weight:g}",
        "global batch": f"{objective.global_batch}, at most {objective.max_batch_scale:g} times the baseline's",
        "lr rule": objective.lr_rule,
        "budget": f"at most {budget.max_trials} trials, time-out: {timeout}",
    }


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *([_escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _facts(facts: dict[str, str]) -> str:
    return _table(("", ""), list(facts.items()))


def _list(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {_escape(sentence)}" for sentence in sentences)


def _escape(text: str) -> str:
    """Any text on one line, with everything that Markdown or HTML would obey made plain."""
    return _MARKS.sub(r"\\\1", one_line(text))


def _fence(text: str) -> str:
    """Any text as a block of code."""
    inside = without_controls(text).strip("\n")
    longest = max((len(run) for run in _BACKTICKS.findall(inside)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{inside}\n{fence}"
