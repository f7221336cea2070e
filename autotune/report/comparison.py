"""Two searches beside each other: what changed, and whether their rates differ by more than noise.

Comes in: two RunSummaries. Goes out: a Comparison, whose fields are the JSON document of `autotune compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from autotune.analysis.decisions.run_spread import ratio_of_runs
from autotune.frozen import FrozenModel
from autotune.messages.units import format_times, show_interval
from autotune.records.measurement import Interval
from autotune.records.run_spread import RunSpread
from autotune.records.run_summary import RunSummary, changed_settings
from autotune.report.figures import Column, headroom_in, make_columns
from autotune.report.model import Verdict
from autotune.report.sections.facts import describe_environment, describe_run, describe_workload

__all__ = ["FIRST", "SECOND", "ComparedConfig", "Comparison", "Role", "compare_summaries"]

Role = Literal["baseline", "recommended"]
"""The two configurations of each search that are compared: what was run before, and what it recommends."""
_ROLES: tuple[Role, ...] = get_args(Role)
FIRST, SECOND = "first", "second"


class ComparedConfig(FrozenModel):
    """A search's baseline, or what it recommends, in the first search and in the second."""

    settings: dict[str, tuple[Any, Any]]
    """Settings that differ: {name: (the first's, the second's)}."""
    columns: tuple[Column, Column]
    """The settings and the runs of each."""
    ratio: Interval | None
    """The second's rate over the first's, with its 95 % interval; null where one was not measured."""

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the rates differ by more than runs of the same settings do."""
        return self.ratio is not None and not self.ratio.low <= 1 <= self.ratio.high


class Comparison(FrozenModel):
    """What differs between two searches."""

    format: Literal[2] = 2
    """Raised when a key goes or changes its meaning."""
    names: tuple[str, str]
    """Of the run folders, as they were given."""
    headline: str
    """The answer in a sentence or two, for people."""
    is_beyond_noise: bool
    """A rate differs by more than runs of the same settings do."""
    is_changed: bool
    """A rate does, or only one of the searches has measured a baseline, or recommends anything."""
    verdicts: tuple[Verdict, Verdict]
    """Each search's verdict in a word."""
    limits: tuple[str | None, str | None]
    """Which side of the recommended settings is the slower one: "loader", "device", "copy" or "host"; null where not
    known."""
    baseline: ComparedConfig
    recommended: ComparedConfig | None
    """null where one of them recommends nothing."""
    machine: dict[str, tuple[str, str]]
    """What differs of the machine: {what: (the first's, the second's)}; "" where one does not have it."""
    workload: dict[str, tuple[str, str]]
    """The same of model and data."""
    asked: dict[str, tuple[str, str]]
    """The same of what the searches were asked for, autotune's version among it."""
    spread: RunSpread
    """Between runs of the same settings: the wider one of the two searches' spreads, which `ratio` rests on."""


def compare_summaries(first: RunSummary, second: RunSummary, names: tuple[str, str]) -> Comparison:
    """What differs between two searches; `names` is what they are called."""
    summaries = first, second
    spread = _wider(first.run_spread, second.run_spread)
    columns = tuple({column.title: column for column in make_columns(summary)} for summary in summaries)
    found: dict[Role, ComparedConfig | None] = {role: _compared(summaries, columns, role, spread) for role in _ROLES}
    baseline, recommended = found["baseline"], found["recommended"]
    assert baseline is not None, "every search has a baseline"  # noqa: S101 - our own bug
    is_beyond_noise = any(known is not None and known.is_beyond_noise for known in found.values())

    def differing(describe: Callable[[RunSummary], Mapping[str, str]]) -> dict[str, tuple[str, str]]:
        return _differing(describe(first), describe(second))

    machine = differing(lambda summary: describe_environment(summary.environment))
    has_lost = (first.recommendation is None) != (second.recommendation is None) or any(
        bool(known.columns[0].runs) != bool(known.columns[1].runs) for known in found.values() if known is not None
    )
    return Comparison(
        names=names,
        headline=_headline(baseline, recommended, has_same_machine=not machine),
        is_beyond_noise=is_beyond_noise,
        is_changed=is_beyond_noise or has_lost,
        verdicts=(_verdict(first), _verdict(second)),
        limits=(None, None)
        if recommended is None
        else (_limit(recommended.columns[0]), _limit(recommended.columns[1])),
        baseline=baseline,
        recommended=recommended,
        machine=machine,
        workload=differing(lambda summary: describe_workload(summary.facts)),
        asked=differing(describe_run),
        spread=spread,
    )


def _headline(baseline: ComparedConfig, recommended: ComparedConfig | None, *, has_same_machine: bool) -> str:
    """Return the answer: the recommendations' rates, the baselines', and whether the machine is the same."""
    sentences = [_say_recommended(recommended)]
    if baseline.ratio is None:
        sentences.append("One of the baselines was not measured.")
    else:
        times = f"{format_times(baseline.ratio.value)} times {_say_interval(baseline, baseline.ratio)}"
        sentences.append(f"Baseline: {times}{', with different settings' if baseline.settings else ''}.")
    if not has_same_machine:
        sentences.append("The machine or its versions changed as well.")
    return " ".join(sentences)


def _say_recommended(recommended: ComparedConfig | None) -> str:
    if recommended is None:
        return "One of the searches recommends nothing."
    if recommended.ratio is None:
        return "One of the searches has not measured what it recommends."
    interval = _say_interval(recommended, recommended.ratio)
    first, second = (column.config.global_batch_size for column in recommended.columns)
    batch = "" if first == second else f", at a global batch of {second} instead of {first}"
    if not recommended.is_beyond_noise:
        return f"The recommendations do not differ measurably {interval}{batch}."
    times = format_times(recommended.ratio.value)
    return f"The second recommendation has {times} times the throughput of the first {interval}{batch}."


def _say_interval(compared: ComparedConfig, ratio: Interval) -> str:
    where = "beyond" if compared.is_beyond_noise else "within"
    return f"({show_interval(ratio.low, ratio.high, 'times')}, {where} noise)"


def _wider(first: RunSpread, second: RunSpread) -> RunSpread:
    """Return the wider spread of two, of each kind of runs."""
    wider = max(first, second, key=lambda one: one.sd)
    of_device = [one.device for one in (first, second) if one.device is not None]
    return wider.model_copy(update={"device": max(of_device, key=lambda one: one.sd, default=None)})


def _compared(
    summaries: tuple[RunSummary, RunSummary],
    columns: tuple[Mapping[str, Column], ...],
    role: Role,
    spread: RunSpread,
) -> ComparedConfig | None:
    """One of each search's configurations; where the baseline itself is recommended, it is both."""
    if role == "recommended" and any(summary.recommendation is None for summary in summaries):
        return None
    first, second = (known.get(role, known["baseline"]) for known in columns)
    ratio = ratio_of_runs(second.runs, first.runs, spread) if first.runs and second.runs else None
    return ComparedConfig(
        settings=changed_settings(second.config, first.config),
        columns=(
            first.model_copy(update={"title": FIRST, "speedup": None}),
            second.model_copy(update={"title": SECOND, "speedup": ratio}),
        ),
        ratio=ratio,
    )


def _differing(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys([*first, *second])
    values = {name: (first.get(name, ""), second.get(name, "")) for name in names}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def _verdict(summary: RunSummary) -> Verdict:
    return "nothing_feasible" if summary.recommendation is None else summary.recommendation.verdict


def _limit(column: Column) -> str | None:
    headroom = None if column.figures is None else headroom_in(column.figures)
    return None if headroom is None else headroom.lower
