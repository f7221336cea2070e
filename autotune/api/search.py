"""Run a search from a plan to its result, or open a result from its run folder."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from autotune.api.commands import report_of, write_reports
from autotune.api.setup import (
    kept_interrupts,
    kept_random_state,
    opened_launcher,
    runner_for,
    warnings_in,
    without_interrupts,
)
from autotune.config.command import without_secrets
from autotune.config.plan import Plan
from autotune.config.training_config import LOADER_SETTINGS, TrainingConfig
from autotune.errors import ConfigError, NothingFeasibleError, WorkloadError
from autotune.files.recommended import recommended_yaml
from autotune.files.run_folder import RunFolder, new_run_dir, open_run_folder, read_summary
from autotune.files.script_patch import patch_script
from autotune.launch.launcher import Launcher, is_sharing, notes_of, slots_of
from autotune.launch.machine import Neighbours
from autotune.launch.runner import TrialRunner
from autotune.messages.search import file_damaged, interrupted, search_resumed
from autotune.models.memory import growth_notes_of
from autotune.note import Note
from autotune.protocol.attach import changed_settings
from autotune.protocol.disk import write_atomic, write_model
from autotune.protocol.payload import write_payload
from autotune.records.measurement import MemoryLimits
from autotune.records.result import Progress, RunSummary
from autotune.records.study_identity import identify
from autotune.records.trial import TrialRecord
from autotune.report.html import render_notebook
from autotune.report.markdown import render_markdown
from autotune.report.model import build_report
from autotune.report.progress import ProgressMode, make_progress
from autotune.report.sentences import describe_nothing_feasible
from autotune.settings_table import BATCH_SETTINGS
from autotune.tuning.loop import Search
from autotune.tuning.outcomes import host_notes
from autotune.tuning.probe import probe_workload
from autotune.tuning.proposer import Proposer
from autotune.tuning.select import select
from autotune.tuning.study import Study, open_finished
from autotune.tuning.time_budget import Clock, TimeBudget
from autotune.tuning.warm_start import Hints, hints_of, note_of_hints, seed_params
from autotune.version import __version__

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    best: TrainingConfig
    """Recommended configuration, with its learning rate scaled to its global batch."""
    baseline: TrainingConfig
    best_same_batch: TrainingConfig | None
    """Best configuration with the baseline's global batch; None if there is none."""
    trials: list[TrialRecord]
    """All measured trials in order; the first is the baseline."""
    speedup: float | None
    """Estimated speedup of `best` over the baseline, from all runs of both; None if the baseline can't
    be compared."""
    speedup_ci: tuple[float, float] | None
    """95 % interval of the speedup."""
    study: optuna.Study
    run_dir: Path
    summary: RunSummary
    """Data of all reports."""

    def report(self) -> str:
        """Return the report in Markdown."""
        return render_markdown(build_report(self.summary, self.run_dir))

    def _repr_html_(self) -> str:
        """Return the result as an HTML table, for notebooks."""
        return render_notebook(build_report(self.summary, self.run_dir))


def open_run(path: str | Path) -> SearchResult:
    """Open the result of an earlier search from its run folder, without measuring anything.

    If the folder can be written, SQLite keeps a log next to study.db while the study is in use;
    otherwise the study is a copy.

    Args:
        path: Run folder of a search that ended or was interrupted.

    Raises:
        ConfigError: The folder has no result, or one of another version of autotune.
        RunFolderError: Its study.db is missing or can't be read.
        NothingFeasibleError: The search found no configuration that meets the memory limit.
    """
    folder = RunFolder(Path(path).absolute())
    summary = read_summary(folder.path)
    if summary.recommendation is None:
        raise NothingFeasibleError(describe_nothing_feasible(summary))
    study = open_finished(folder.study)
    return result_of(summary, study, folder.path)


def result_of(summary: RunSummary, study: optuna.Study, run_dir: Path) -> SearchResult:
    """Return the result in a summary that has a recommendation."""
    winner = summary.recommendation
    assert winner is not None  # noqa: S101 - without one NothingFeasibleError was raised
    ratio = winner.speedup
    return SearchResult(
        best=winner.config,
        baseline=summary.baseline,
        best_same_batch=winner.same_batch,
        trials=list(summary.trials),
        speedup=None if ratio is None else ratio.value,
        speedup_ci=None if ratio is None else (ratio.low, ratio.high),
        study=study,
        run_dir=run_dir,
        summary=summary,
    )


