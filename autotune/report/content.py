"""What a report says in words: the headline, remarks on the figures, advice, failures by kind, the files.

Comes in: a RunSummary, and the run folder for the files. Goes out: plain sentences and small records, free of markup
and on one line each; the terminal, Markdown and JSON forms only lay them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.analysis.time_estimate import payback_s
from autotune.records.recommendation import Recommendation
from autotune.records.run_summary import RunSummary, changed_settings
from autotune.records.trial import Outcome, TrialRecord
from autotune.records.utilization import disagreement
from autotune.report.figures import Column, Figures, find_trial, list_busy, summarise
from autotune.report.formatting import (
    NO_VALUE,
    cut_middle,
    describe_settings,
    format_bytes,
    format_count,
    format_duration,
    format_fraction,
    format_interval,
    format_setting,
    format_times,
    name_outcome,
    one_line,
)
from autotune.report.sections.devices import figures_by_title, say_conditions
from autotune.report.sections.memory import say_memory_line
from autotune.report.wording.say import say
from autotune.settings.environment import Environment
from autotune.settings.workload import WorkloadFacts

__all__ = [
    "FailureGroup",
    "count_outcomes",
    "describe_environment",
    "describe_workload",
    "group_failures",
    "list_advice",
    "list_changes",
    "list_files",
    "list_reasons",
    "list_remarks",
    "say_changes",
    "say_course",
    "say_headline",
    "say_nothing_feasible",
    "show_path",
]

_FILES = {
    "recommended.yaml": "the settings to use: autotune.load() reads them",
    "report.html": "the report with its plots, for a browser",
    "report.md": "the same in Markdown, its plots as tables",
    "trials.jsonl": "every trial, raw",
    "study.db": "the Optuna study",
    "environment.json": "the machine and its versions",
    "logs": "what each trial printed",
}
_NUMBERS_SHOWN = 3
_LONGEST_REASON = 2000  # characters: an exception's message may hold a whole tensor
_OWN_REASON_EACH: frozenset[Outcome] = frozenset({"crashed", "invalid"})
"""Outcomes whose reasons name different faults; elsewhere reasons differ in their figures alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Trials that failed alike."""

    outcome: Outcome
    trials: tuple[TrialRecord, ...]

    @property
    def reason(self) -> str:
        """The first one's reason, on one line."""
        return one_line(cut_middle(self.trials[0].reason, _LONGEST_REASON))

    @property
    def numbers(self) -> str:
        """Which trials, the first few by number: "trial 5", "trials 3, 4, 9 and 7 more"."""
        known = ", ".join(str(trial.number) for trial in self.trials[:_NUMBERS_SHOWN])
        more = len(self.trials) - _NUMBERS_SHOWN
        return f"trial{'s' if len(self.trials) > 1 else ''} {known}{f' and {more} more' if more > 0 else ''}"


def say_headline(summary: RunSummary) -> str:
    """The result in a sentence or two."""
    found = summary.recommendation
    if found is None:
        return say_nothing_feasible(summary)
    if found.verdict == "already_best":
        return _say_already_best(found)
    if found.verdict == "baseline_infeasible":
        return _say_baseline_infeasible(summary)
    if found.verdict == "unconfirmed":
        return _say_unconfirmed(summary)
    if found.speedup is None:
        return "Faster than your configuration, by how much was not measured."
    interval = format_interval(format_times(found.speedup.low), format_times(found.speedup.high))
    return f"{format_times(found.speedup.value)} times as fast as your configuration (95 %: {interval})."


def _say_already_best(found: Recommendation) -> str:
    if found.overloaded:
        return "No faster configuration is known to stay within the memory limit on the largest samples: keep yours."
    which = "of those that may be used" if found.is_outrun else "found"
    return f"Your configuration is already the best {which}: no measurable gain."


