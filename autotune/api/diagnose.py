"""Diagnose a slow training: measure one trial of the baseline, and the ceilings of loader and device.

Comes in: a Plan. Goes out: a Diagnosis. Nothing is searched and no run folder is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import psutil

from autotune.api.setup import (
    kept_interrupts,
    kept_random_state,
    opened_launcher,
    runner_for,
    temporary_folder,
    warnings_in,
)
from autotune.config.plan import Budget, Plan, SearchSpace
from autotune.diagnosis.advice import list_variations
from autotune.diagnosis.bottlenecks import first_verdict, judge
from autotune.errors import NothingFeasibleError, WorkloadError
from autotune.launch.launcher import Launcher
from autotune.launch.machine import Neighbours
from autotune.launch.runner import TrialRunner
from autotune.messages import diagnosis as messages
from autotune.models.evidence import assumed_variation
from autotune.note import Note
from autotune.policy import WindowRules
from autotune.protocol.disk import monotonic
from autotune.protocol.messages import Extras
from autotune.protocol.payload import write_payload
from autotune.records.ceilings import CeilingBook, Headroom
from autotune.records.measurement import Measurement, keep_ceilings
from autotune.records.result import (
    Advice,
    Bottleneck,
    Curves,
    Diagnosis,
    Evidence,
    Finding,
    Phase,
    Progress,
)
from autotune.records.trial import OUT_OF_MEMORY
from autotune.report.diagnosis import render_diagnosis
from autotune.report.html import render_diagnosis_notebook
from autotune.report.progress import ProgressMode, ShowProgress, make_progress
from autotune.space.space import ResolvedSpace
from autotune.tuning.probe import points_of_baseline, resolve_probe

_MOST_S = 45.0
"""Time limit of a diagnosis, which only the probe and the baseline's trial may exceed. Source:
docs/diagnose.md promises it."""
_LEAST_CURVES_S = 10.0
"""Least time for the curves, without the trial's start; less is not worth building the workload
again. Source: our convention."""
_SURE_CODES = frozenset({"bottleneck", "time_not_attributed", "computed_setting"})
"""Part of a headline that is shown while other settings are still measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringTime:
    """Measuring times of a diagnosis. Source: our conventions, to finish within a minute."""

    watch_s: float = 8.0
    """Watch of a script's own run, after its first step."""
    window_s: float = 5.0
    """Longest window of the trial."""
    stretch_s: float = 1.0
    """Window of each ceiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisResult:
    """The result of a diagnosis: the bottleneck, its share of the time, and the remedies."""

    diagnosis: Diagnosis
    """Complete diagnosis with its evidence."""

    @property
    def headline(self) -> str:
        """The answer in a sentence or two."""
        return self.diagnosis.headline

    @property
    def verdict(self) -> Bottleneck:
        """The main bottleneck."""
        return self.diagnosis.verdict

    @property
    def is_healthy(self) -> bool:
        """True if nothing but computing takes a tenth of the time, and no measurement promises 5 % more."""
        return self.diagnosis.is_healthy

    @property
    def headroom(self) -> Headroom:
        """Headroom between the baseline's throughput and the ceilings."""
        return self.diagnosis.headroom

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The bottlenecks, the largest share of the time first."""
        return self.diagnosis.findings

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Remedies: settings first, then others, each by gain."""
        return self.diagnosis.advice

    def report(self) -> str:
        """Return the report in Markdown."""
        return render_diagnosis(self.diagnosis)

    def _repr_html_(self) -> str:
        """Return the answer as HTML tables, for notebooks."""
        return render_diagnosis_notebook(self.diagnosis)


def diagnose_plan(
    plan: Plan,
    *,
    progress: ProgressMode = "auto",
    launcher: Launcher | None = None,
    measuring: MeasuringTime | None = None,
) -> DiagnosisResult:
    """Diagnose a plan's baseline; see `diagnose`. The caller's random state is kept."""
    with kept_random_state(), kept_interrupts(), ExitStack() as held:
        folder = held.enter_context(temporary_folder())
        show = held.enter_context(make_progress(progress))
        starts = held.enter_context(opened_launcher(launcher, folder, plan))
        write_payload(plan.workload, folder.payload)
        others = Neighbours().new() if launcher is None and plan.executor.kind == "local" else ()
        found = examine(
            plan, runner_for(plan, folder, starts), show, measuring or MeasuringTime(), others
        )
    return DiagnosisResult(diagnosis=found)


