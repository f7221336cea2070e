"""The public functions and their result: `search`, `load`, and what the command line calls. The composition root.

Arguments become a Plan here; `searching` and `diagnosing` do what it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.api.diagnose import DiagnosisResult, diagnose_plan
from autotune.api.search import SearchResult, rebuild_report, run_plan
from autotune.api.setup import opened_launcher, plan_of, runner_for, temporary_folder
from autotune.errors import ConfigError
from autotune.files.recommended_file import read_recommended
from autotune.files.run_folder import RunFolder, new_run_dir, read_summary
from autotune.launch.launcher import Launcher
from autotune.protocol.messages import write_payload
from autotune.records.run_summary import RunSummary
from autotune.report.render.progress import ProgressMode
from autotune.settings.environment import Environment
from autotune.settings.executor import Executor
from autotune.settings.objective import Objective
from autotune.settings.plan import Plan
from autotune.settings.search_options import Method
from autotune.settings.search_space import SearchSpace
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload, WorkloadFacts
from autotune.space.resolved_space import ResolvedSpace
from autotune.tuning.probe import look
from autotune.tuning.time_budget import BASELINE_DEADLINE_S
from autotune.tuning.warm_start import hints_of, say_stale

__all__ = [
    "CheckResult",
    "DiagnosisResult",
    "SearchResult",
    "check_plan",
    "diagnose",
    "diagnose_plan",
    "environment",
    "load",
    "new_run_dir",
    "read_run",
    "rebuild_report",
    "run_plan",
    "search",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What a look at a plan has found out."""

    environment: Environment
    facts: WorkloadFacts
    space: ResolvedSpace
    stale: str | None = None
    """That what run_dir recommends was found on another machine, or on this one as it was, in a sentence."""


def search(  # noqa: PLR0913 - the contract's signature
    model: Any,
    dataset: Any,
    *,
    loss: Callable[..., Any] | None = None,
    step: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    baseline: TrainingConfig | Mapping[str, Any] | None = None,
    space: SearchSpace | Mapping[str, Any] | None = None,
    objective: Objective | Mapping[str, Any] | None = None,
    memory_limit: float | str | None = None,
    n_trials: int | None = None,
    timeout_s: float | None = None,
    device: str = "auto",
    run_dir: str | Path | None = None,
    seed: int = 0,
    progress: ProgressMode = "auto",
    loader: Mapping[str, Any] | None = None,
    fresh: bool = False,
    method: Method = "model",
    warm_start: str | Path | None = None,
    launcher: Launcher | None = None,
    executor: Executor | Mapping[str, Any] | str = "local",
) -> SearchResult:
    """Find the training settings that train fastest on this machine within a memory limit, by measured trials.

    Args:
        model: nn.Module, or a zero-argument callable that returns one. It is not touched: trials train copies.
        dataset: Dataset, IterableDataset, or a zero-argument callable that returns one.
        loss: loss(outputs, targets) -> scalar tensor, for batches (inputs, targets).
        step: step(model, batch) -> scalar loss, for what inference does not cover.
        optimizer: optimizer(params, lr) -> torch.optim.Optimizer; None: SGD.
        collate_fn: as for torch.utils.data.DataLoader.
        baseline: what you run today; None: batch 32, no workers, float32, learning rate 1e-3.
        space: settings to search, each a list of choices, {low, high[, log]}, or one value that fixes it.
        objective: an Objective or its fields.
        memory_limit: bytes, "20GiB", or a fraction of the device's memory; None: the objective's (0.9).
        n_trials: measured trials, the baseline included; None: at most 40, and it may stop by itself.
        timeout_s: seconds for the whole search; None: no limit.
        device: torch's name for the device; "auto": the accelerator where there is one, else the CPU. A GPU that torch
            was built for and can't use is refused, not passed over.
        run_dir: folder for study, logs, report and recommended.yaml; an interrupted search in it goes on. None: a new
            folder below ./runs.
        seed: of the sampler and of each trial.
        progress: True, False, or "auto": a live line on a terminal, plain lines elsewhere.
        loader: more about the loader: shuffle, drop_last, sampler, batch_sampler, worker_init_fn,
            multiprocessing_context (see Workload).
        fresh: remove what a former search has left in run_dir.
        method: what proposes trials: "model", a model of this machine that learns as the search goes on; or one of
            Optuna's samplers: "tpe", "gp", "random", "grid".
        warm_start: a run folder or a recommended.yaml, of the same workload on another machine or of a similar one:
            what it found best is tried first.
        launcher: starts trials, whatever the executor; None: the executor's. For tests, autotune.testing.FakeLauncher.
        executor: where trials run: "local", this machine; "ray", the machines of a Ray cluster, several trials at once
            (pip install 'autotune-torch[ray]'); or an Executor or its fields: kind, address, ranks.

    Returns:
        The result; the same is in run_dir.

    Raises:
        ConfigError: an argument breaks a rule, or ray is not installed.
        WorkloadError: the model, dataset or step fails in the baseline, or can't be carried to a trial.
        NothingFeasibleError: no configuration meets the memory limit.
        RepeatedFailureError: the same exception ended three different configurations.
        RunFolderError, StudyMismatchError: the run folder can't be used.
    """
    parts = {"loss": loss, "step": step, "optimizer": optimizer, "collate_fn": collate_fn}
    plan = plan_of(
        model,
        dataset,
        parts=parts,
        loader=loader,
        baseline=baseline,
        space=space,
        objective=objective,
        memory_limit=memory_limit,
        budget={"n_trials": n_trials, "timeout_s": timeout_s},
        search={"method": method, "warm_start": warm_start},
        device=device,
        run_dir=run_dir,
        seed=seed,
        executor=executor,
    )
    return run_plan(plan, fresh=fresh, progress=progress, launcher=launcher)