def _say_baseline_infeasible(summary: RunSummary) -> str:
    trial, limit = find_trial(summary, 0), format_bytes(summary.limit_bytes)
    outcome = None if trial is None else trial.outcome
    if trial is not None and trial.measurement is not None and trial.measurement.memory.is_thrashing:
        fault = f"has no room to train within the memory limit of {limit}"
    elif trial is not None and outcome == "over_memory" and trial.measurement is not None:
        fault = f"takes {format_bytes(trial.measurement.peak_memory_bytes)} of memory, above the limit of {limit}"
    elif outcome in {"over_memory", "oom", "host_oom"}:
        fault = f"runs out of memory (the limit is {limit})"
    elif outcome == "timeout":
        fault = "does not finish in time"
    elif outcome == "ok":
        fault = "failed when it was measured again"
    else:
        fault = "gave no measurement"
    return f"Your configuration {fault}, so no speed-up can be stated. The recommended settings work."


def _say_unconfirmed(summary: RunSummary) -> str:
    number = None if summary.recommendation is None else summary.recommendation.number
    if number == 0:
        return "Not confirmed: nothing faster than your configuration was found so far."
    own, reference = summarise(summary, number), summarise(summary, 0)
    if own is None or reference is None:
        return "Not confirmed: the recommended settings were measured once."
    ratio = own.samples_per_s.value / reference.samples_per_s.value
    return f"Not confirmed: about {format_times(ratio)} times as fast as your configuration, as single runs tell."


def say_nothing_feasible(summary: RunSummary) -> str:
    """Why there is no recommendation: the nearest miss of the memory limit, measured ones first."""
    limit, trials = format_bytes(summary.limit_bytes), summary.trials
    over = [trial for trial in trials if trial.outcome == "over_memory" and trial.score is not None]
    ended = [trial for trial in trials if trial.outcome in {"oom", "host_oom"} and trial.result.violation is not None]
    for misses in (over, ended):
        if misses:
            trial = min(misses, key=_violation)
            return (
                f"Nothing meets the memory limit of {limit}. The nearest miss: trial {trial.number} "
                f"({describe_settings(trial.config)}) {_say_miss(trial, summary.limit_bytes)}. "
                "Raise memory_limit or allow smaller batches."
            )
    if not trials:
        return "Nothing was measured."
    outcome, count = Counter(trial.outcome for trial in trials).most_common(1)[0]
    said = f"Nothing to recommend: {format_count(count, 'trial')} of {len(trials)} {name_outcome(outcome)}"
    if outcome in {"oom", "host_oom"}:
        return f"{said}. The memory limit is {limit}: raise memory_limit or allow smaller batches."
    return f"{said}: {one_line(next(trial.reason for trial in trials if trial.outcome == outcome))}"


def _say_miss(trial: TrialRecord, limit_bytes: int) -> str:
    if trial.measurement is not None and trial.measurement.memory.is_thrashing:
        return "had no room: memory was given back and asked for anew while it trained"
    at_least = "" if trial.outcome == "over_memory" else "at least "
    return f"took {at_least}{format_bytes(round(limit_bytes * (1 + _violation(trial))))}"


def _violation(trial: TrialRecord) -> float:
    return trial.score.violation if trial.score is not None else trial.result.violation or 0.0


def list_remarks(summary: RunSummary, columns: Sequence[Column]) -> tuple[str, ...]:
    """What must be known to read the table: where its figures come from."""
    measured = [(column.title, column.figures) for column in columns if column.figures is not None]
    if not measured:
        return ()
    return (
        *_say_busy_sources(columns),
        *_say_disagreements(measured),
        *_say_parts([figures for _, figures in measured]),
        f"Memory: {one_line(summary.memory_source)}.",
        *say_memory_line(summary),
        *_say_energy([figures for _, figures in measured]),
        _say_runs([(title, figures.runs, figures.is_confirmed) for title, figures in measured]),
        *say_conditions(figures_by_title(columns)),
    )


def _say_busy_sources(columns: Sequence[Column]) -> tuple[str, ...]:
    """Where the table's busy fractions come from."""
    shown = zip(columns, list_busy(columns), strict=True)
    sources = {column.title: one_line(reading.source) for column, reading in shown if reading is not None}
    if len(set(sources.values())) == 1:
        return (f"Busy: {next(iter(sources.values()))}.",)
    each = "; ".join(f"{title}: {source}" for title, source in sources.items())
    return (f"Busy fractions of different sources don't compare ({each}).",) if sources else ()


