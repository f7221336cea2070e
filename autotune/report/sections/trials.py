"""The report's sections on what was run: trials, confirmation, failures, and the checks of memory and precision.

Comes in: a RunSummary. Goes out: Sections whose blocks are empty where there is nothing to tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune.analysis.memory_line import MemoryLine
from autotune.records.measurement import Measurement
from autotune.records.precision_check import GuardFigures, objection, shortfall
from autotune.records.recommendation import Confirmation
from autotune.records.run_summary import RunSummary
from autotune.records.stress_check import StressFigures, load_of
from autotune.records.trial import TrialRecord
from autotune.report.blocks import Bullets, Figure, Paragraph, Section, Table, Trace
from autotune.report.content import FailureGroup, group_failures, say_course
from autotune.report.formatting import (
    NO_VALUE,
    cut_middle,
    describe_settings,
    format_bytes,
    format_count,
    format_duration,
    format_energy,
    format_fraction,
    format_interval,
    format_rate,
    name_outcome,
    one_line,
    shorten,
    without_controls,
)
from autotune.report.sections.memory import format_base, list_memory_lines, name_line, say_workers
from autotune.report.wording.say import say
from autotune.settings.training_config import TrainingConfig

__all__ = [
    "confirmation_section",
    "failure_section",
    "guard_section",
    "memory_section",
    "stress_section",
    "trial_section",
    "trial_table",
]

_LONGEST_REASON = 160  # cells of a table; "Failures" has the whole
_LONGEST_TRACEBACK = 20_000  # characters: some 250 lines, more than a traceback without recursion has
_FARTHEST = 4
"""Times the largest batch measured up to which a line is followed: our own convention."""
_ENERGY = "energy a sample"
"""A column that is left out where no device tells."""
_RATE_HEADS = ("samples/s", "95 % interval")
_TRIAL_HEADS = ("#", "settings", "outcome", *_RATE_HEADS, "score", "busy", "peak memory", _ENERGY, "reason")
_ROUND_HEADS = ("round", "#", "settings", *_RATE_HEADS, "busy", "data wait", "peak memory", _ENERGY)
_MEMORY_HEADS = ("precision", "trials", "at batch 0", "a sample", "± error", "batch at the limit")
_GUARD_HEADS = ("#", "precision", "steps", "batch", "losses deviate", "gradients' cosine", "steps skipped", "answer")
_TEXTS = frozenset({"settings", "outcome", "reason", "precision", "answer", ""})


def trial_section(summary: RunSummary) -> Section:
    """How the search went, and every trial."""
    sources = _say_busy_sources((trial.number, trial.measurement) for trial in summary.trials)
    return Section(title="Trials", blocks=(Paragraph(text=say_course(summary)), trial_table(summary), sources))


def trial_table(summary: RunSummary) -> Table:
    """Every trial in a row."""
    rows = tuple(_trial(trial) for trial in summary.trials)
    kinds = tuple(_kind(trial, summary) for trial in summary.trials)
    return _without_unknown_energy(Table(heads=_TRIAL_HEADS, rows=rows, texts=_TEXTS, row_kinds=kinds))


def confirmation_section(summary: RunSummary) -> Section:
    """The finalists' runs, raw, round by round."""
    confirmations = summary.recommendation.confirmations if summary.recommendation is not None else ()
    count = max((len(one.rounds) for one in confirmations), default=0)
    rows = [_round(index, one) for index in range(count) for one in confirmations if index < len(one.rounds)]
    sources = _say_busy_sources((one.number, run) for one in confirmations for run in one.rounds)
    table = _without_unknown_energy(Table(heads=_ROUND_HEADS, rows=tuple(rows), texts=_TEXTS))
    return Section(title="Confirmation", blocks=(table, sources))


def failure_section(summary: RunSummary) -> Section:
    """What went wrong, by kind, with a traceback where there is one."""
    return Section(title="Failures", blocks=tuple(map(_failure, group_failures(summary))))


def memory_section(summary: RunSummary) -> Section:
    """Memory against the micro batch: the trials, the fitted lines, the limit."""
    lines = list_memory_lines(summary)
    table = Table(heads=_MEMORY_HEADS, rows=tuple(_line(line, lines, summary) for line in lines), texts=_TEXTS)
    remark = (
        "Lines fitted to the trials' peak memory; the error is half of the 95 % prediction interval. "
        "The last column is what the line expects within the limit; only batches that were run are recommended."
    )
    remarks = tuple(filter(None, (remark, say_workers(lines)))) if lines else ()
    return Section(title="Memory", blocks=(Figure(name="memory"), table, Bullets(sentences=remarks)))


def guard_section(summary: RunSummary) -> Section:
    """What cheaper precisions and compiled models showed against float32."""
    guarded = [(trial, trial.result.guard) for trial in summary.trials if trial.result.guard is not None]
    rows = tuple(_guard(trial, figures) for trial, figures in guarded if figures is not None)
    remark = (
        "The same weights and batches trained in float32 and as the trial would; the answer holds for its precision."
    )
    table = Table(heads=_GUARD_HEADS, rows=rows, texts=_TEXTS)
    more = dict.fromkeys(say(one) for _, figures in guarded if figures is not None for one in figures.remarks)
    return Section(title="Precision guard", blocks=(table, Bullets(sentences=(remark, *more) if rows else ())))


def stress_section(summary: RunSummary) -> Section:
    """The recommended configuration on the largest samples."""
    found = summary.recommendation
    sentences = () if found is None or found.stress is None else _say_stress(found.stress, found.config, summary)
    return Section(title="Stress run", blocks=(Bullets(sentences=sentences),))


