"""Implement the smaller commands: report, compare, check, env, load, export, apply."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import isfile, lexists
from pathlib import Path

from autotune.api.setup import opened_launcher, runner_for, temporary_folder
from autotune.apply.cores import compile_cache_variables, processor_name, usable_cores
from autotune.config.command import command_fault, placeholders_in
from autotune.config.environment import Environment
from autotune.config.plan import Plan, Workload
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError, LauncherError, RunFolderError
from autotune.export.table import Export
from autotune.files.plan_file import parse_plan
from autotune.files.recommended import differing_fields, read_machine, read_recommended, read_script
from autotune.files.run_folder import RunFolder, read_summary, recommended_of
from autotune.launch.launcher import Launcher
from autotune.launch.machine import driver_and_gpus
from autotune.messages.search import found_elsewhere
from autotune.protocol.attach import attached_environment, framework_environment, words_to_start
from autotune.protocol.disk import write_atomic
from autotune.protocol.payload import write_payload
from autotune.records.result import RunSummary
from autotune.report.comparison import Comparison, compare_summaries
from autotune.report.html import render_page
from autotune.report.markdown import render_markdown
from autotune.report.model import ReportModel, build_report
from autotune.report.words import one_line
from autotune.space.space import ResolvedSpace
from autotune.tuning.probe import probe_workload
from autotune.tuning.warm_start import hints_of, note_of_stale

# report.md and report.html: written at the end of a search, and again from a run folder.
#
# Comes in: a summary. Goes out: the files, and what went wrong with them in a sentence, since
# neither may cost the result. Apart from search.py, whose imports take longer than a report does.


def report_of(summary: RunSummary, folder: RunFolder) -> ReportModel:
    """Return the report of a run folder, as it is after its files are written."""
    return build_report(summary, folder.path, written=(folder.report.name, folder.page.name))


def write_reports(make: Callable[[], ReportModel], folder: RunFolder) -> str:
    """Make the report and write its files; return what failed, or "". Only interrupts are raised."""
    try:
        report = make()
        write_atomic(folder.report, render_markdown(report).encode())
        page = render_page(report)
        write_atomic(folder.page, page.html.encode())
    except RunFolderError as error:
        return f"The reports could not be written: {error}"
    except Exception as error:  # noqa: BLE001 - no report may cost a finished search its result
        return f"The reports could not be made: {one_line(f'{type(error).__name__}: {error}')}"
    return page.note


def open_report(run_dir: Path) -> ReportModel:
    """Return the report of a run folder, as it is after its files are written again.

    Raises:
        ConfigError: The folder has no finished search, or it can't be read; the message names the
            file.
    """
    return report_of(read_summary(run_dir), RunFolder(run_dir))


def rewrite_reports(report: ReportModel, run_dir: Path) -> tuple[ReportModel, str]:
    """Write both reports again; return the report without missing files, and what failed, or "".

    Drawing takes as long as everything else, so show the report first.
    """
    note = write_reports(lambda: report, RunFolder(run_dir))
    return (build_report(report.summary, run_dir) if note else report), note


# `autotune compare`


def compare_runs(first: Path, second: Path) -> Comparison:
    """Compare two finished searches, also from different machines or versions of autotune.

    Raises:
        ConfigError: A folder has no finished search, or it can't be read; the message names the
            file.
    """
    return compare_summaries(read_summary(first), read_summary(second), (str(first), str(second)))


# `autotune check` and `autotune env`


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of `autotune check`."""

    space: ResolvedSpace
    """Space that would be searched, with workload and machine."""
    stale: str | None = None
    """Why the recommendation in run_dir is stale, in a sentence; None if it is not."""
    has_recommendation: bool = False
    """True if run_dir has a recommended.yaml."""


def check_plan(plan: Plan, *, launcher: Launcher | None = None) -> CheckResult:
    """Run one step of a plan's workload, and return the machine and the space that would be searched."""
    hints_of(plan)  # raises where a search would
    with temporary_folder() as folder, opened_launcher(launcher, folder, plan) as starts:
        write_payload(plan.workload, folder.payload)
        _, space = probe_workload(plan, runner_for(plan, folder, starts))
    recommended = None if plan.run_dir is None else RunFolder(plan.run_dir).recommended
    if recommended is None or not isfile(recommended):  # noqa: PTH113 - unlike Path.is_file, no error for any name
        return CheckResult(space=space)
    stale = note_of_stale(recommended, space.environment)
    return CheckResult(
        space=space, stale=None if stale is None else str(stale), has_recommendation=True
    )


def environment(device: str = "auto", *, launcher: Launcher | None = None) -> Environment:
    """Return this machine as trials see it.

    Raises:
        ConfigError: torch has no such device.
        LauncherError: The process that describes the machine failed.
    """
    plan = parse_plan(
        {"workload": Workload(model=None, dataset=None), "device": device}, name="env"
    )
    with temporary_folder() as folder, opened_launcher(launcher, folder, plan) as starts:
        report = runner_for(plan, folder, starts).describe(
            deadline_s=plan.policy.time.baseline_deadline_s
        )
    if report.environment is None:
        raise LauncherError(
            f"a process must be able to describe this machine with device={device!r}, but it "
            f"ended: "
            f"{report.result.reason}; set another device, or see that torch works here"
        )
    return report.environment


# `autotune.load`