def _say_disagreements(measured: Sequence[tuple[str, Figures]]) -> tuple[str, ...]:
    """Where two sources of one configuration's busy fraction lie far apart, with what each says."""
    remarks = []
    for title, figures in measured:
        pair = disagreement(figures.busy_readings)
        if pair is not None:
            low, high = pair
            remarks.append(
                f"{title}: two sources disagree by {100 * (high.fraction - low.fraction):.0f} points: "
                f"{one_line(high.source)} says {format_fraction(high.fraction)}, "
                f"{one_line(low.source)} {format_fraction(low.fraction)}."
            )
    return tuple(remarks)


def _say_parts(measured: Sequence[Figures]) -> tuple[str, ...]:
    """Why the parts of the time and the busy fraction need not add up."""
    if all(figures.breakdown is None for figures in measured):
        return ()
    return ("Parts of the time: of one run each, restarts of epochs counted in.",)


def _say_energy(measured: Sequence[Figures]) -> tuple[str, ...]:
    if all(figures.joules_per_sample is None for figures in measured):
        return ()
    return ("Energy: of the whole device during the windows, what it draws when idle included.",)


def _say_runs(measured: Sequence[tuple[str, int, bool]]) -> str:
    runs = {count if confirmed else 0 for _, count, confirmed in measured}
    if runs == {0}:
        return "Rates: one trial each."
    if len(runs) == 1:
        return f"Rates: {format_count(runs.pop(), 'run')} each, in turns with the baseline."
    each = (f"{title} {format_count(n, 'run') if confirmed else 'its trial'}" for title, n, confirmed in measured)
    return f"Rates: {', '.join(each)}."


def list_changes(summary: RunSummary) -> tuple[tuple[str, str, str], ...]:
    """The settings to change: (name, the baseline's value, the recommended one)."""
    if summary.recommendation is None:
        return ()
    config, baseline = summary.recommendation.config, summary.baseline
    changed = changed_settings(config, baseline)
    return tuple((name, format_setting(name, baseline), format_setting(name, config)) for name in changed)


def say_changes(summary: RunSummary) -> str:
    """What to change, in a sentence; "" where nothing is."""
    changes = [
        f"{name} to {after}" + (f" (from {before})" if before != NO_VALUE else "")
        for name, before, after in list_changes(summary)
    ]
    return f"Set {', '.join(changes)}." if changes else ""


def list_reasons(summary: RunSummary) -> tuple[str, ...]:
    """Why this configuration is recommended, a sentence each."""
    found = summary.recommendation
    if found is None:
        return ()
    lines = [*map(say, found.reasons)]
    if found.same_batch_number == 0 and found.number != 0:
        ran = "was found" if not found.overloaded else "is known to stay within the limit on the largest samples"
        lines.append(f"At the baseline's global batch nothing faster than the baseline {ran}.")
    return tuple(map(one_line, lines))


def list_advice(summary: RunSummary) -> tuple[str, ...]:
    """What to do about the learning rate and what goes with it, a sentence each."""
    if summary.recommendation is None:
        return ()
    advice, lines = summary.recommendation.lr_advice, []
    if advice.rule != "none":
        lines.append(
            f"lr goes from {summary.baseline.lr:.4g} to {advice.lr:.4g}: the global batch is "
            f"{advice.batch_ratio:.4g} times the baseline's ({advice.rule} rule)."
        )
    if advice.betas is not None:
        lines.append(f"Set the optimizer's betas to ({advice.betas[0]:.4g}, {advice.betas[1]:.4g}).")
    if advice.eps is not None:
        lines.append(f"Set the optimizer's eps to {advice.eps:.3g}.")
    return tuple(map(one_line, (*lines, *map(say, advice.notes))))


def count_outcomes(summary: RunSummary) -> dict[Outcome, int]:
    """Trials by outcome, the most frequent first."""
    return dict(Counter(trial.outcome for trial in summary.trials).most_common())


