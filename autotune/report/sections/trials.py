"""What was run: trials, confirmation, failures, and the precision check.

Comes in: a RunSummary. Goes out: Sections whose blocks are empty where there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autotune.records.measurement import Measurement
from autotune.records.precision_check import PrecisionFigures, objection, shortfall
from autotune.records.recommendation import Confirmation
from autotune.records.run_summary import RunSummary
from autotune.records.trial import Outcome, TrialRecord
from autotune.report.blocks import Bullets, Section, Table, Trace
from autotune.report.figures import role_of
from autotune.report.text import cut_middle, one_line, shorten, without_controls
from autotune.report.wording.names import OUTCOMES, describe_settings
from autotune.report.wording.say import say
from autotune.report.wording.units import NO_VALUE, format_bytes, format_bytes_beside, show, show_interval

__all__ = ["confirmation_section", "failure_section", "precision_section", "trial_section", "trial_table"]

_LONGEST_REASON = 160  # cells of a table; "Failures" has the whole
_LONGEST_MESSAGE = 2000  # characters: an exception's message may hold a whole tensor
_LONGEST_TRACEBACK = 20_000  # characters: some 250 lines, more than a traceback without recursion has
_NUMBERS_SHOWN = 3
_OWN_REASON_EACH: frozenset[Outcome] = frozenset({"crashed", "invalid"})
"""Outcomes whose reasons name different faults; elsewhere reasons differ in their figures alone."""
_ENERGY = "energy a sample"
"""A column that is left out where no device reports it."""
_RATE_HEADS = ("samples/s", "95 % interval")
_TRIAL_HEADS = ("#", "settings", "outcome", *_RATE_HEADS, "score", "busy", "peak memory", _ENERGY, "reason")
_ROUND_HEADS = ("round", "#", "settings", *_RATE_HEADS, "busy", "data wait", "peak memory", _ENERGY)
_PRECISION_HEADS = (
    "#",
    "precision",
    "steps",
    "batch",
    "losses deviate",
    "gradients' cosine",
    "steps skipped",
    "result",
)
_PRECISION_REMARK = (
    "The same weights and batches, trained in float32 and with the trial's settings; the result is for that precision."
)
_TEXTS = frozenset({"settings", "outcome", "reason", "precision", "result"})


def trial_section(summary: RunSummary, table: Table) -> Section:
    """Every trial, and where the column "busy" comes from."""
    sources = _busy_sources((trial.number, trial.measurement) for trial in summary.trials)
    return Section(title="Trials", blocks=(table, sources))


def trial_table(summary: RunSummary) -> Table:
    """Every trial in a row."""
    rows = tuple(_trial(trial, summary.limit_bytes) for trial in summary.trials)
    roles = (role_of(trial.number, summary) or ("" if trial.is_feasible else "failed") for trial in summary.trials)
    return _without_unknown_energy(Table(heads=_TRIAL_HEADS, rows=rows, texts=_TEXTS, row_kinds=tuple(roles)))


def confirmation_section(summary: RunSummary) -> Section:
    """The finalists' runs, raw, round by round."""
    entrants = summary.recommendation.confirmations if summary.recommendation is not None else ()
    count = max((len(entrant.rounds) for entrant in entrants), default=0)
    rows = [_round(index, entrant) for index in range(count) for entrant in entrants if index < len(entrant.rounds)]
    sources = _busy_sources((entrant.number, run) for entrant in entrants for run in entrant.rounds)
    table = _without_unknown_energy(Table(heads=_ROUND_HEADS, rows=tuple(rows), texts=_TEXTS))
    return Section(title="Confirmation", blocks=(table, sources))


def failure_section(summary: RunSummary) -> Section:
    """Trials that did not end well by what they have in common, the largest group first.

    Those that were stopped early as too slow are no failures.
    """
    groups: dict[tuple[Outcome, str], list[TrialRecord]] = {}
    for trial in summary.trials:
        if trial.outcome not in {"ok", "pruned"}:
            groups.setdefault((trial.outcome, _fault(trial)), []).append(trial)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return Section(
        title="Failures", blocks=tuple(_failure(trials, summary.limit_bytes) for trials in ordered), is_brief=True
    )


def _fault(trial: TrialRecord) -> str:
    """What tells faults of one outcome apart; a refusal by the precision check is not the trial's own."""
    if trial.outcome not in _OWN_REASON_EACH and not trial.is_refused:
        return ""
    return trial.reason if trial.result.failure is None else trial.result.failure.signature


