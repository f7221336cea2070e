"""What was run: trials, repeats, failures, and the precision check.

Comes in: a RunSummary. Goes out: Sections whose blocks are empty where there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import starmap

from autotune.analysis.decisions.run_spread import rate_of_runs
from autotune.messages.units import NO_VALUE, format_bytes_beside, format_count, format_times, show, show_interval
from autotune.messages.words import OUTCOMES
from autotune.records.measurement import Measurement
from autotune.records.precision_check import PrecisionFigures, objection, shortfall
from autotune.records.run_spread import RunSpread
from autotune.records.run_summary import RunSummary
from autotune.records.trial import Outcome, TrialRecord, TrialResult, score_value
from autotune.report.blocks import Bullets, Section, Table, Trace, tabulate
from autotune.report.figures import role_of
from autotune.report.text import cut_middle, one_line, shorten, without_controls
from autotune.report.wording.names import describe_settings, name_interval

__all__ = ["failure_section", "precision_section", "repeat_section", "trial_section", "trial_table"]

_LONGEST_REASON = 160  # cells of a table, our convention; "Failures" has the whole
_LONGEST_MESSAGE = 2000  # characters, our convention: an exception's message may hold a whole tensor
_MOST_SHOWN = (
    200  # rows of the table of trials, our convention: some four pages; five times what a search runs by itself
)
_NUMBERS_SHOWN = 3  # trials of a failure that are named: our convention
_OWN_REASON_EACH: frozenset[Outcome] = frozenset({"crashed", "invalid"})
"""Outcomes whose reasons name different faults; elsewhere reasons differ in their figures alone."""
_ENERGY = "energy a sample"
"""A column that is left out where no device reports it."""
_INTERVAL = "interval"
_HEADS = ("#", "settings", "outcome", "samples/s", _INTERVAL, "score", "busy", "peak memory", _ENERGY, "reason")
_PRECISION_REMARK = (
    "The same weights and batches, trained in float32 and with the trial's settings; the result is for that precision."
)


def trial_section(summary: RunSummary, table: Table) -> Section:
    """The trials of the table, how many it leaves out, and where the column "busy" comes from."""
    sources = _busy_sources((trial.number, trial.measurement) for trial in _shown(summary))
    left_out: tuple[str, ...] = ()
    if len(table.rows) < len(summary.trials):
        count = f"{len(table.rows)} of {format_count(len(summary.trials), 'trial')}"
        left_out = (
            f"{count} are shown: the baseline, what ran more than once, the best, and failures; trials.jsonl has all.",
        )
    blocks = (table, Bullets(sentences=left_out, is_remark=True), sources)
    return Section(title="Trials, each by its first run", blocks=blocks)


def trial_table(summary: RunSummary) -> Table:
    """Every trial in a row; of many those that tell most."""
    trials = _shown(summary)
    kinds = [role_of(trial.number, summary) or ("" if trial.is_feasible else "failed") for trial in trials]
    rows = (_trial(trial, summary) for trial in trials)
    return _with_interval_named(
        tabulate(rows, _HEADS, kinds=kinds, optional=(_ENERGY,)), summary, (trial.measurement for trial in trials)
    )


def _shown(summary: RunSummary) -> list[TrialRecord]:
    """All trials, or of many those with a role, those that ran more than once, the best, and the first that failed."""
    trials, found = summary.trials, summary.recommendation
    if len(trials) <= _MOST_SHOWN:
        return list(trials)
    named = {0, *(trial.number for trial in trials if trial.repeats)} | ({found.number} if found is not None else set())
    best = sorted((trial for trial in trials if trial.is_feasible), key=score_value, reverse=True)
    failed = [trial for trial in trials if not trial.is_feasible]
    first, fewest_best = [trial for trial in trials if trial.number in named], _MOST_SHOWN - _MOST_SHOWN // 4
    telling = [*first, *best[:fewest_best], *failed, *best[fewest_best:]]
    numbers = set([*dict.fromkeys(trial.number for trial in telling)][:_MOST_SHOWN])
    return [trial for trial in trials if trial.number in numbers]


def repeat_section(summary: RunSummary) -> Section:
    """Every run of what ran more than once, in the order in which they ended."""
    runs = [
        (result.at_s, trial, place, result)
        for trial in summary.trials
        if trial.repeats
        for place, result in enumerate(trial.results, 1)
    ]
    in_order = sorted(runs, key=lambda run: run[0])
    table = _with_interval_named(
        tabulate(
            (_repeat(summary.run_spread, trial, place, result) for _, trial, place, result in in_order),
            optional=(_ENERGY,),
        ),
        summary,
        (result.measurement for *_, result in runs),
    )
    sources = _busy_sources((trial.number, result.measurement) for _, trial, _, result in runs)
    claims = Bullets(sentences=_claims(summary) if runs else (), is_remark=True)
    return Section(title="Settings that ran more than once", blocks=(table, sources, claims))


def _with_interval_named(table: Table, summary: RunSummary, runs: Iterable[Measurement | None]) -> Table:
    name = name_interval(summary.run_spread, (run.window.is_held_by_device for run in runs if run is not None))
    return replace(table, heads=tuple(name if head == _INTERVAL else head for head in table.heads))


def _claims(summary: RunSummary) -> tuple[str, ...]:
    """What was measured beside what is claimed."""
    found = summary.recommendation
    if found is None or found.speedup is None or found.measured_speedup is None:
        return ()
    measured = f"Measured over all runs: {format_times(found.measured_speedup.value)} times the baseline"
    claimed = f"claimed: {format_times(found.speedup.value)} times, because the best of several trials is partly luck"
    return (f"{measured}; {claimed}.",)


def failure_section(summary: RunSummary) -> Section:
    """Trials that did not end well by what they have in common, the largest group first.

    Those that were stopped early as too slow are no failures.
    """
    groups: dict[tuple[Outcome, str], list[TrialRecord]] = {}
    for trial in summary.trials:
        if trial.outcome not in {"ok", "pruned"}:
            groups.setdefault((trial.outcome, _fault(trial)), []).append(trial)
    ordered = sorted(groups.values(), key=len, reverse=True)
    traces = tuple(_failure(trials, summary.limit_bytes) for trials in ordered)
    return Section(title="Failures, and where they came from", blocks=traces, is_brief=True)


def _fault(trial: TrialRecord) -> str:
    """What tells faults of one outcome apart; a refusal by the precision check is not the trial's own."""
    if trial.outcome not in _OWN_REASON_EACH and not trial.is_refused:
        return ""
    return trial.reason if trial.result.failure is None else trial.result.failure.signature


