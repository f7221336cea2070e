"""Probe the workload before the first trial, and choose which ceilings trials measure.

Comes in: a Plan and a runner. Goes out: a runner with the memory limits, and the resolved space
with its default ranges and notes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

from pydantic import ValidationError

from autotune.config.environment import Environment
from autotune.config.plan import Plan, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError, WorkloadError
from autotune.launch.launcher import is_sharing, notes_of, preload_in, slots_of
from autotune.launch.runner import TrialRunner
from autotune.messages.space import (
    FileReason,
    baseline_from_objects,
    batch_follows_budget,
    batches_are_fixed,
    default_optimizer,
    files_left,
    not_read_over,
    placeholders_by_default,
    script_overrides_baseline,
)
from autotune.note import Note
from autotune.protocol.attach import muted_environment
from autotune.protocol.messages import NO_EXTRAS, Extras, RankReport
from autotune.records.ceilings import EXCEEDED_FROM, SIDES, CeilingBook, host_ceiling_of
from autotune.records.measurement import (
    Ceilings,
    Measurement,
    MemoryLimits,
    keep_ceilings,
    note_on_others,
)
from autotune.records.result import CurvePoint, Curves
from autotune.records.trial import TrialResult
from autotune.settings_table import must_be_neutral
from autotune.space.constraints import has_binding, obstacle, ranks_on_host
from autotune.space.ranges import Basis, within_reach
from autotune.space.scaling import budget_obstacle, with_mean_batch
from autotune.space.space import ResolvedSpace, compose, resolve

_LINES_SHOWN = 12
"""Last lines of a script's output in an error. Source: our own convention."""
_LINE_SHOWN = 300
"""Characters of each of these lines. Source: our own convention."""
_DUMP = re.compile(
    r'^(?:Timeout \(.*\)!|(?:Current thread|Thread) 0x.*|  File ".*", line \d+ in .*)$',
    re.MULTILINE,
)
"""Lines of faulthandler's dump of a late process, which show where autotune waits and not where the
script does."""


def probe_workload(plan: Plan, runner: TrialRunner) -> tuple[TrialRunner, ResolvedSpace]:
    """Probe workload and machine, and resolve the space.

    Args:
        plan: The user's plan.
        runner: Runs the probe.

    Returns:
        The runner with the memory limits, and the space with its default ranges and notes.

    Raises:
        WorkloadError: the workload can't run a training step.
        ConfigError: the plan contradicts the workload, or no configuration is possible.
    """
    longest_s = min(plan.policy.time.baseline_deadline_s, plan.budget.timeout_s or inf)
    return resolve_probe(plan, runner, runner.probe(plan.baseline, deadline_s=longest_s))


def resolve_probe(
    plan: Plan, runner: TrialRunner, report: RankReport
) -> tuple[TrialRunner, ResolvedSpace]:
    """Resolve the space from a probe's report; see `probe_workload`."""
    if report.environment is None or report.facts is None:
        raise _probe_failure(report, runner)
    facts = report.facts
    environment = report.environment.model_copy(
        update={
            "hosts": max(1, slots_of(runner.launcher)),
            "is_spread": plan.executor.ranks == "spread",
        }
    )
    script = facts.script
    given = plan.space.given()
    baseline = _baseline(plan, facts)

    # a script: search only what autotune can change in it
    if script is not None:
        reached = within_reach(given, script, environment)
        if isinstance(reached, str):
            raise ConfigError(reached)
        given = dict(reached)
        runner = runner.with_script(script)
        if script.is_in_process:
            variables = {**report.variables, **muted_environment(os.environ)}
            preload_in(runner.launcher, script.modules, variables)
    listed = budget_obstacle(given, facts)
    if listed is not None:
        raise ConfigError(listed)

    # the baseline, without what a framework's file sets and this machine can't have
    unfit = _unfit(plan, baseline, facts, environment)
    if unfit:
        baseline = _baseline(plan, facts, without=unfit.keys())
    baseline = with_mean_batch(baseline, facts)
    drop_last = facts.objects.drop_last
    if drop_last is None:
        drop_last = plan.workload.drop_last
    reason = obstacle(baseline, facts, environment, drop_last=drop_last)
    if reason is not None:
        raise ConfigError(f"baseline: {reason}")

    space = resolve(
        Basis(
            given=given,
            baseline=baseline,
            objective=plan.objective,
            facts=facts,
            environment=environment,
            drop_last=drop_last,
            policy=plan.policy,
        )
    )
    _refuse_impossible(space)

    build_s = report.workload_build_s or 0.0
    ready = replace(
        runner,
        limits=MemoryLimits.on(environment, space.limit_bytes),
        build_s=build_s if is_sharing(runner.launcher) else 0.0,
    )
    notes = (
        *plan.notes,
        *unfit.values(),
        *_notes(plan, baseline, facts),
        *space.notes,
        note_on_others(report.conditions),
        *notes_of(runner.launcher),
    )
    return ready, replace(space, notes=tuple(note for note in notes if note is not None))