def _failure(trials: list[TrialRecord], limit_bytes: int) -> Trace:
    """Which trials, the first few by number, the first one's reason, and its traceback where there is one."""
    first, more = trials[0], len(trials) - _NUMBERS_SHOWN
    reason = one_line(cut_middle(_reason(first, limit_bytes), _LONGEST_MESSAGE))
    numbers = ", ".join(str(trial.number) for trial in trials[:_NUMBERS_SHOWN]) + (
        f" and {more} more" if more > 0 else ""
    )
    traceback = "" if first.result.failure is None else cut_middle(first.result.failure.traceback, _LONGEST_TRACEBACK)
    return Trace(
        count=f"{len(trials)} {OUTCOMES[first.outcome]}",
        text=f"trial{'s' if len(trials) > 1 else ''} {numbers}: {reason}",
        traceback=without_controls(traceback).strip("\n"),
    )


def _reason(trial: TrialRecord, limit_bytes: int) -> str:
    """Why a trial is no candidate; memory in the same unit as everywhere else in the report."""
    peak = 0 if trial.measurement is None else trial.measurement.peak_memory_bytes
    if trial.outcome != "over_memory" or peak <= limit_bytes:
        return trial.reason
    return f"peak memory must stay within {format_bytes(limit_bytes)}, but was {format_bytes_beside(peak, limit_bytes)}"


def precision_section(summary: RunSummary) -> Section:
    """What cheaper precisions and compiled models showed against float32."""
    checked = [(trial, trial.result.guard) for trial in summary.trials if trial.result.guard is not None]
    rows = tuple(_precision(trial, figures) for trial, figures in checked)
    more = dict.fromkeys(say(remark) for _, figures in checked for remark in figures.remarks)
    remarks = (_PRECISION_REMARK, *more) if rows else ()
    table = Table(heads=_PRECISION_HEADS, rows=rows, texts=_TEXTS)
    return Section(title="Precision check", blocks=(table, Bullets(sentences=remarks, is_remark=True)))


def _precision(trial: TrialRecord, figures: PrecisionFigures) -> tuple[str, ...]:
    deviation, cosine, refusal = (
        figures.loss_deviation,
        figures.gradient_cosine,
        shortfall(figures) or objection(figures),
    )
    return (
        str(trial.number),
        trial.config.amp_dtype + (", compiled" if trial.config.compile else ""),
        str(figures.steps),
        str(figures.micro_batch_size),
        "not finite" if deviation is None else show(deviation, "share"),
        "not finite" if cosine is None else f"{cosine:.4f}",
        f"{sum(figures.skipped_steps)}" if figures.skipped_steps else NO_VALUE,
        "passed" if refusal is None else say(refusal),
    )


def _without_unknown_energy(table: Table) -> Table:
    place = table.heads.index(_ENERGY)
    if any(row[place] != NO_VALUE for row in table.rows):
        return table
    rows = tuple((*row[:place], *row[place + 1 :]) for row in table.rows)
    return replace(table, heads=(*table.heads[:place], *table.heads[place + 1 :]), rows=rows)


def _trial(trial: TrialRecord, limit_bytes: int) -> tuple[str, ...]:
    rate, interval, busy, _, memory, energy = _measured(trial.measurement)
    score = NO_VALUE if trial.score is None else f"{trial.score.value:.3f}"
    settings, outcome, reason = (
        describe_settings(trial.config),
        OUTCOMES[trial.outcome],
        shorten(_reason(trial, limit_bytes), _LONGEST_REASON),
    )
    return (str(trial.number), settings, outcome, rate, interval, score, busy, memory, energy, reason)


def _round(index: int, entrant: Confirmation) -> tuple[str, ...]:
    run = entrant.rounds[index]
    figures = _measured(run) if run is not None else ("failed", *_measured(None)[1:])
    return (str(index + 1), str(entrant.number), describe_settings(entrant.config), *figures)


def _measured(run: Measurement | None) -> tuple[str, ...]:
    """Rate, its interval, busy, data wait, peak memory, energy a sample."""
    if run is None:
        return (NO_VALUE,) * 6
    return (
        show(run.samples_per_s, "plain_rate"),
        show_interval(*run.samples_per_s_ci, "plain_rate"),
        show(run.busy_fraction, "share"),
        show(run.data_wait_fraction, "share"),
        format_bytes(run.peak_memory_bytes),
        show(run.joules_per_sample, "energy"),
    )


def _busy_sources(runs: Iterable[tuple[int, Measurement | None]]) -> Bullets:
    """Where the column "busy" comes from: the source that scores are made from, and the trials that used another."""
    numbers: dict[str, dict[int, None]] = {}
    for number, run in runs:
        if run is not None and run.busy_source is not None:
            numbers.setdefault(one_line(run.busy_source), {})[number] = None
    source, *others = sorted(numbers, key=lambda name: -len(numbers[name])) or [""]
    but = "".join(f"; # {', '.join(map(str, numbers[other]))}: {other}" for other in others)
    remarks = (f"Busy, as used in scores: {source}{but}.",) if source else ()
    return Bullets(sentences=remarks, is_remark=True)
