"""Probe the workload before the first trial, and measure ceilings and other facts beside trials."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

from pydantic import ValidationError

from autotune.config.environment import Environment
from autotune.config.plan import Plan, ScriptFacts, WorkloadFacts
from autotune.config.training_config import NEUTRAL_WITHOUT_WORKERS, TrainingConfig
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
from autotune.policy import POLICY, Time, WindowRules
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
from autotune.records.trial import TrialResult
from autotune.space.constraints import has_binding, obstacle, ranks_on_host
from autotune.space.ranges import Basis, within_reach
from autotune.space.scaling import budget_obstacle, with_mean_batch
from autotune.space.space import ResolvedSpace, compose, resolve

# Before a study: the probe of workload and machine, which gives trials their limits and the space
# its ranges.
#
# Comes in: a Plan and a runner. Goes out: a runner that knows the limits, and the resolved space
# with its notes.


_LINES_SHOWN = 12
_LINE_SHOWN = 300
"""Of what a script has written before it ended: lines, and characters of each; our own convention."""
_DUMP = re.compile(
    r'^(?:Timeout \(.*\)!|(?:Current thread|Thread) 0x.*|  File ".*", line \d+ in .*)$',
    re.MULTILINE,
)
"""Lines of faulthandler's dump of a process that is late: they say where autotune waits, not what
the script does."""


def probe_workload(plan: Plan, runner: TrialRunner) -> tuple[TrialRunner, ResolvedSpace]:
    """Probe the workload; the runner that knows the limits, and the space with its default ranges."""
    longest_s = min(plan.policy.time.baseline_deadline_s, plan.budget.timeout_s or inf)
    report = runner.probe(plan.baseline, deadline_s=longest_s)
    if report.environment is None or report.facts is None:
        raise _probe_failure(report, runner)
    hosts = slots_of(runner.launcher)
    is_spread = plan.executor.ranks == "spread"
    environment = report.environment.model_copy(
        update={"hosts": max(1, hosts), "is_spread": is_spread}
    )
    script = report.facts.script
    given = plan.space.given()
    baseline = _baseline(plan, report.facts)
    if script is not None:
        reached = within_reach(given, script, environment)
        if isinstance(reached, str):
            raise ConfigError(reached)
        given = dict(reached)
        runner = runner.with_script(script)
        if script.is_in_process:
            preload_in(
                runner.launcher,
                script.modules,
                {**report.variables, **muted_environment(os.environ)},
            )
    listed = budget_obstacle(given, report.facts)
    if listed is not None:
        raise ConfigError(listed)
    unfit = _unfit(plan, baseline, report.facts, environment)
    if unfit:
        baseline = _baseline(plan, report.facts, without=unfit.keys())
    baseline = with_mean_batch(baseline, report.facts)
    drop_last = (
        plan.workload.drop_last
        if report.facts.objects.drop_last is None
        else report.facts.objects.drop_last
    )
    reason = obstacle(baseline, report.facts, environment, drop_last=drop_last)
    if reason is not None:
        raise ConfigError(f"baseline: {reason}")
    space = resolve(
        Basis(
            given=given,
            baseline=baseline,
            objective=plan.objective,
            facts=report.facts,
            environment=environment,
            drop_last=drop_last,
            policy=plan.policy,
        )
    )
    _refuse_empty(space)
    _refuse_too_large_reserve(space)
    ready = replace(
        runner,
        limits=MemoryLimits.on(environment, space.limit_bytes),
        build_s=(report.workload_build_s or 0.0) if is_sharing(runner.launcher) else 0.0,
    )
    told = (
        *plan.notes,
        *unfit.values(),
        *_object_notes(plan, report.facts),
        *_script_notes(plan, script),
        _optimizer_note(plan, report.facts),
        _budget_note(baseline, report.facts),
        *space.notes,
        note_on_others(report.conditions),
        *notes_of(runner.launcher),
    )
    return ready, replace(space, notes=tuple(item for item in told if item is not None))


def _unfit(
    plan: Plan, baseline: TrainingConfig, facts: WorkloadFacts, environment: Environment
) -> dict[str, Note]:
    """Return the settings of a framework's own file that this optimizer or machine can't have, each with a note.

    Frameworks write defaults into their files that nobody has chosen, for optimizers and machines
    of their own.
    """
    found: dict[str, Note] = {}
    fused = plan.read_over.get("fused")
    binding = plan.read_over.get("numa_binding")
    trained = facts.optimizer.name
    if fused is not None and baseline.fused:
        is_other = fused.optimizer not in {None, trained}
        if is_other or not facts.optimizer.can_fuse:
            reason: FileReason = "other_optimizer" if is_other else "no_fused_optimizer"
            found["fused"] = not_read_over(fused.name, reason, own=fused.optimizer, trained=trained)
    here = (
        baseline.world_size
        if baseline.process_count == 1
        else ranks_on_host(baseline.process_count, environment)
    )
    if binding is not None and not has_binding(baseline.numa_binding, here, environment):
        found["numa_binding"] = not_read_over(binding.name, "no_binding", own=None, trained=trained)
    return found


def _baseline(plan: Plan, facts: WorkloadFacts, *, without: Collection[str] = ()) -> TrainingConfig:
    """What the user runs today: what a script was seen to do, else what they say, and what their objects are set to.

    Args:
        plan: What they say.
        facts: What was seen.
        without: Settings of which what they say does not count.

    Raises:
        ConfigError: what they say contradicts the objects.
    """
    if facts.script is not None:
        return facts.script.observed
    said = plan.baseline.model_dump(include=plan.baseline.model_fields_set - {*without})
    objects = facts.objects
    found = objects.observed.model_dump(include={*objects.names})
    if said.get("num_workers") == 0:  # then what belongs to the loader's workers is not theirs
        found = {
            name: value for name, value in found.items() if name not in NEUTRAL_WITHOUT_WORKERS
        }
    try:
        return TrainingConfig.model_validate(found | said)
    except ValidationError as error:
        raise ConfigError(
            f"baseline: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from error


def _object_notes(plan: Plan, facts: WorkloadFacts) -> Iterator[Note]:
    """What was read from the user's own objects, and what of them can't be varied."""
    objects = facts.objects
    own = [name for name in objects.names if name not in plan.baseline.model_fields_set]
    if own:
        yield baseline_from_objects(settings=own, has_loader=objects.has_loader)
    if objects.has_loader and facts.fixed_batch_size is not None:
        yield batches_are_fixed(facts.fixed_batch_size)


def _script_notes(plan: Plan, script: ScriptFacts | None) -> Iterator[Note]:
    """What was seen of a script that its user should know."""
    if script is None:
        return
    given = plan.baseline.model_dump(
        include=plan.baseline.model_fields_set - set(script.placeholders)
    )
    own = script.observed.model_dump()
    overruled = [name for name, value in given.items() if value != own[name]]
    if overruled:
        yield script_overrides_baseline(overruled)
    unknown = [name for name in script.placeholders if name not in plan.baseline.model_fields_set]
    if unknown:
        yield placeholders_by_default(
            [f"{name}={getattr(plan.baseline, name)}" for name in unknown]
        )
    yield from script.unreached
    if script.new_files:
        yield files_left(script.new_files[:8], count=len(script.new_files))


def _optimizer_note(plan: Plan, facts: WorkloadFacts) -> Note | None:
    """That the default optimizer is lighter than the user's may be."""
    if (
        plan.workload.optimizer is not None
        or plan.workload.command is not None
        or not facts.trainable_parameter_count
    ):
        return None
    count = facts.trainable_parameter_count
    # Adam keeps two moments in float32 (torch.optim.Adam, exp_avg and exp_avg_sq).
    return default_optimizer(trainable_parameters=count, adam_bytes=8 * count)


