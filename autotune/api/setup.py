"""Set up a public function: protect the caller's process, open folder and launcher, make a runner."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer, current_thread, main_thread
from typing import Any

from autotune.config.plan import Plan
from autotune.errors import ConfigError
from autotune.files.run_folder import RunFolder, open_run_folder
from autotune.launch.launcher import Launcher
from autotune.launch.local import LocalLauncher
from autotune.launch.machine import kept_initialised
from autotune.launch.runner import TrialRunner
from autotune.note import Note

# The caller's process. Even an import may draw from the random generators. A KeyboardInterrupt
# raised in a weakref's callback or a `__del__` is printed and ignored; a study's database layer
# runs such callbacks all the time. Source: Python's documentation of sys.unraisablehook.


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """Send interrupts again that Python drops meanwhile; handle other ignored exceptions as before."""
    before = sys.unraisablehook

    def send_again(unraisable: Any) -> None:
        if unraisable.exc_type is None or not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        timer = Timer(
            0.05, os.kill, (os.getpid(), signal.SIGINT)
        )  # by then the callback that dropped it has returned
        timer.daemon = True
        timer.start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the global generators of Python and NumPy, and torch's for the CPU if torch is loaded."""
    numpy = sys.modules.get("numpy")
    torch = sys.modules.get("torch")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch_state = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP meanwhile, so that results are saved completely."""
    if current_thread() is not main_thread():  # no other thread gets or handles signals
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: not set from Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


# Folder, launcher and runner


def runner_for(plan: Plan, folder: RunFolder, launcher: Launcher) -> TrialRunner:
    """Return a runner of the plan's trials in a run folder, without limits yet."""
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
    """Return the probe's notes that the user must read before a search starts."""
    return tuple(
        known for known in notes if known.code in {"default_optimizer", "placeholders_by_default"}
    )


@contextmanager
def temporary_folder() -> Iterator[RunFolder]:
    """Yield a run folder that is removed afterwards."""
    with (
        TemporaryDirectory(prefix="autotune-") as path,
        open_run_folder(Path(path), fresh=False) as folder,
    ):
        yield folder


@contextmanager
def opened_launcher(given: Launcher | None, folder: RunFolder, plan: Plan) -> Iterator[Launcher]:
    """Yield the given launcher, which stays open, or that of the plan's executor.

    NVIDIA's driver is kept initialised between trials.

    Raises:
        ConfigError: The executor's package is not installed.
    """
    with ExitStack() as held:
        if plan.executor.kind != "ray":
            held.enter_context(kept_initialised(plan.device))
        yield (
            given if given is not None else held.enter_context(closing(_launcher_of(plan, folder)))
        )


def _launcher_of(plan: Plan, folder: RunFolder) -> Launcher:
    if plan.executor.kind == "local":
        server_log = folder.logs / "server.log" if sys.platform == "linux" else None
        is_script = plan.workload.command is not None
        shared_from_s = inf if is_script else plan.policy.time.shared_from_s
        return LocalLauncher(server_log, device=plan.device, shared_from_s=shared_from_s)
    try:
        from autotune.launch.ray_launcher import RayLauncher

        return RayLauncher.connect(plan.executor, device=plan.device)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError(
            "executor ray needs the package ray; pip install 'autotune-torch[ray]'"
        ) from error
