"""The report that is kept while a rank still measures: it counts, whatever becomes of the process afterwards.

Owns the writing of such reports, and the end of a process in which what follows the window hangs.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from time import perf_counter

from autotune.errors import RunFolderError
from autotune.protocol.disk import read_model, write_model
from autotune.protocol.reports import RankReport
from autotune.records.measurement import Measurement
from autotune.records.trial import TrialResult
from autotune.settings.training_config import TrainingConfig

__all__ = ["ended_when_stuck", "keep", "longest_after_s", "success"]

_LONGEST_AFTER_S = 60.0  # our convention: apart from its steps, what follows the window takes a few seconds
_STEPS_AFTER = 40  # the most optimizer steps that follow the window (extra_steps.py); the profiled ones are slower


def success(measurement: Measurement) -> RankReport:
    """The report of a measurement."""
    return RankReport(result=TrialResult(outcome="ok", measurement=measurement))


def keep(path: Path, rank: int, report: RankReport) -> None:
    """Write what is known so far."""
    with suppress(RunFolderError):  # a full disk: there may be room for the last report
        write_model(path, report.model_copy(update={"rank": rank}))


def longest_after_s(measurement: Measurement, config: TrainingConfig) -> float:
    """Seconds after which what follows a window is taken to hang; more where steps are long."""
    blocks = measurement.blocks
    batch_s = sum(block.seconds for block in blocks) / sum(block.batches for block in blocks)
    return _LONGEST_AFTER_S + _STEPS_AFTER * config.grad_accum_steps * batch_s


@contextmanager
def ended_when_stuck(longest_s: float, report: Path) -> Iterator[None]:
    """End the process, with the report that was kept, where what follows a window hangs: the deadline may be late."""
    begun = perf_counter()

    def end() -> None:
        try:
            with suppress(OSError, ValueError):  # the user's code may have closed it
                faulthandler.dump_traceback()
            _keep_after_s(report, perf_counter() - begun)
        finally:
            os._exit(0)

    timer = Timer(longest_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _keep_after_s(report: Path, after_s: float) -> None:
    """Write the time since the window into the kept report: time in which the process hung is not the trial's own."""
    with suppress(OSError, ValueError, RunFolderError):  # the user's code may have written over it
        kept = read_model(report, RankReport)
        if kept.result.measurement is not None:
            measurement = kept.result.measurement.model_copy(update={"after_s": after_s})
            write_model(report, kept.model_copy(update={"result": success(measurement).result}))
