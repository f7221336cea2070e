"""A plan checked without a search, and the machine described: what `autotune check` and `autotune env` show."""

from __future__ import annotations

from dataclasses import dataclass
from os.path import isfile

from autotune.api.setup import opened_launcher, runner_for, temporary_folder
from autotune.errors import LauncherError
from autotune.files.plan_file import parse_plan
from autotune.files.run_folder import RunFolder
from autotune.launch.launcher import Launcher
from autotune.protocol.payload import write_payload
from autotune.settings.environment import Environment
from autotune.settings.plan import Plan
from autotune.settings.workload import Workload
from autotune.space.resolved_space import ResolvedSpace
from autotune.tuning.probe import probe_workload
from autotune.tuning.warm_start import hints_of, note_of_stale

__all__ = ["CheckResult", "check_plan", "environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What the probe of a plan has found out."""

    space: ResolvedSpace
    """What would be searched; it knows workload and machine."""
    stale: str | None = None
    """That the recommendation in run_dir was found on another machine, or before this one changed, in a sentence."""
    has_recommendation: bool = False
    """Whether there is a run_dir with a recommended.yaml."""


def check_plan(plan: Plan, *, launcher: Launcher | None = None) -> CheckResult:
    """Check a plan without searching: one step of the workload, the machine, and the space that would be searched."""
    hints_of(plan)  # raises where a search would
    with temporary_folder() as folder, opened_launcher(launcher, folder, plan) as starts:
        write_payload(plan.workload, folder.payload)
        _, space = probe_workload(plan, runner_for(plan, folder, starts))
    recommended = None if plan.run_dir is None else RunFolder(plan.run_dir).recommended
    if recommended is None or not isfile(recommended):  # noqa: PTH113 - unlike Path.is_file, no error for any name
        return CheckResult(space=space)
    stale = note_of_stale(recommended, space.environment)
    return CheckResult(space=space, stale=None if stale is None else str(stale), has_recommendation=True)


def environment(device: str = "auto", *, launcher: Launcher | None = None) -> Environment:
    """This machine as trials see it.

    Raises:
        ConfigError: torch knows no such device.
        LauncherError: the process that was to describe the machine failed.
    """
    plan = parse_plan({"workload": Workload(model=None, dataset=None), "device": device}, name="env")
    with temporary_folder() as folder, opened_launcher(launcher, folder, plan) as starts:
        report = runner_for(plan, folder, starts).describe(deadline_s=plan.policy.time.baseline_deadline_s)
    if report.environment is None:
        raise LauncherError(
            f"a process must be able to describe this machine with device={device!r}, but it ended: "
            f"{report.result.reason}; set another device, or see that torch works here"
        )
    return report.environment
