"""What every public function needs before it can start: a folder, a launcher, a runner.

Comes in: a Plan. Goes out: these values, and open resources as context managers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune.errors import ConfigError
from autotune.files.run_folder import RunFolder, open_run_folder
from autotune.launch.launcher import Launcher
from autotune.launch.local.fork_server import ForkServerLauncher
from autotune.launch.local.fresh_interpreter import FreshInterpreterLauncher
from autotune.launch.local.nvidia_driver import kept_initialised
from autotune.launch.local.warm_worker import WarmWorkerLauncher
from autotune.launch.runner import TrialRunner
from autotune.note import Note
from autotune.settings.plan import Plan

__all__ = ["opened_launcher", "runner_for", "temporary_folder", "warnings_in"]


def runner_for(plan: Plan, folder: RunFolder, launcher: Launcher) -> TrialRunner:
    """A runner of the plan's trials in a run folder, which knows no limits yet."""
    return TrialRunner(
        launcher=launcher,
        payload=folder.payload,
        scratch=folder.scratch,
        logs=folder.logs,
        device=plan.device,
        seed=plan.seed,
        command=plan.workload.command,
        policy=plan.policy,
    )


def warnings_in(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Those of a probe's notes that the user must read before a search begins, not after it."""
    return tuple(known for known in notes if known.code in {"default_optimizer", "placeholders_by_default"})


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
        yield given if given is not None else held.enter_context(closing(_launcher_of(plan, folder)))


def _launcher_of(plan: Plan, folder: RunFolder) -> Launcher:
    if plan.executor.kind == "local":
        is_linux = sys.platform == "linux"
        server_log = folder.logs / "server.log"
        each = ForkServerLauncher(server_log, device=plan.device) if is_linux else FreshInterpreterLauncher()
        if plan.workload.command is not None:
            return each
        return WarmWorkerLauncher(each, folder.scratch, folder.logs, least_build_s=plan.policy.time.shared_from_s)
    try:
        from autotune.ray.launcher import RayLauncher

        return RayLauncher.connect(plan.executor, device=plan.device)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError("executor ray needs the package ray; pip install 'autotune-torch[ray]'") from error