# A search from a plan to its result and the files of its run folder: probe, search, select


_LOG = logging.getLogger(__name__)


def run_plan(
    plan: Plan,
    *,
    fresh: bool = False,
    progress: ProgressMode = "auto",
    launcher: Launcher | None = None,
) -> SearchResult:
    """Run a search from a plan; see `search`. The caller's random state is kept."""
    limits = plan.policy.time
    timeout_s = plan.budget.timeout_s
    writing_s = min(limits.writing_s, limits.writing_share * (timeout_s or 0.0))
    clock = Clock(timeout_s, writing_s=writing_s, deciding_share=limits.deciding_share)
    with kept_random_state(), kept_interrupts(), ExitStack() as held:
        hints = hints_of(plan)  # before `fresh` clears the folder, which they may come from
        folder = held.enter_context(open_run_folder(plan.run_dir or new_run_dir(), fresh=fresh))
        show = held.enter_context(make_progress(progress))
        starts = held.enter_context(opened_launcher(launcher, folder, plan))
        write_payload(plan.workload, folder.payload)
        # while the probe's process starts; and a Ctrl-C, which would be taken for a failed import,
        # spares a thread
        Thread(target=import_module, args=("scipy.optimize",)).start()

        def show_probe(warnings: tuple[Note, ...] = ()) -> None:
            show(
                Progress(
                    phase="probe",
                    elapsed_s=clock.elapsed_s,
                    remaining_s=clock.left_s,
                    warnings=warnings,
                )
            )

        show_probe()
        begun = clock.elapsed_s
        runner, space = probe_workload(plan, runner_for(plan, folder, starts))
        plan = replace(plan, baseline=space.baseline)  # a script's is what was seen of it
        probe_s = clock.elapsed_s - begun
        neighbours = Neighbours() if launcher is None and plan.executor.kind == "local" else None
        others = () if neighbours is None else neighbours.new()
        show_probe((*warnings_in(space.notes), *others))
        study = Study.open(
            folder.study,
            space,
            identity=identify(plan, space),
            seed=plan.seed,
            method=plan.search.method,
        )
        time = TimeBudget(
            study=study,
            budget=plan.budget,
            clock=clock,
            slots=partial(slots_of, starts),
            probe_s=probe_s,
            build_s=runner.build_s,
        )
        search = _search_of(plan, time, runner, folder, hints)
        search.show = show
        search.notes += others

        def keep(record: TrialRecord) -> None:
            folder.append_trial(record)
            if neighbours is not None:
                search.notes += neighbours.new()

        search.on_record = keep
        try:
            folder.write_trials(study.records)  # a kill or damage may have left others there
            summary = _finished(search, folder)
            if summary is None:
                summary = _tune(search, plan, folder)
        finally:
            study.close()  # else a result would keep the file open, until it is collected
    return result_of(summary, study.optuna_study, folder.path)


def _search_of(
    plan: Plan, time: TimeBudget, runner: TrialRunner, folder: RunFolder, hints: Hints | None
) -> Search:
    """Make the search with its proposer; if it is continued, read its curves of loader and device."""
    study = time.study
    space = study.space
    search = Search(
        time=time,
        runner=runner,
        proposer=Proposer(time, plan.seed, keep=partial(write_model, folder.curves)),
        notes=list(space.notes),
    )
    if study.records:
        search.notes.append(search_resumed(plan.workload.command is not None))
        curves = folder.read_curves()
        if isinstance(curves, Note):
            search.notes.append(curves)
        elif curves is not None:
            search.proposer.recall(curves, search.ceilings)
    if hints is not None:
        search.first = seed_params(hints, space)
        search.notes.append(note_of_hints(hints, space))
    return search


def _tune(search: Search, plan: Plan, folder: RunFolder) -> RunSummary:
    """Search, select and write; however it ends, the run folder has the best so far with its certainty."""
    try:
        search.run()
    except WorkloadError:
        raise
    except BaseException as error:
        with without_interrupts():
            _write(_summarise(search, plan, interrupted(type(error).__name__)), folder)
        raise
    with (
        without_interrupts()
    ):  # the search is done: an interrupt now would only lose what it has found
        summary = _summarise(search, plan)
        _write(summary, folder)
    if summary.recommendation is None:
        raise NothingFeasibleError(describe_nothing_feasible(summary))
    return summary


