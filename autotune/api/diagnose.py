"""A look that says why it is slow: one measured trial of what the user runs today, and the ceilings around it.

Takes a Plan; hands on a Diagnosis. No search is made and no run folder is kept. Composition, like api, from which
alone it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import monotonic

import psutil

from autotune.analysis.scoring import memory_fault
from autotune.api.interrupts import kept_interrupts
from autotune.api.random_state import kept_random_state
from autotune.api.setup import opened_launcher, runner_for, temporary_folder
from autotune.diagnosis.advice import rank_advice
from autotune.diagnosis.bottlenecks import find_bottlenecks, is_healthy, say_headline, standing_today
from autotune.errors import NothingFeasibleError, WorkloadError
from autotune.launch.launcher import Launcher
from autotune.launch.runner import TrialRunner
from autotune.note import Note
from autotune.phrasing import say_settings
from autotune.protocol.by_value import unreachable_by_value
from autotune.protocol.messages import Extras, WindowRules, write_payload
from autotune.records.ceilings import Standing
from autotune.records.diagnosis import Advice, Bottleneck, Curves, Diagnosis, Evidence, Finding
from autotune.records.measurement import Measurement
from autotune.records.run_summary import Phase, Progress
from autotune.records.trial import TrialResult
from autotune.report.render.notebook import render_diagnosis_notebook
from autotune.report.render.progress import ProgressMode, make_progress
from autotune.report.sections.diagnosis import render_diagnosis
from autotune.settings.budget import Budget
from autotune.settings.plan import Plan
from autotune.settings.search_space import SearchSpace
from autotune.settings.training_config import TrainingConfig
from autotune.space import constraints as rules
from autotune.space.default_ranges import most_workers
from autotune.space.resolved_space import ResolvedSpace
from autotune.tuning.probe import look
from autotune.tuning.time_budget import BASELINE_DEADLINE_S
from autotune.version import __version__

__all__ = ["DiagnosisResult", "Pace", "diagnose_plan", "examine", "variations"]

_WHOLE_LOOK_S = 60.0  # from the start; only the first look and the baseline's measuring may take longer
_LEAST_CURVES_S = 10.0  # beside building the workload once more: less is not worth that
_BATCH_FACTORS = (0.5, 2.0, 4.0)
_MEMORY_OUTCOMES = frozenset({"oom", "host_oom", "over_memory"})

Show = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long the parts of a look take."""

    window_s: float = 5.0
    """Of the trial's window, at the most."""
    stretch_s: float = 1.0
    """Of each ceiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisResult:
    """Why it is slow, and what to do about it."""

    diagnosis: Diagnosis
    """All of it, the evidence included."""

    @property
    def headline(self) -> str:
        """The answer in a sentence or two."""
        return self.diagnosis.headline

    @property
    def verdict(self) -> Bottleneck:
        """What holds the rate most."""
        return self.diagnosis.verdict

    @property
    def is_healthy(self) -> bool:
        """Nothing beside computing takes a tenth of the time, and nothing that was measured promises 5 % more."""
        return self.diagnosis.is_healthy

    @property
    def standing(self) -> Standing:
        """Where today's rate stands between the ceilings."""
        return self.diagnosis.standing

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What holds the rate, the heaviest first."""
        return self.diagnosis.findings

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What to do, the largest gain first."""
        return self.diagnosis.advice

    def report(self) -> str:
        """The report in Markdown."""
        return render_diagnosis(self.diagnosis)

    def _repr_html_(self) -> str:
        """The answer as tables, for notebooks."""
        return render_diagnosis_notebook(self.diagnosis)


def diagnose_plan(
    plan: Plan, *, progress: ProgressMode = "auto", launcher: Launcher | None = None, pace: Pace | None = None
) -> DiagnosisResult:
    """Look at a plan's baseline; see `diagnose`. The caller's random state is as before."""
    with kept_random_state(), kept_interrupts(), ExitStack() as held:
        folder = held.enter_context(temporary_folder())
        show = held.enter_context(make_progress(progress))
        starts = held.enter_context(opened_launcher(launcher, folder, plan))
        with unreachable_by_value(plan.workload):
            write_payload(plan.workload, folder.payload)
        found = examine(plan, runner_for(plan, folder, starts), show, pace or Pace())
    return DiagnosisResult(diagnosis=found)


def examine(plan: Plan, runner: TrialRunner, show: Show, pace: Pace) -> Diagnosis:
    """Look at a plan's baseline and say what holds it.

    Raises:
        WorkloadError, ConfigError: the workload or the baseline can't be used.
        NothingFeasibleError: the baseline needs more memory than there is.
    """
    begun = monotonic()
    free_ram_bytes = _free_ram_bytes(plan)
    show(_progress("probe", begun))
    runner, space = look(replace(plan, space=SearchSpace(), budget=Budget()), runner)
    show(_progress("measure", begun))
    measurement = _measure(plan.baseline, runner, pace)
    show(_progress("curves", begun))
    left_s = _WHOLE_LOOK_S - (monotonic() - begun)
    is_worth = left_s - measurement.startup_s >= _LEAST_CURVES_S
    evidence = Evidence(
        config=plan.baseline,
        drop_last=plan.workload.drop_last,
        environment=space.environment,
        facts=space.facts,
        limit_bytes=plan.objective.limit_bytes(space.environment.device_memory_bytes),
        free_ram_bytes=None if free_ram_bytes is None else min(free_ram_bytes, space.environment.ram_bytes),
        measurement=measurement,
        curves=_trace(plan.baseline, runner, space, pace, left_s) if is_worth else _untraced(left_s, measurement),
    )
    return _judged(plan.name, evidence, (*_ignored(plan), *space.notes), wall_s=monotonic() - begun)