def diagnose(  # noqa: PLR0913 - the contract's signature
    model: Any,
    dataset: Any,
    *,
    loss: Callable[..., Any] | None = None,
    step: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    baseline: TrainingConfig | Mapping[str, Any] | None = None,
    objective: Objective | Mapping[str, Any] | None = None,
    memory_limit: float | str | None = None,
    device: str = "auto",
    seed: int = 0,
    progress: ProgressMode = "auto",
    loader: Mapping[str, Any] | None = None,
    launcher: Launcher | None = None,
    executor: Executor | Mapping[str, Any] | str = "local",
) -> DiagnosisResult:
    """Say why training is slow and what to do about it, without a search.

    It takes under a minute, unless your own code takes long to build (two or three times) or to make a step: then as
    long as measuring the baseline does, and other settings stay unmeasured. The arguments are those of `search` but for
    space, n_trials, timeout_s, run_dir, method, warm_start and fresh; `baseline` is what is looked at. No run folder is
    kept: what trials need lies among the temporary files until the end.

    Raises:
        ConfigError: an argument breaks a rule, or ray is not installed.
        WorkloadError: the model, dataset or step fails, or can't be carried to a trial.
        NothingFeasibleError: the baseline needs more memory than there is.
    """
    parts = {"loss": loss, "step": step, "optimizer": optimizer, "collate_fn": collate_fn}
    plan = plan_of(
        model,
        dataset,
        parts=parts,
        loader=loader,
        baseline=baseline,
        objective=objective,
        memory_limit=memory_limit,
        device=device,
        seed=seed,
        executor=executor,
    )
    return diagnose_plan(plan, progress=progress, launcher=launcher)


def load(path: str | Path) -> TrainingConfig:
    """Read the settings of a recommended.yaml.

    Raises:
        ConfigError: the file is missing or is no recommended.yaml.
    """
    return read_recommended(Path(path))


def check_plan(plan: Plan, *, launcher: Launcher | None = None) -> CheckResult:
    """Look at a plan without searching: one step of the workload, the machine, and the space it would search."""
    hints_of(plan)  # raises where a search would
    with temporary_folder() as folder, opened_launcher(launcher, folder, plan) as starts:
        write_payload(plan.workload, folder.payload)
        _, space = look(plan, runner_for(plan, folder, starts))
    stale = None if plan.run_dir is None else say_stale(RunFolder(plan.run_dir).recommended, space.environment)
    return CheckResult(environment=space.environment, facts=space.facts, space=space, stale=stale)


def environment(device: str = "auto") -> Environment:
    """This machine as trials see it."""
    plan = Plan(name="env", workload=Workload(model=None, dataset=None), device=device)
    with temporary_folder() as folder, opened_launcher(None, folder, plan) as starts:
        report = runner_for(plan, folder, starts).describe(deadline_s=BASELINE_DEADLINE_S)
    if report.environment is None:
        raise ConfigError(report.result.reason)
    return report.environment


def read_run(run_dir: Path) -> RunSummary:
    """Everything that reports are made from, read from a run folder alone."""
    return read_summary(run_dir)
