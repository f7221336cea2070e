"""Threads of one operation in loader workers: what the setting `worker_threads` does in each of them as it starts.

Comes in: the setting, and a worker_init_fn of the user's own. Goes out: a worker_init_fn for torch's DataLoader, which
can be pickled, for workers that are not forked.

torch limits only its own threads in workers, to one (torch/utils/data/_utils/worker.py). BLAS, OpenMP and OpenCV start
one a core in each.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import threadpoolctl
import torch

__all__ = ["VARIABLES", "LimitedThreads", "limit_threads", "limited", "threads_in_workers"]

VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)
"""What libraries that are loaded later take their number of threads from."""


@dataclass(frozen=True, slots=True)
class LimitedThreads:
    """A worker_init_fn that limits the threads of its worker, and then calls another one."""

    threads: int
    then: Callable[[int], None] | None = None
    """The user's own."""

    def __call__(self, worker_id: int) -> None:
        """Called by torch in each worker as it starts; the dataset is there already."""
        limit_threads(self.threads)
        if self.then is not None:
            self.then(worker_id)


def limited(worker_init_fn: Callable[[int], None] | None, threads: int | None) -> Callable[[int], None] | None:
    """A worker_init_fn for this setting, in which the user's own runs too, afterwards; None: that alone.

    One that limits threads already is not limited twice: the new number takes the place of the old one.
    """
    own = worker_init_fn.then if isinstance(worker_init_fn, LimitedThreads) else worker_init_fn
    return own if threads is None else LimitedThreads(threads, own)


def threads_in_workers(worker_init_fn: object) -> int | None:
    """The setting that a worker_init_fn carries; None where it carries none."""
    return worker_init_fn.threads if isinstance(worker_init_fn, LimitedThreads) else None


def limit_threads(count: int) -> None:
    """So many threads for one operation in this process, which is a loader's worker.

    In a forked worker numbers are only lowered, so that torch keeps its one thread. More of them would wait for ever:
    GNU OpenMP holds the threads that its parent has started for its own, and these were not forked. For the same reason
    fewer threads of OpenCV than it has are asked for as none: it computes in the calling thread then, and ends no
    threads. To end forked ones it waits for ever, or crashes.

    Source: gcc.gnu.org, bug 58378 (libgomp after fork); OpenCV, modules/core/src/parallel_impl.cpp,
    ThreadPool::setNumOfThreads.
    """
    os.environ.update(dict.fromkeys(VARIABLES, str(count)))
    is_forked = _is_forked()
    torch.set_num_threads(min(count, torch.get_num_threads()) if is_forked else count)
    for pool in threadpoolctl.ThreadpoolController().lib_controllers:
        pool.set_num_threads(min(count, pool.num_threads or count) if is_forked else count)
    opencv: Any = sys.modules.get("cv2")
    if not hasattr(opencv, "setNumThreads"):  # not there, or being imported
        return
    if count == 1 or (is_forked and count < opencv.getNumThreads()):
        opencv.setNumThreads(0)
    elif not is_forked:
        opencv.setNumThreads(count)


def _is_forked() -> bool:
    """Whether this process was forked from its parent; a process that multiprocessing has not started counts as such.

    One that was started without a context of its own has the start method that is in effect, which it knows too: it
    inherits it, or spawning sets it. Source: CPython, multiprocessing/context.py, Process; spawn.py, prepare.
    """
    started_by = getattr(multiprocessing.current_process(), "_start_method", "fork")
    return (started_by or multiprocessing.get_start_method()) == "fork"