def _finished(search: Search, folder: RunFolder) -> RunSummary | None:
    """Return the summary of a search that is decided and has no trial left, with its reports; else None.

    A damaged summary, or a study that lacks trials of it, is noted, and the search continues.
    """
    time = search.time
    study = search.study
    budget = search.time.budget
    if not folder.summary.exists():
        return None
    try:
        summary = read_summary(folder.path)
    except ConfigError as error:
        search.notes.append(file_damaged(folder.summary.name, reason=str(error)))
        return None
    lacking = {trial.number for trial in summary.trials} - {one.number for one in study.records}
    if lacking:
        reason = f"it lacks {len(lacking)} trials of {folder.summary.name}"
        search.notes.append(file_damaged(folder.study.name, reason))
    if lacking or not study.records:
        return None
    is_over = study.is_exhausted or (not budget.may_stop_early and time.why_over is not None)
    ended_by_itself = budget.may_stop_early and budget.timeout_s is None
    if not (is_over or (ended_by_itself and summary.budget == budget)):
        return None
    # As text: a figure that is no number equals nothing.
    written, known = (
        [trial.model_dump_json() for trial in trials] for trials in (summary.trials, study.records)
    )
    is_same = written == known and summary.objective == study.space.objective
    winner = summary.recommendation
    is_settled = winner is not None and winner.verdict != "unconfirmed"
    if not (is_same and is_settled and summary.is_complete):
        return None
    if not folder.has_reports():  # they are missing since the process was killed
        write_reports(lambda: report_of(summary, folder), folder)
    return summary


def _write(summary: RunSummary, folder: RunFolder) -> None:
    """Write all files, the summary last, since it marks a search as finished."""
    if summary.recommendation is not None:
        write_atomic(folder.recommended, recommended_yaml(summary).encode())
    else:
        folder.recommended.unlink(missing_ok=True)  # of an earlier run of the same search
    _write_patch(summary, folder)
    folder.write_summary(summary)
    note = write_reports(lambda: report_of(summary, folder), folder)
    if note:
        _LOG.warning("%s", note)


def _write_patch(summary: RunSummary, folder: RunFolder) -> None:
    """Write the loader's settings as a diff of the script, if possible; it is never applied here."""
    script = summary.facts.script
    winner = summary.recommendation
    folder.patch.unlink(missing_ok=True)  # of an earlier run of the same search
    if script is None or script.own_loader is None or winner is None:
        return
    site = script.own_loader
    changed = changed_settings(winner.config, script)
    wanted = changed & BATCH_SETTINGS
    if not changed.isdisjoint(LOADER_SETTINGS):
        wanted |= {*LOADER_SETTINGS}
    patch = patch_script(Path(site.file), site.line, winner.config, wanted)
    if patch:
        write_atomic(folder.patch, patch)


def _summarise(search: Search, plan: Plan, interrupted: Note | None = None) -> RunSummary:
    """Select, and return the data of reports; `interrupted` is what ended the search early, if anything."""
    found = search.outcome()
    study = search.study
    space = study.space
    ended = interrupted or found.ended_because
    assert ended is not None, "a search ends for a reason"  # noqa: S101 - our own bug
    measured = next(
        (record.measurement for record in found.records if record.measurement is not None), None
    )
    winner = select(found)
    limits = MemoryLimits.on(space.environment, space.limit_bytes)
    launcher = search.runner.launcher
    notes = (
        *search.notes,
        *host_notes(found.records, search.ceilings, winner),
        *growth_notes_of(found.records, winner, limits, space.policy.memory),
        *search.time.notes(has_shared=is_sharing(launcher)),
        *notes_of(launcher),  # hosts come and go
    )
    return RunSummary(
        name=plan.name,
        objective=plan.objective,
        budget=plan.budget,
        baseline=plan.baseline,
        seed=plan.seed,
        environment=space.environment,
        facts=space.facts,
        command=without_secrets(plan.workload.command or ()),
        limit_bytes=space.limit_bytes,
        memory_source="not measured" if measured is None else measured.memory.source,
        trials=found.records,
        run_variation=study.spread,
        recommendation=winner,
        notes=tuple(dict.fromkeys(notes)),
        stopped_because=ended,
        is_complete=search.is_complete,
        wall_s=search.time.clock.elapsed_s,
        promised_s=search.promised_s,
        autotune_version=__version__,
    )