def load(path: str | Path) -> TrainingConfig:
    """Read the settings that a search recommends.

    Args:
        path: A recommended.yaml, or the run folder that has it.

    Warns:
        UserWarning: They were found on a different machine: another processor or NVIDIA GPU, driver,
            number of cores, or version of torch (if it is imported).

    Raises:
        ConfigError: The file can't be read, is no recommended.yaml, or was changed to what breaks a
            rule.
    """
    path = recommended_of(Path(path))
    config = read_recommended(path)
    there = read_machine(path)
    differing = differing_fields(there, _facts_here(there))
    if differing:
        warnings.warn(str(found_elsewhere(str(path), differing)), stacklevel=2)
    return config


def _facts_here(there: Mapping[str, object]) -> dict[str, object]:
    """Describe this machine by the file's names, as far as possible without opening a device."""
    known: dict[str, object] = {"cores": usable_cores()}
    if there.get("device_kind") == "cpu":
        known["name"] = processor_name()
    elif there.get("device_kind") == "cuda":
        driver, gpus = driver_and_gpus()
        known |= {
            "driver": driver,
            "name": there.get("name") if there.get("name") in gpus else next(iter(gpus), None),
        }
    if (torch := sys.modules.get("torch")) is not None:
        known["torch"] = str(torch.__version__)
    return known


# `autotune export`, for the device that the settings were found on


def export_run(path: Path, target: str) -> Export:
    """Return the recommended settings for a target.

    Args:
        path: A recommended.yaml or a run folder.
        target: A target of TrainingConfig.to.

    Raises:
        ConfigError: The file can't be read, or there is no such target.
    """
    file = recommended_of(path)
    config = load(file)
    device = read_machine(file).get("device")
    optimizer = None if file == path else _optimizer_of(path)
    return config.to(target, device=str(device) if device else None, optimizer=optimizer)


def _optimizer_of(run_dir: Path) -> str | None:
    """Return the class of the trials' optimizer; warn if the run folder does not have it."""
    if not lexists(
        RunFolder(run_dir).summary
    ):  # a recommended.yaml was put into a folder by itself
        return None
    try:
        return read_summary(run_dir).facts.optimizer.name
    except ConfigError as error:
        warnings.warn(
            f"Exported without the name of your optimizer, which the run folder lacks: {error}",
            stacklevel=3,
        )
        return None


def export_notes(export: Export) -> list[str]:
    """Return a line for each dropped setting and each differing default of the target."""
    dropped = [f"not exported: {setting}: {reason}" for setting, reason in export.dropped]
    return dropped + [f"differs by default: {name}: {reason}" for name, reason in export.defaults]


def export_json(export: Export) -> str:
    """Return the export as one JSON document."""
    document = {
        "format": 1,
        "target": export.target,
        "text": export.text,
        "settings": export.settings,
        "dropped": [one._asdict() for one in export.dropped],
        "defaults": [one._asdict() for one in export.defaults],
    }
    return json.dumps(document, indent=2)


# `autotune apply`: run a training script to its end with recommended settings, through the same hooks
# as trials. Nothing is measured, redirected or muted.


def applied(path: Path, command: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command and the environment variables that train with recommended settings.

    Args:
        path: A recommended.yaml, or the run folder of a search on a command.
        command: The command that trains, with the placeholders of the search; other arguments may
            differ.

    Raises:
        ConfigError: The file can't be read, was found for something else, or the command can't be
            used.
    """
    fault = command_fault(command)
    if fault is not None:
        raise ConfigError(fault)
    file = recommended_of(path)
    config = load(file)
    found = read_script(file)
    missing = [
        f"{{{name}}}" for name in found.script.placeholders if name not in placeholders_in(command)
    ]
    if missing:
        raise ConfigError(
            f"the command must carry the placeholders that it was searched with, but "
            f"{', '.join(missing)} is missing; "
            f"it was searched as: {shlex.join(found.command)}"
        )
    words = words_to_start(command, config)
    known = {
        "config": config.model_dump(mode="json"),
        "script": found.script.model_dump(mode="json"),
    }
    switches = dict(switch.split("=", 1) for switch in found.malloc if "=" in switch)
    own = {name: value for name, value in switches.items() if name not in os.environ}
    of_framework = framework_environment(config, found.script)
    return words, {
        **own,
        **compile_cache_variables(),
        **attached_environment(known),
        **of_framework,
    }


def apply_command(path: Path, command: Sequence[str], *, only_print: bool = False) -> None:
    """Replace this process by the command with the settings applied; with `only_print`, print it.

    Raises:
        ConfigError: As for `applied`, or the program can't be started.
    """
    words, environment = applied(path, command)
    if only_print:
        names = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        sys.stdout.write(f"env {' '.join(names)} {shlex.join(words)}\n")
        return
    sys.stdout.flush()
    sys.stderr.write(f"autotune: starting {shlex.join(words)} with the recommended settings\n")
    sys.stderr.flush()
    # Python ignores this signal, and the program that is started would go on ignoring it.
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(words[0], list(words), {**os.environ, **environment})  # noqa: S606 - no shell: the user's own words
    except OSError as error:
        signal.signal(signal.SIGPIPE, before)
        raise ConfigError(
            f"a command must name a program that can be started, but {words[0]!r} can't be "
            f"({error.strerror}); check its path"
        ) from error