def _unfit(
    plan: Plan, baseline: TrainingConfig, facts: WorkloadFacts, environment: Environment
) -> dict[str, Note]:
    """Return the settings of a framework's file that this optimizer or machine can't have, each with a note.

    Frameworks write defaults for other optimizers and machines into their files, which the user has
    not chosen.
    """
    found = dict[str, Note]()
    trained = facts.optimizer.name
    fused = plan.read_over.get("fused")
    if fused is not None and baseline.fused:
        is_other = fused.optimizer not in {None, trained}
        if is_other or not facts.optimizer.can_fuse:
            reason: FileReason = "other_optimizer" if is_other else "no_fused_optimizer"
            found["fused"] = not_read_over(fused.name, reason, own=fused.optimizer, trained=trained)
    binding = plan.read_over.get("numa_binding")
    here = baseline.world_size
    if baseline.process_count > 1:
        here = ranks_on_host(baseline.process_count, environment)
    if binding is not None and not has_binding(baseline.numa_binding, here, environment):
        found["numa_binding"] = not_read_over(binding.name, "no_binding", own=None, trained=trained)
    return found


def _baseline(plan: Plan, facts: WorkloadFacts, *, without: Collection[str] = ()) -> TrainingConfig:
    """Return the user's current settings: as a script was seen to run, else as the plan and the objects have them.

    Args:
        plan: The user's plan; its settings precede those of the objects.
        facts: The probe's findings.
        without: Settings of the plan to ignore.

    Raises:
        ConfigError: the plan contradicts the objects.
    """
    if facts.script is not None:
        return facts.script.observed
    named = plan.baseline.model_dump(include=plan.baseline.model_fields_set - {*without})
    objects = facts.objects
    found = objects.observed.model_dump(include={*objects.names})
    for name in must_be_neutral(named):  # such as those of the objects' workers
        found.pop(name, None)
    try:
        return TrainingConfig.model_validate(found | named)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"baseline: {problem}") from error


def _notes(plan: Plan, baseline: TrainingConfig, facts: WorkloadFacts) -> Iterator[Note]:
    """Yield notes of what the probe has found out about the user's objects or script."""
    given = plan.baseline.model_fields_set
    objects = facts.objects
    script = facts.script
    # settings that were read from the objects, and those that can't be varied
    own = [name for name in objects.names if name not in given]
    if own:
        yield baseline_from_objects(settings=own, has_loader=objects.has_loader)
    if objects.has_loader and facts.fixed_batch_size is not None:
        yield batches_are_fixed(facts.fixed_batch_size)
    # what a script overrides, leaves open, can't be changed in, and leaves behind
    if script is not None:
        planned = plan.baseline.model_dump(include=given - set(script.placeholders))
        observed = script.observed.model_dump()
        overruled = [name for name, value in planned.items() if value != observed[name]]
        if overruled:
            yield script_overrides_baseline(overruled)
        unknown = [name for name in script.placeholders if name not in given]
        if unknown:
            yield placeholders_by_default(
                [f"{name}={getattr(plan.baseline, name)}" for name in unknown]
            )
        yield from script.unreached
        if script.new_files:
            yield files_left(script.new_files[:8], count=len(script.new_files))
    # the default optimizer, which needs less memory than the user's may: Adam keeps two moments in
    # float32 (source: torch.optim.Adam)
    count = facts.trainable_parameter_count
    if count and plan.workload.optimizer is None and plan.workload.command is None:
        yield default_optimizer(trainable_parameters=count, adam_bytes=8 * count)
    # the samples in a batch of the token budget, which replaces the micro batch
    if facts.budget_samples is not None and baseline.max_tokens is not None:
        yield batch_follows_budget(baseline.max_tokens, facts.budget_samples)


def _refuse_impossible(space: ResolvedSpace) -> None:
    """Raise a ConfigError if the space allows no configuration, or the reserve leaves no memory to trials."""
    if space.size <= space.policy.trials.all_candidates_up_to:
        configs = (compose(params, space) for params in space.combinations())
        first = next(configs)
        if isinstance(first, str) and all(isinstance(config, str) for config in configs):
            raise ConfigError(
                f"space: at least one configuration must be possible, but none is: {first}"
            )
    if space.limit_bytes <= 0:
        reserve_bytes = space.objective.reserve_bytes(space.environment.device_memory_bytes)
        raise ConfigError(
            f"objective: reserve must be less than memory_limit, but got {reserve_bytes:,} of "
            f"{space.limit_bytes + reserve_bytes:,} bytes; lower reserve"
        )


