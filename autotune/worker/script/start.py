"""Start the command of a job in a trial's process, and attach to it."""

from __future__ import annotations

import builtins
import gc
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from autotune.apply.cores import compile_cache_variables
from autotune.config.command import PythonStart, python_start
from autotune.protocol import messages
from autotune.protocol.attach import (
    attached_environment,
    framework_environment,
    is_own_python,
    quiet_environment,
    words_to_start,
)
from autotune.protocol.messages import RankReport
from autotune.worker.build import WorkloadFault
from autotune.worker.failures import HangDump
from autotune.worker.place import Place
from autotune.worker.script.bootstrap import open_session, overrides_of
from autotune.worker.script.files.protection import protect_files
from autotune.worker.script.overrides import follow_variables
from autotune.worker.script.session import Session

# Run the command of a job in a trial's process: in this very process if it is Python on a script,
# else below it.
#
# In: a job with a command. Out: nothing if the script was measured, since that ends the process;
# else the reason why it could not be. A rank that was forked becomes the script: no interpreter is
# started and torch is imported already. Launchers and shells (torchrun, accelerate, bash) are
# started as they are; the Python processes below them attach by `site/sitecustomize.py`, which
# stands first on their PYTHONPATH.


_DEADLY = frozenset(
    {signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
)
"""Signals that end a process at its own fault, or by the kernel's choice."""

_POLL_S = 0.1  # our convention: what follows a measured script hardly begins meanwhile


def run_command(
    job: messages.WorkloadJob, place: Place, dump: HangDump, started: float
) -> RankReport:
    """Run a job's command; do not return if it was measured.

    Raises:
        WorkloadFault: It has ended, and nothing of it was measured.
        BaseException: It raised this itself.
    """
    config = overrides_of(job).config
    words = words_to_start(job.command or (), config)
    overlay = place.folder.overlay
    overlay.mkdir(mode=0o700, exist_ok=True)
    compile_cache = compile_cache_variables()
    own_folders = [place.folder.path, *map(Path, compile_cache.values())]
    is_watched = isinstance(job, messages.ProbeJob) and job.watch_s > 0
    attached = {
        "folder": str(place.folder.path),
        "started": started,
        "own_folders": [*map(str, own_folders)],
        "is_watched": is_watched,
    }
    os.environ.update(
        quiet_environment(overlay, is_timed=is_watched)
        | attached_environment(attached)
        | compile_cache
        | framework_environment(config, job.script)
    )
    start = python_start(words) if is_own_python(words[0]) else None
    is_well = True
    if start is None:
        is_well = _run_below(words, place)
    else:
        protect_files(overlay, own=own_folders)
        session = open_session(job, place, dump, started)
        if not session.overrides.sets_threads:
            follow_variables()
        if is_watched:
            # A fork's objects, torch's above all, are left out of garbage collection. In a training
            # that is started by itself each full collection visits them.
            gc.unfreeze()
        _run_here(start, place, session)
    if place.report.exists():
        os._exit(0 if is_well else 1)
    raise WorkloadFault(
        "a command must start a training that autotune can see, but it ended before an optimizer "
        "had stepped; start Python on the script itself if a launcher hides its environment from it"
    )


def _run_below(words: Sequence[str], place: Place) -> bool:
    """Run the command in processes of its own until it ends or was measured; return whether it ended well."""
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise WorkloadFault(
            f"a command must name a program that can be started, but {words[0]!r} can't be "
            f"({error.strerror}); check "
            "its path"
        ) from error
    code = None
    while code is None:  # once it was measured, the parent ends all of it, if it can be reached
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=_POLL_S)
        if code is None and place.folder.measured.exists():
            return True  # this process ends, and the parent ends the rest
    number = -code if code < 0 else code - 128
    if number in _DEADLY:
        os.kill(os.getpid(), number)  # as a rank would have died: the parent knows what that means
    if not code or place.report.exists():
        return not code
    raise WorkloadFault(
        f"a command must train until it is measured, but it ended with exit code {code} before that"
    )


def _run_here(start: PythonStart, place: Place, session: Session) -> None:
    error: BaseException | None = None
    try:
        _become(start)
        for thread in threading.enumerate():  # as Python does at its end
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except BaseException as raised:  # noqa: BLE001 - the script's own, SystemExit among it
        error = raised
    session.script_ended(error)
    if error is not None and not place.report.exists() and not isinstance(error, SystemExit):
        raise error


def _become(start: PythonStart) -> None:
    """Make this process's `__main__` the script, and run it as `python` would."""
    searched = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [entry for entry in searched if entry not in sys.path]
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __spec__=None, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv = [start.target, *start.arguments]
    if start.kind == "module":
        sys.path[:1] = [str(Path.cwd())]
        runpy._run_module_as_main(start.target)  # type: ignore[attr-defined] # noqa: SLF001 - what python -m does
        return
    path = Path(start.target).absolute()
    if path.is_dir() or path.suffix in {".zip", ".pyz"}:
        sys.path[:1] = [str(path)]
        runpy.run_path(str(path), run_name="__main__")
        return
    sys.path[:1] = [str(path.resolve().parent)]
    main.__file__ = str(path)
    try:
        with io.open_code(str(path)) as file:
            source = file.read()
    except OSError as error:
        raise WorkloadFault(
            f"a command must name a script that can be read, but {start.target!r} can't be "
            f"({error.strerror}); check "
            "its path"
        ) from error
    exec(compile(source, str(path), "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - the user's script is what is run