def variations(space: ResolvedSpace) -> list[TrainingConfig]:
    """Configurations whose loader or device is worth measuring alone, each apart from the baseline in one respect.

    Workers stay from epoch to epoch wherever there are any. torch.compile is left out: it takes too long for a look.
    """
    own, found = space.baseline, list[TrainingConfig]()
    for changes in (*_loader_changes(space), *_device_changes(space)):
        settings = rules.normalised(own.model_dump() | changes, space.facts, space.environment)
        config = TrainingConfig.model_validate(settings)
        is_allowed = rules.obstacle(config, space.facts, space.environment, drop_last=space.drop_last) is None
        if is_allowed and config != own and config not in found:
            found.append(config)
    return found


def _loader_changes(space: ResolvedSpace) -> Iterator[dict[str, object]]:
    sharing = rules.ranks_on_host(space.baseline.process_count, space.environment)
    most = max(1, most_workers(space.facts, space.environment) // sharing)
    counts = [0, *(2**power for power in range(most.bit_length()) if 2**power <= most)]
    yield {"persistent_workers": space.baseline.num_workers > 0}
    for count in counts:
        yield {"num_workers": count, "persistent_workers": count > 0}


def _device_changes(space: ResolvedSpace) -> Iterator[dict[str, object]]:
    own, environment = space.baseline, space.environment
    for factor in _BATCH_FACTORS:
        yield {"micro_batch_size": max(1, int(own.micro_batch_size * factor))}
    for dtype in environment.native_amp_dtypes:
        yield {"amp_dtype": dtype}
    if environment.device_kind == "cpu":
        yield {"intra_op_threads": 1}
        yield {"intra_op_threads": environment.cores}
    if space.facts.has_4d_input:
        yield {"channels_last": True}


def _free_ram_bytes(plan: Plan) -> int | None:
    """RAM that is free on this machine; None where trials run on others."""
    return None if plan.executor.kind == "ray" else int(psutil.virtual_memory().available)


def _measure(config: TrainingConfig, runner: TrialRunner, pace: Pace) -> Measurement:
    result = runner.run(
        config,
        name="baseline",
        deadline_s=BASELINE_DEADLINE_S,
        window=WindowRules(max_s=pace.window_s),
        extras=Extras(loader_ceiling=True, device_ceiling=True, breakdown=True, stretch_s=pace.stretch_s),
    )
    if result.measurement is None:
        raise _failure(result)
    return result.measurement


def _failure(result: TrialResult) -> NothingFeasibleError | WorkloadError:
    told = f"the baseline must run to be looked at, but it ended: {result.reason}"
    if result.outcome in _MEMORY_OUTCOMES:
        return NothingFeasibleError(f"{told}; set a smaller baseline.micro_batch_size")
    return WorkloadError(told, remote_traceback=result.failure.traceback if result.failure is not None else "")


def _trace(config: TrainingConfig, runner: TrialRunner, space: ResolvedSpace, pace: Pace, deadline_s: float) -> Curves:
    extras = Extras(roofline=True, stretch_s=pace.stretch_s)
    report = runner.curves(config, variations(space), deadline_s=deadline_s, extras=extras)
    if report.curves is not None:
        return report.curves
    return Curves(remarks=(f"Other settings were not measured: {report.result.reason or report.result.outcome}.",))


def _untraced(left_s: float, measurement: Measurement) -> Curves:
    told = (
        f"Other settings were not measured: {max(left_s, 0.0):.0f} s are left of the {_WHOLE_LOOK_S:.0f} s that a look "
        f"may take, and a trial's start takes {measurement.startup_s:.0f} s."
    )
    return Curves(remarks=(told,))


def _judged(name: str, evidence: Evidence, notes: tuple[Note | str, ...], *, wall_s: float) -> Diagnosis:
    findings = find_bottlenecks(evidence)
    advice = rank_advice(evidence, findings)
    healthy = is_healthy(evidence, findings, advice)
    return Diagnosis(
        name=name,
        verdict=findings[0].bottleneck,
        headline=say_headline(evidence, findings, advice, healthy=healthy),
        is_healthy=healthy,
        standing=standing_today(evidence),
        findings=findings,
        advice=advice,
        evidence=evidence,
        notes=(*notes, *_remarks(evidence)),
        wall_s=wall_s,
        autotune_version=__version__,
    )


def _ignored(plan: Plan) -> Iterator[str]:
    """What a plan asks of a search alone, by name."""
    asked = {"space": plan.space != SearchSpace(), "budget": plan.budget != Budget(), "run_dir": plan.run_dir}
    names = [name for name, is_given in asked.items() if is_given]
    if names:
        yield f"No effect on a diagnosis, which searches nothing and keeps no run folder: {', '.join(names)}."


def _remarks(evidence: Evidence) -> Iterator[Note | str]:
    """What a person should know about the evidence."""
    if evidence.measurement.breakdown is None:
        yield "Where the time goes was not measured: all that is not spent waiting for data counts as computing."
    fault = memory_fault(evidence.measurement, evidence.limit_bytes)
    if fault is not None:
        yield f"A search would refuse these settings: {fault}."
    yield from evidence.measurement.remarks
    yield from evidence.curves.remarks
    for side, points in (("loader", evidence.curves.loader), ("device", evidence.curves.device)):
        for point in points:
            if point.ceiling is None:
                what = say_settings(point.changes) or "today's settings"
                yield f"The {side} alone was not measured with {what}: {point.reason}."


def _progress(phase: Phase, begun: float) -> Progress:
    return Progress(phase=phase, done=0, total=1, elapsed_s=monotonic() - begun, remaining_s=None)