def _budget_note(baseline: TrainingConfig, facts: WorkloadFacts) -> Note | None:
    """What a batch of the token budget holds: the micro batch that was given, or is the default, is not used."""
    if facts.budget_samples is None or baseline.max_tokens is None:
        return None
    return batch_follows_budget(baseline.max_tokens, facts.budget_samples)


def _refuse_empty(space: ResolvedSpace) -> None:
    """A space in which no combination is allowed is the caller's mistake, with the first reason."""
    if space.size > 4096:  # composing them all takes a fraction of a second
        return
    configs = (compose(params, space) for params in space.combinations())
    first = next(configs)
    if isinstance(first, str) and all(isinstance(config, str) for config in configs):
        raise ConfigError(
            f"space: at least one configuration must be possible, but none is: {first}"
        )


def _refuse_too_large_reserve(space: ResolvedSpace) -> None:
    """Trials need something of the memory limit."""
    if space.limit_bytes <= 0:
        objective = space.objective
        device_bytes = space.environment.device_memory_bytes
        raise ConfigError(
            f"objective: reserve must be less than memory_limit, but got "
            f"{objective.reserve_bytes(device_bytes):,} of "
            f"{space.limit_bytes + objective.reserve_bytes(device_bytes):,} bytes; lower reserve"
        )


