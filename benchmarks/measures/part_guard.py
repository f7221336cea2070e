"""Runs a function in a forked process under a time limit, so that no crash, hang or kill of it ends the caller.

In comes a function that hands on figures, and may hand on some before its end; out go the figures, with "error" beside
what there was where it did not come to its end. Whatever the function has started is ended with it. The caller must
have run no tensor operation and made no CUDA context: neither outlives a fork.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import psutil

__all__ = ["MARK", "Figures", "Keep", "run_guarded"]

Figures = dict[str, Any]
"""What JSON can hold."""
Keep = Callable[[Figures], None]
"""Takes what is known so far."""

MARK = "AUTOTUNE_BENCHMARK_PART"
"""Environment variable of whatever a part starts; its value is the part's own."""
_ENDS_WITHIN_S = 5.0  # after an interrupt, before it is killed
_GONE_WITHIN_S = 5.0
_STACK_BYTES = 4000


def run_guarded(
    work: Callable[[Keep], Mapping[str, Any]], *, limit_s: float, kept: Path | None = None
) -> Figures:
    """Run `work` in a process of its own for at most `limit_s` seconds; its figures, and "error" where it failed.

    `kept`: a file that holds the figures so far, also where the caller itself is ended; the caller removes it.
    """
    token = uuid.uuid4().hex
    faulthandler.cancel_dump_traceback_later()  # of a guard around this one: a fork waits for its thread for ever
    with TemporaryDirectory(prefix="autotune-benchmark-") as path:
        folder = Path(path)
        known = folder / "figures" if kept is None else kept
        known.parent.mkdir(parents=True, exist_ok=True)
        known.unlink(missing_ok=True)  # an earlier call's
        process = get_context("fork").Process(
            target=_work, args=(work, folder, known, limit_s, token)
        )
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # threads that numpy has started survive a fork well
            process.start()
        try:
            process.join(limit_s)
            is_late = process.is_alive()
        finally:
            _end(process, token)
        figures = _read(known)
        if is_late:
            stack = _stack(folder / "stack")
            return {
                **figures,
                "error": f"{stack}\nTimeoutError: the part took more than {limit_s:.0f} s",
            }
        if process.exitcode:
            return {
                "error": f"{_stack(folder / 'stack')}\nthe part's process ended with {process.exitcode}"
            } | figures
        return figures


def _work(
    work: Callable[[Keep], Mapping[str, Any]], folder: Path, kept: Path, limit_s: float, token: str
) -> None:
    """The forked process: figures go to a file, whole each time; where it stands shortly before its end to another."""
    os.environ[MARK] = token  # of whatever it starts
    stack = (folder / "stack").open("w")
    faulthandler.disable()  # `enable` alone leaves a handler that a library has put over an earlier one's, as Ray does
    faulthandler.enable(stack)
    faulthandler.dump_traceback_later(0.98 * limit_s, file=stack)
    known: Figures = {}

    def keep(figures: Figures) -> None:
        _write(kept, known | figures)
        known.update(figures)

    try:
        keep(dict(work(keep)))
    except BaseException as error:  # noqa: BLE001 - written down as the part's end
        print(
            f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            file=sys.stderr,
        )
        keep({"error": traceback.format_exc()})


def _end(process: Any, token: str) -> None:
    """End the process by an interrupt, else by a kill; then all that bears its mark."""
    if process.is_alive():
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
        process.join(_ENDS_WITHIN_S)
    process.kill()
    process.join()
    ends_at = monotonic() + _GONE_WITHIN_S
    while (
        left := [one for one in psutil.process_iter() if _bears(one, token)]
    ) and monotonic() < ends_at:
        for one in left:
            with suppress(psutil.Error):
                one.kill()
        sleep(0.01)


def _bears(process: psutil.Process, token: str) -> bool:
    with suppress(psutil.Error, OSError):
        return process.environ().get(MARK) == token and process.status() != psutil.STATUS_ZOMBIE
    return False


def _write(path: Path, figures: Figures) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(figures))
    beside.replace(path)


def _read(path: Path) -> Figures:
    with suppress(FileNotFoundError):
        figures: Figures = json.loads(path.read_text())
        return figures
    return {}


def _stack(path: Path) -> str:
    """Where the process stood: faulthandler writes the innermost call first."""
    return path.read_text()[:_STACK_BYTES] if path.exists() else ""