def _failure(trials: list[TrialRecord], limit_bytes: int) -> Trace:
    """Which trials, the first few by number, the first one's reason, and its traceback where there is one."""
    first, more = trials[0], len(trials) - _NUMBERS_SHOWN
    reason = one_line(cut_middle(_reason(first, limit_bytes), _LONGEST_MESSAGE))
    numbers = ", ".join(str(trial.number) for trial in trials[:_NUMBERS_SHOWN])
    # some 250 lines, more than a traceback without recursion has
    traceback = "" if first.result.failure is None else cut_middle(first.result.failure.traceback, 20_000)
    return Trace(
        count=f"{len(trials)} {OUTCOMES[first.outcome]}",
        text=f"trial{'s' if len(trials) > 1 else ''} {numbers}{f' and {more} more' * (more > 0)}: {reason}",
        traceback=without_controls(traceback).strip("\n"),
    )


def _reason(trial: TrialRecord, limit_bytes: int) -> str:
    """Why a trial is no candidate; memory in the same unit as everywhere else in the report."""
    again = trial.refuted_by
    if trial.outcome == "ok" and again is not None:
        return f"when it was run again: {again.reason or OUTCOMES[again.outcome]}"
    peak = 0 if trial.measurement is None else trial.measurement.peak_memory_bytes
    if trial.outcome != "over_memory" or peak <= limit_bytes:
        return trial.reason
    return (
        f"peak memory must stay within {show(limit_bytes, 'bytes')}, but was {format_bytes_beside(peak, limit_bytes)}"
    )


def precision_section(summary: RunSummary) -> Section:
    """What cheaper precisions and compiled models showed against float32."""
    checked = [(trial, trial.result.guard) for trial in summary.trials if trial.result.guard is not None]
    more = dict.fromkeys(str(remark) for _, figures in checked for remark in figures.remarks)
    remarks = Bullets(sentences=(_PRECISION_REMARK, *more) if checked else (), is_remark=True)
    table = tabulate(starmap(_precision, checked))
    return Section(title="Precision check: does it train as float32 does?", blocks=(table, remarks))


def _precision(trial: TrialRecord, figures: PrecisionFigures) -> dict[str, str]:
    deviation, cosine = figures.loss_deviation, figures.gradient_cosine
    refusal = shortfall(figures) or objection(figures)
    return {
        "#": str(trial.number),
        "precision": trial.config.amp_dtype + (", compiled" if trial.config.compile else ""),
        "steps": str(figures.steps),
        "batch": str(figures.micro_batch_size),
        "losses deviate": "not finite" if deviation is None else show(deviation, "share"),
        "gradients' cosine": "not finite" if cosine is None else f"{cosine:.4f}",
        "steps skipped": f"{sum(figures.skipped_steps)}" if figures.skipped_steps else NO_VALUE,
        "result": "passed" if refusal is None else str(refusal),
    }


def _trial(trial: TrialRecord, summary: RunSummary) -> dict[str, str]:
    return _measured(trial.measurement, summary.run_spread) | {
        "#": str(trial.number),
        "settings": describe_settings(trial.config),
        "outcome": OUTCOMES[trial.outcome],
        "score": NO_VALUE if trial.score is None else f"{trial.score.value:.3f}",
        "reason": shorten(_reason(trial, summary.limit_bytes), _LONGEST_REASON),
    }


def _repeat(spread: RunSpread, trial: TrialRecord, place: int, result: TrialResult) -> dict[str, str]:
    return {
        "run": str(place),
        "#": str(trial.number),
        "settings": describe_settings(trial.config),
        "outcome": OUTCOMES[result.outcome],
        **_measured(result.measurement, spread),
    }


def _measured(run: Measurement | None, spread: RunSpread) -> dict[str, str]:
    return {
        "samples/s": show(run and run.samples_per_s, "plain_rate"),
        _INTERVAL: NO_VALUE if run is None else _show_interval(run, spread),
        "busy": show(run and run.busy_fraction, "share"),
        "data wait": show(run and run.data_wait_fraction, "share"),
        "peak memory": show(run and run.peak_memory_bytes, "bytes"),
        _ENERGY: show(run and run.joules_per_sample, "energy"),
    }


def _show_interval(run: Measurement, spread: RunSpread) -> str:
    rate = rate_of_runs([run], spread)
    return show_interval(rate.low, rate.high, "plain_rate")


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