def _probe_failure(report: RankReport, runner: TrialRunner) -> WorkloadError:
    """Return why a probe failed, with the traceback, or what a script has written last where that tells more."""
    result = report.result
    failure = report.result.failure
    is_exit = failure is None or failure.signature.startswith("SystemExit ")
    said = (
        _last_lines(runner.logs.parent / result.log)
        if runner.command is not None and is_exit and result.log
        else ""
    )
    if report.is_workload_fault:
        return WorkloadError(result.reason, remote_traceback=said)
    traceback = said or (failure.traceback if failure is not None else "")
    why = f"it ended: {result.reason}"
    if result.outcome == "timeout":
        why = f"{result.reason}; give it more time by budget.timeout_s, or fewer steps before it trains"
    return WorkloadError(
        f"the workload must run one training step, but {why}", remote_traceback=traceback
    )


def _last_lines(log: Path) -> str:
    """Return the last lines of a log that is about to be removed, before the traceback of its end or our own dump."""
    try:
        text = log.read_text("utf-8", errors="replace")
    except OSError:
        return ""
    text = _DUMP.sub("", text)
    before, mark, after = text.rpartition("Traceback (most recent call last):")
    lines = [
        line[:_LINE_SHOWN] for line in (before if mark else after).splitlines() if line.strip()
    ]
    return (
        "\n".join(["It has written last:", *(f"  {line}" for line in lines[-_LINES_SHOWN:])])
        if lines
        else ""
    )


# What a search has its runs measure beside their windows, and the ceilings that runs know from one
# another.
#
# Each ceiling is measured once for the settings that it depends on; a CeilingBook keeps it for all
# others.


def extras_of(
    config: TrainingConfig,
    book: CeilingBook,
    window: WindowRules,
    *,
    is_baseline: bool,
    limits: Time = POLICY.time,
) -> Extras:
    """The ceilings that no run has measured or tried to measure; for the baseline everything."""
    if is_baseline:
        return everything(window, limits)
    return Extras(
        loader_ceiling=book.needs("loader", config),
        device_ceiling=book.needs("device", config),
        copy_ceiling=book.needs("copy", config),
        stretch_s=_stretch_s(window, limits),
    )


def everything(window: WindowRules, limits: Time = POLICY.time) -> Extras:
    """All ceilings, and where the time goes."""
    return Extras(
        loader_ceiling=True,
        device_ceiling=True,
        copy_ceiling=True,
        breakdown=True,
        stretch_s=_stretch_s(window, limits),
    )


def with_ceilings(
    result: TrialResult, config: TrainingConfig, book: CeilingBook, *, asked: Extras = NO_EXTRAS
) -> TrialResult:
    """Enter what a run has measured into the book, and return the run with the ceilings that the book then has.

    What was asked of it and is missing is entered as tried in vain. A ceiling that this or another
    run exceeds, or that other measurements contradict, stands in `ceilings` alone, with what was
    measured.
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
    return result if settled is measurement else result.model_copy(update={"measurement": settled})


def with_settled_ceilings(
    measurement: Measurement, config: TrainingConfig, book: CeilingBook
) -> Measurement:
    """Return a run with the ceilings of the book, without those that its own rate exceeds.

    What a run has measured and the book has no side for stays: a group's ceilings are made from
    those of its ranks.
    """
    own = measurement.ceilings or Ceilings()
    window = measurement.window
    was_measured = {f"{side}_ceiling": getattr(own, side) is not None for side in SIDES}
    known = dict[str, float | None]()
    for side in SIDES:
        ceiling = book.ceiling_of(side, config)
        known[f"{side}_ceiling"] = None if ceiling is None else ceiling.samples_per_s
    device = book.ceiling_of("device", config)
    known["host_ceiling"] = (
        None if window.is_held_by_device else host_ceiling_of(device, window.take_s)
    )
    changed = dict[str, float | None]()
    for name, rate in known.items():
        before: float | None = getattr(measurement, name)
        settled = rate if before is None or was_measured.get(name, False) else before
        if settled is not None and measurement.samples_per_s_ci[0] > EXCEEDED_FROM * settled:
            settled = None
        if settled != before:
            changed[name] = settled
    return measurement.model_copy(update=changed) if changed else measurement


def _stretch_s(window: WindowRules, limits: Time) -> float:
    return min(
        max(limits.ceiling_share * window.max_s, limits.shortest_ceiling_s),
        limits.longest_ceiling_s,
    )