def examine(
    plan: Plan,
    runner: TrialRunner,
    show: ShowProgress,
    measuring: MeasuringTime,
    others: tuple[Note, ...] = (),
) -> Diagnosis:
    """Probe the workload, measure the baseline, then other settings, and judge what was measured.

    `others`: searches that run beside it.

    Raises:
        WorkloadError, ConfigError: The workload or the baseline can't be used.
        NothingFeasibleError: The baseline needs more memory than there is.
    """
    begun = monotonic()

    def start(phase: Phase, warnings: tuple[Note, ...] = ()) -> None:
        show(Progress(phase=phase, elapsed_s=monotonic() - begun, warnings=warnings))

    start("probe")
    # unknown where trials run on other machines
    free_ram_bytes = None if plan.executor.kind == "ray" else int(psutil.virtual_memory().available)
    plain = replace(plan, space=SearchSpace(), budget=Budget())
    report = runner.probe(
        plan.baseline,
        deadline_s=plan.policy.time.baseline_deadline_s,
        watch_s=measuring.watch_s,
    )
    runner, space = resolve_probe(plain, runner, report)
    plan = replace(plan, baseline=space.baseline)  # a script's is what was seen of it
    verdict = first_verdict(report.watched, space.environment.device_kind)
    start("measure", (*verdict, *warnings_in(space.notes), *others))
    measurement = _measure_baseline(plan, runner, measuring)
    spread = assumed_variation(space.environment.device_kind).of(
        [measurement.window.is_held_by_device]
    )
    evidence = Evidence(
        config=plan.baseline,
        drop_last=space.drop_last,
        environment=space.environment,
        run_variation=spread,
        facts=space.facts,
        limit_bytes=space.limit_bytes,
        free_ram_bytes=None
        if free_ram_bytes is None
        else min(free_ram_bytes, space.environment.ram_bytes),
        measurement=measurement,
        curves=Curves(),
        watched=report.watched,
    )
    left_s = _MOST_S - (monotonic() - begun)
    if left_s - measurement.startup_s < _LEAST_CURVES_S:
        short = messages.no_time_for_others(
            left_s=max(left_s, 0.0), most_s=_MOST_S, startup_s=measurement.startup_s
        )
        curves = Curves(notes=(short,))
    else:
        # the headline so far: the bottleneck, and workers by calculation
        known = judge(plan.name, evidence).headline_notes
        start("curves", tuple(one for one in known if one.code in _SURE_CODES))
        curves = _measure_curves(space, runner, measuring, measurement, left_s)
    evidence = evidence.model_copy(update={"curves": curves})
    return judge(
        plan.name, evidence, (*_ignored(plan), *space.notes, *others), wall_s=monotonic() - begun
    )


def _measure_baseline(plan: Plan, runner: TrialRunner, measuring: MeasuringTime) -> Measurement:
    result = runner.run(
        plan.baseline,
        name="baseline",
        deadline_s=plan.policy.time.baseline_deadline_s,
        window=WindowRules(max_s=measuring.window_s),
        extras=Extras(
            loader_ceiling=True,
            device_ceiling=True,
            copy_ceiling=True,
            breakdown=True,
            activations=True,
            what_if=True,
            stretch_s=measuring.stretch_s,
        ),
    )
    if result.measurement is not None:
        return result.measurement
    reason = f"the baseline must run to be diagnosed, but it ended: {result.reason}"
    if result.outcome in OUT_OF_MEMORY:
        raise NothingFeasibleError(f"{reason}; set a smaller baseline.micro_batch_size")
    raise WorkloadError(
        reason, remote_traceback=result.failure.traceback if result.failure is not None else ""
    )


def _measure_curves(
    space: ResolvedSpace,
    runner: TrialRunner,
    measuring: MeasuringTime,
    run: Measurement,
    left_s: float,
) -> Curves:
    """Measure other settings, loader and device alone, in the remaining time."""
    # what the baseline's trial has measured; on a CPU the device is measured again, for the cores
    # that it keeps busy
    book = CeilingBook()
    keep_ceilings(book, space.baseline, run)
    known = points_of_baseline(space, book)
    if space.environment.device_kind == "cpu":
        known = Curves(loader=known.loader, copy=known.copy)
    report = runner.curves(
        space.baseline,
        list_variations(space, run),
        deadline_s=left_s,
        stretch_s=measuring.stretch_s,
        roofline=True,
        known=known,
    )
    if report.curves is not None:
        return report.curves
    return Curves(
        notes=(messages.others_failed(reason=report.result.reason or report.result.outcome),)
    )


def _ignored(plan: Plan) -> Iterator[Note]:
    """Return notes on parts of the plan that only a search uses."""
    given = {
        "space": plan.space != SearchSpace(),
        "budget": plan.budget != Budget(),
        "run_dir": plan.run_dir,
    }
    names = [name for name, is_given in given.items() if is_given]
    if names:
        yield messages.no_effect_on_diagnosis(names=names)
