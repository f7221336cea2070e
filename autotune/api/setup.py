"""What every public function needs before it can start: its arguments checked, a folder, a launcher, a runner.

Comes in: arguments of a Python call, a Plan. Goes out: the parts of a Plan, and open resources that close themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune.errors import ConfigError
from autotune.files.run_folder import RunFolder, open_run_folder
from autotune.files.validation import parse_model
from autotune.launch.launcher import Launcher
from autotune.launch.local.driver import kept_initialised
from autotune.launch.local.fork_server import ForkServerLauncher
from autotune.launch.local.fresh_interpreter import FreshInterpreterLauncher
from autotune.launch.runner import TrialRunner
from autotune.records.study_identity import identify
from autotune.settings.budget import Budget
from autotune.settings.executor import Executor, device_obstacle
from autotune.settings.objective import Objective
from autotune.settings.plan import Plan
from autotune.settings.search_options import SearchOptions
from autotune.settings.search_space import SearchSpace
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload
from autotune.space.domains import whole_numbers
from autotune.space.resolved_space import ResolvedSpace

__all__ = ["identity_of", "opened_launcher", "plan_of", "runner_for", "temporary_folder"]


def plan_of(  # noqa: PLR0913 - what the public functions take in common, each by its name
    model: Any,
    dataset: Any,
    *,
    parts: Mapping[str, Any],
    loader: Mapping[str, Any] | None,
    baseline: TrainingConfig | Mapping[str, Any] | None,
    objective: Objective | Mapping[str, Any] | None,
    memory_limit: float | str | None,
    device: str,
    seed: int,
    executor: Executor | Mapping[str, Any] | str,
    space: SearchSpace | Mapping[str, Any] | None = None,
    budget: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
) -> Plan:
    """The Plan of a Python call: `parts` are the workload's functions by name, the rest as `search` takes it.

    Raises:
        ConfigError: an argument breaks a rule.
    """
    runs_by = parse_model(Executor, executor, "executor")
    return Plan(
        name=getattr(model, "__name__", type(model).__name__),
        workload=_workload_of(model, dataset, parts, loader),
        baseline=parse_model(TrainingConfig, {} if baseline is None else baseline, "baseline"),
        space=parse_model(SearchSpace, {} if space is None else space, "space"),
        objective=_objective_of(objective, memory_limit),
        budget=parse_model(Budget, {} if budget is None else budget, "budget"),
        search=parse_model(SearchOptions, {} if search is None else search, "search"),
        device=_checked_device(str(device), runs_by),
        executor=runs_by,
        run_dir=None if run_dir is None else Path(run_dir),
        seed=_checked_seed(seed),
    )


def _workload_of(model: Any, dataset: Any, parts: Mapping[str, Any], loader: Mapping[str, Any] | None) -> Workload:
    allowed = {"shuffle", "drop_last", "sampler", "batch_sampler", "worker_init_fn", "multiprocessing_context"}
    unknown = sorted(set(loader or {}) - allowed)
    if unknown:
        raise ConfigError(f"loader takes {', '.join(sorted(allowed))}, but got {', '.join(unknown)}")
    return Workload(model=model, dataset=dataset, **parts, **dict(loader or {}))


def _objective_of(objective: Objective | Mapping[str, Any] | None, memory_limit: float | str | None) -> Objective:
    """The objective, with a memory limit that was given apart from it."""
    goal = parse_model(Objective, {} if objective is None else objective, "objective")
    if memory_limit is None:
        return goal
    return parse_model(Objective, {**goal.model_dump(), "memory_limit": memory_limit}, "objective")


def _checked_device(device: str, executor: Executor) -> str:
    """A device's name that the executor can give to ranks."""
    reason = device_obstacle(device, executor)
    if reason is not None:
        raise ConfigError(f"device: {reason}")
    return device


def _checked_seed(seed: int) -> int:
    """A seed that torch and numpy take."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be a whole number from 0 to 2**32 - 1, but got {seed!r}")
    return seed


def runner_for(plan: Plan, folder: RunFolder, launcher: Launcher) -> TrialRunner:
    """A runner of the plan's trials in a run folder, which knows no limits yet."""
    return TrialRunner(
        launcher=launcher,
        payload=folder.payload,
        scratch=folder.scratch,
        logs=folder.logs,
        device=plan.device,
        seed=plan.seed,
    )


def identity_of(plan: Plan, space: ResolvedSpace) -> dict[str, str]:
    """What must be equal for a plan's study to go on, by name.

    Where groups may span hosts, that is more: which numbers of ranks are tried by default follows from the hosts that
    there are, and what a group reaches from how it is spread over them.
    """
    environment, sizes = space.environment, whole_numbers(space.domains["world_size"])
    own = identify(plan, environment)
    is_default = "world_size" not in plan.space.given()
    has_groups = max(*sizes, plan.baseline.process_count) > 1
    if environment.hosts == 1 or not has_groups or not (is_default or environment.is_spread):
        return own
    how = "spread over" if environment.is_spread else "packed on"
    return {**own, "ranks": f"{', '.join(map(str, sizes))} {how} {environment.hosts} hosts"}


@contextmanager
def temporary_folder() -> Iterator[RunFolder]:
    """A run folder that is gone afterwards."""
    with TemporaryDirectory(prefix="autotune-") as path, open_run_folder(Path(path), fresh=False) as folder:
        yield folder


@contextmanager
def opened_launcher(given: Launcher | None, folder: RunFolder, plan: Plan) -> Iterator[Launcher]:
    """The launcher that was given, which stays open, else that of the plan's executor.

    NVIDIA's driver is kept from letting go of this machine's devices between trials.

    Raises:
        ConfigError: the executor's package is not installed.
    """
    with ExitStack() as held:
        if plan.executor.kind != "ray":
            held.enter_context(kept_initialised(plan.device))
        if given is not None:
            yield given
            return
        own: Launcher
        if plan.executor.kind == "ray":
            own = _connected(plan)
        elif sys.platform == "linux":
            own = ForkServerLauncher(folder.logs / "server.log", device=plan.device)
        else:
            own = FreshInterpreterLauncher()
        held.callback(own.close)
        yield own


def _connected(plan: Plan) -> Launcher:
    """A launcher on a Ray cluster."""
    try:
        from autotune.ray.launcher import RayLauncher

        return RayLauncher.connect(plan.executor, device=plan.device)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError("executor ray needs the package ray; pip install 'autotune-torch[ray]'") from error