def say_course(summary: RunSummary) -> str:
    """How the search went: trials, outcomes, time, and why it ended."""
    outcomes = ", ".join(f"{count} {name_outcome(outcome)}" for outcome, count in count_outcomes(summary).items())
    trials = format_count(len(summary.trials), "trial")
    because = one_line(say(summary.stopped_because)).rstrip(".")
    took = f"{trials} in {format_duration(summary.wall_s)}{f' ({outcomes})' if outcomes else ''}. Stopped: {because}."
    return " ".join(filter(None, (took, _say_payback(summary))))


def _say_payback(summary: RunSummary) -> str:
    """After how much training the search has paid for itself; "" where nothing is confirmed to be won."""
    found = summary.recommendation
    is_whole = summary.promised_s is not None  # else the time of earlier sittings is not known
    speedup = found.speedup if found is not None and found.verdict == "faster" and is_whole else None
    paid_s = None if speedup is None else payback_s(summary.wall_s, speedup.value)
    if paid_s is None:
        return ""
    return f"It pays for itself as soon as training would have taken {format_duration(paid_s)} before."


def group_failures(summary: RunSummary) -> tuple[FailureGroup, ...]:
    """Trials that did not end well, the largest group first; those cut short in a race are no failures."""
    groups: dict[tuple[Outcome, str], list[TrialRecord]] = {}
    for trial in summary.trials:
        if trial.outcome not in {"ok", "pruned"}:
            groups.setdefault((trial.outcome, _fault(trial)), []).append(trial)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return tuple(FailureGroup(outcome=outcome, trials=tuple(trials)) for (outcome, _), trials in ordered)


def _fault(trial: TrialRecord) -> str:
    """What tells faults of one outcome apart; a refusal by the precision guard is none of the trial's own."""
    if trial.outcome not in _OWN_REASON_EACH and not trial.is_refused:
        return ""
    return trial.reason if trial.result.failure is None else trial.result.failure.signature


def list_files(run_dir: Path) -> dict[str, str]:
    """The run folder's files that are there: {name: what it holds}."""
    return {name: purpose for name, purpose in _FILES.items() if (run_dir / name).exists()}


def show_path(path: Path) -> str:
    """A path, relative where it lies below the working directory."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def describe_environment(environment: Environment) -> dict[str, str]:
    """The machine, or each of several: {what: its value}."""
    memory, ram = format_bytes(environment.device_memory_bytes), format_bytes(environment.ram_bytes)
    versions = [f"{name} {version}" for name, version in sorted(environment.versions.items())]
    each, on_each = (f"{environment.hosts} hosts, each: ", " on each host") if environment.hosts > 1 else ("", "")
    unlike = f": {', '.join(environment.device_names)}" if environment.device_names else ""
    return {
        "device": f"{each}{environment.device_name} ({environment.device}, {memory})",
        **({"devices": f"{environment.device_count}{on_each}{unlike}"} if environment.device_count > 1 else {}),
        **({"driver": environment.driver} if environment.driver is not None else {}),
        "precisions": ", ".join(environment.native_amp_dtypes),
        **({"TF32 switches": ", ".join(environment.tf32_overrides)} if environment.tf32_overrides else {}),
        "processor": f"{format_count(environment.cores, 'core')}, {ram} of RAM{on_each}",
        "platform": environment.platform,
        "python": environment.python,
        "torch": environment.torch + (f", CUDA {environment.cuda}" if environment.cuda is not None else ""),
        **({"packages": ", ".join(versions)} if versions else {}),
        "fingerprint": environment.fingerprint,
        **({"note": " ".join(map(say, environment.remarks))} if environment.remarks else {}),
    }


def describe_workload(facts: WorkloadFacts) -> dict[str, str]:
    """What is trained: {what: its value}."""
    kind = "iterable dataset" if facts.is_iterable else "map-style dataset"
    length = "unknown length" if facts.dataset_length is None else format_count(facts.dataset_length, "sample")
    return {
        "data": f"{kind}, {length}",
        "model": format_count(facts.parameter_count, "parameter"),
        "optimizer": facts.optimizer.name,
        "loss": facts.step_source,
    }