def _probe_failure(report: RankReport, runner: TrialRunner) -> WorkloadError:
    """Return the error for a failed probe, with the traceback or, after an exit, a script's last output."""
    result = report.result
    failure = result.failure
    is_exit = failure is None or failure.signature.startswith("SystemExit ")
    output = ""
    if runner.command is not None and is_exit and result.log:
        output = _last_lines(runner.logs.parent / result.log)
    if report.is_workload_fault:
        return WorkloadError(result.reason, remote_traceback=output)
    traceback = output
    if not output and failure is not None:
        traceback = failure.traceback
    why = f"it ended: {result.reason}"
    if result.outcome == "timeout":
        why = f"{result.reason}; give it more time by budget.timeout_s, or fewer steps before it trains"
    return WorkloadError(
        f"the workload must run one training step, but {why}", remote_traceback=traceback
    )


def _last_lines(log: Path) -> str:
    """Return the last lines of a log before its final traceback, without our own dump of stacks."""
    try:
        text = log.read_text("utf-8", errors="replace")
    except OSError:
        return ""
    text = _DUMP.sub("", text)
    before, mark, after = text.rpartition("Traceback (most recent call last):")
    written = before if mark else after  # rpartition leaves all in the last part without a mark
    lines = [line[:_LINE_SHOWN] for line in written.splitlines() if line.strip()]
    if not lines:
        return ""
    return "\n".join(["It has written last:", *(f"  {line}" for line in lines[-_LINES_SHOWN:])])


# Ceilings that runs measure after their windows: each once for the settings that it depends on. A
# CeilingBook keeps it for all other runs.


def points_of_baseline(space: ResolvedSpace, book: CeilingBook) -> Curves:
    """Return the sides that the baseline's trial has measured, as points of curves, without those in doubt.

    None for a group of ranks, whose parts are not those of one device.
    """
    own = space.baseline
    known = dict[str, tuple[CurvePoint, ...]]()
    for side in SIDES:
        ceiling = book.ceiling_of(side, own)
        if not own.is_group and ceiling is not None and not book.is_in_doubt(side, own):
            known[side] = (CurvePoint(changes={}, ceiling=ceiling),)
    return Curves.model_validate(known)


def with_ceilings(
    result: TrialResult, config: TrainingConfig, book: CeilingBook, *, asked: Extras = NO_EXTRAS
) -> TrialResult:
    """Enter a run's ceilings into the book, and return the run with the ceilings known from all runs.

    A ceiling that a run exceeds, or that other measurements contradict, remains only in
    `measurement.ceilings`.

    Args:
        result: The run.
        config: Its configuration.
        book: The ceilings of the search.
        asked: The extras that the run should measure; missing ones are not tried again.
    """
    measurement = result.measurement
    if measurement is None:
        return result
    own = measurement.ceilings or Ceilings()
    keep_ceilings(book, config, measurement)
    for side in SIDES:
        if getattr(asked, f"{side}_ceiling") and getattr(own, side) is None:
            book.give_up(side, config)
    settled = with_settled_ceilings(measurement, config, book)
    return result.model_copy(update={"measurement": settled})


def with_settled_ceilings(
    measurement: Measurement, config: TrainingConfig, book: CeilingBook
) -> Measurement:
    """Return a run with the ceilings of the book, without those that its own throughput exceeds.

    A ceiling of a side that is not in the book stays as it is: those of a group are computed from
    its ranks' ceilings.
    """
    own = measurement.ceilings or Ceilings()
    window = measurement.window
    settled = {f"{side}_ceiling": getattr(measurement, f"{side}_ceiling") for side in SIDES}
    settled["host_ceiling"] = measurement.host_ceiling
    for side in SIDES:
        ceiling = book.ceiling_of(side, config)
        if settled[f"{side}_ceiling"] is None or getattr(own, side) is not None:
            settled[f"{side}_ceiling"] = None if ceiling is None else ceiling.samples_per_s
    if settled["host_ceiling"] is None and not window.is_held_by_device:
        settled["host_ceiling"] = host_ceiling_of(book.ceiling_of("device", config), window.take_s)
    for name, rate in settled.items():
        if rate is not None and measurement.samples_per_s_ci[0] > EXCEEDED_FROM * rate:
            settled[name] = None
    return measurement.model_copy(update=settled)