def _without_unknown_energy(table: Table) -> Table:
    place = table.heads.index(_ENERGY)
    if any(row[place] != NO_VALUE for row in table.rows):
        return table
    rows = tuple((*row[:place], *row[place + 1 :]) for row in table.rows)
    return replace(table, heads=(*table.heads[:place], *table.heads[place + 1 :]), rows=rows)


def _trial(trial: TrialRecord) -> tuple[str, ...]:
    rate, interval, busy, _, memory, energy = _measured(trial.measurement)
    reason = shorten(trial.reason, _LONGEST_REASON)
    score = NO_VALUE if trial.score is None else f"{trial.score.value:.3f}"
    settings = describe_settings(trial.config)
    outcome = name_outcome(trial.outcome)
    return (str(trial.number), settings, outcome, rate, interval, score, busy, memory, energy, reason)


def _kind(trial: TrialRecord, summary: RunSummary) -> str:
    if summary.recommendation is not None and trial.number == summary.recommendation.number:
        return "recommended"
    if trial.number == 0:
        return "baseline"
    return "" if trial.is_feasible else "failed"


def _round(index: int, one: Confirmation) -> tuple[str, ...]:
    run = one.rounds[index]
    figures = _measured(run) if run is not None else ("failed", *_measured(None)[1:])
    return (str(index + 1), str(one.number), describe_settings(one.config), *figures)


def _measured(run: Measurement | None) -> tuple[str, str, str, str, str, str]:
    """Rate, its interval, busy, data wait, peak memory, energy a sample."""
    if run is None:
        return NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE
    low, high = run.samples_per_s_ci
    return (
        format_rate(run.samples_per_s),
        format_interval(format_rate(low), format_rate(high)),
        NO_VALUE if run.busy_fraction is None else format_fraction(run.busy_fraction),
        format_fraction(run.data_wait_fraction),
        format_bytes(run.peak_memory_bytes),
        NO_VALUE if run.joules_per_sample is None else format_energy(run.joules_per_sample),
    )


def _say_busy_sources(told: Iterable[tuple[int, Measurement | None]]) -> Bullets:
    """What the column "busy" comes from: the source that scores are made from, and the trials where another served."""
    numbers: dict[str, dict[int, None]] = {}
    for number, run in told:
        if run is not None and run.busy_source is not None:
            numbers.setdefault(one_line(run.busy_source), {})[number] = None
    source, *others = sorted(numbers, key=lambda one: -len(numbers[one])) or [""]
    but = "".join(f"; of # {', '.join(map(str, numbers[one]))}: {one}" for one in others)
    return Bullets(sentences=(f"Busy, as scores take it: {source}{but}.",) if source else ())


def _failure(group: FailureGroup) -> Trace:
    failure = group.trials[0].result.failure
    traceback = "" if failure is None else cut_middle(failure.traceback, _LONGEST_TRACEBACK)
    return Trace(
        count=f"{len(group.trials)} {name_outcome(group.outcome)}",
        text=f"({group.numbers}): {group.reason}",
        traceback=without_controls(traceback).strip("\n"),
    )


def _line(line: MemoryLine, lines: Sequence[MemoryLine], summary: RunSummary) -> tuple[str, ...]:
    largest, farthest = line.largest_batch(summary.limit_bytes), _FARTHEST * line.points[-1][0]
    return (
        name_line(line, lines),
        str(len(line.points)),
        format_base(line),
        format_bytes(round(line.bytes_per_sample)),
        format_bytes(round(line.error_bytes)),
        NO_VALUE if largest is None else f"over {farthest:,}" if largest > farthest else f"{largest:,}",
    )


def _guard(trial: TrialRecord, figures: GuardFigures) -> tuple[str, ...]:
    deviation, cosine = figures.loss_deviation, figures.gradient_cosine
    precision = trial.config.amp_dtype + (", compiled" if trial.config.compile else "")
    return (
        str(trial.number),
        precision,
        str(figures.steps),
        str(figures.micro_batch_size),
        "not finite" if deviation is None else format_fraction(deviation),
        "not finite" if cosine is None else f"{cosine:.4f}",
        f"{sum(figures.skipped_steps)}" if figures.skipped_steps else NO_VALUE,
        shortfall(figures) or objection(figures) or "may win",
    )


def _say_stress(stress: StressFigures, config: TrainingConfig, summary: RunSummary) -> tuple[str, ...]:
    load = load_of(stress, config, summary.environment, summary.facts)
    own, whole, limit = map(format_bytes, (load.own_bytes, load.peak_bytes, summary.limit_bytes))
    peak = f"{own}, that is up to {whole} for {load.bearer}" if load.is_more else own
    steps, seconds = format_count(stress.steps, "step"), format_duration(stress.seconds)
    ran = " ".join(filter(None, (f"The recommended settings trained for {steps} ({seconds})", load.where)))
    kept = f"{'within' if load.peak_bytes <= summary.limit_bytes else 'above'} the limit of {limit}"
    largest, median = format_bytes(stress.largest_item_bytes), format_bytes(round(stress.median_item_bytes))
    sizes = f"all have {largest}" if largest == median else f"the largest has {largest}, the median {median}"
    seen = format_count(stress.items_seen, "item")
    largest_too = "" if stress.remark else ", ordinary batches and the largest samples in turns"
    return (
        f"{ran}{largest_too}.",
        *((say(stress.remark),) if stress.remark else ()),
        f"Peak memory: {peak}, {kept} ({stress.memory.source}).",
        f"Sizes of {seen} were looked at: {sizes}.",
    )
