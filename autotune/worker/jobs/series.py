"""Jobs of one workload, one after another in one process that builds its model and its dataset once.

Comes in: a series' folder, where `next` names the folder of each job as it comes. Goes out: a report in each of those;
then `next` is removed. What changed the process for a configuration (precision of products, threads, the model's
layout) is set back, and each job begins with the model's first weights, and with the random numbers that a new process
goes on with once it has built both: else it would draw other batches.

A job that fails is the last one, since nobody knows what it has left behind: the process ends, and another one goes on.
A device that had no room for a batch is the exception: what the batch took is given back.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data._utils import signal_handling

from autotune.protocol import jobs
from autotune.protocol.disk import TrialFolder
from autotune.protocol.payload import read_payload
from autotune.protocol.reports import REPORT_UNWRITTEN, RankReport
from autotune.records.measurement import MemorySample
from autotune.records.trial import TrialResult
from autotune.settings.applied.float32_precision import tf32_products
from autotune.settings.workload import Workload
from autotune.worker.answering import is_written
from autotune.worker.failure.hang_dump import HangDump
from autotune.worker.failure.outcome import outcome_of
from autotune.worker.jobs.precision import References
from autotune.worker.measure.conditions import Others
from autotune.worker.measure.step import torch_threads
from autotune.worker.place import DEADLINE_SHARE, Place, Start
from autotune.worker.setup.build import (
    kept_weights,
    made_dataset,
    made_model,
    put_back,
    put_random_state,
    random_state,
    resolved,
    seed_all,
)
from autotune.worker.setup.device import Device
from autotune.worker.trial import EndedEarly

__all__ = ["run_series"]


Do = Callable[[jobs.WorkloadJob, Workload, Device, Place, HangDump, Start], RankReport]
"""Does a job with a workload."""


def run_series(
    job: jobs.SeriesJob, device: Device, folder: TrialFolder, before: Mapping[str, Others], do: Do
) -> RankReport:
    """Do jobs until one fails, or the parent ends this process.

    Args:
        job: The series.
        device: What all of them run on.
        folder: The series' own.
        before: Others' use of the devices before this process opened them.
        do: Does a job.
    """
    series, is_sound = _Series(device, before, do, _Parts(job, device)), True
    while is_sound:
        while not folder.next.exists():
            sleep(0.005)
        is_sound = series.do_one(TrialFolder(Path(folder.next.read_text("utf-8")))) and series.is_cleared()
        if is_sound:
            folder.next.unlink()
    return RankReport(result=TrialResult(outcome="ok"))


@dataclass(slots=True)
class _Parts:
    """A workload's model and dataset, each built when it is first asked for; the model as it was then."""

    job: jobs.SeriesJob
    device: Device
    build_s: float = 0.0
    """Seconds of reading the workload and of building both."""
    model: nn.Module | None = None
    _workload: Workload | None = None
    _initial: dict[str, Tensor] = field(default_factory=dict)
    """Weights and buffers, on the CPU."""
    _strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _dataset: list[Any] = field(default_factory=list)
    """It alone, once it is built."""
    _random_after: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Where random generators were once the model, or the dataset, was built."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the weights that are kept aside, in RAM."""
        return sum(tensor.nbytes for tensor in self._initial.values())

    def as_workload(self) -> Workload:
        """The workload with these parts."""
        if self._workload is None:
            with self._timed():
                self._workload = resolved(read_payload(self.job.payload))
        return replace(
            self._workload,
            model=partial(self._model_of, self._workload),
            dataset=partial(self._data_of, self._workload),
        )

    def _model_of(self, workload: Workload) -> nn.Module:
        if self.model is None:
            with self._timed():
                self.model = made_model(workload).to(self.device.torch_device)
            self._random_after["model"] = random_state()
        if not self._initial:
            self._keep_weights(self.model)
        else:
            _lay_out(self.model, self._strides)
            put_back(self.model, self._initial)
        put_random_state(self._random_after["model"])
        return self.model

    def _keep_weights(self, model: nn.Module) -> None:
        """Keep them aside, unless no job follows; those of a lazy module once it has made them."""
        if self.build_s >= self.job.least_build_s and not any(map(is_lazy, model.parameters())):
            self._initial = kept_weights(model)
            self._strides = {name: tensor.stride() for name, tensor in self._initial.items()}

    def _data_of(self, workload: Workload) -> Any:
        if not self._dataset:
            with self._timed():
                self._dataset.append(made_dataset(workload))
            self._random_after["dataset"] = random_state()
        put_random_state(self._random_after["dataset"])
        return self._dataset[0]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = perf_counter()
        yield
        self.build_s += perf_counter() - begun


def _lay_out(model: nn.Module, strides: Mapping[str, tuple[int, ...]]) -> None:
    """Undo the memory format of an earlier configuration."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        wanted = strides.get(name, tensor.stride())
        if tensor.stride() != wanted and len(wanted) == tensor.ndim:
            tensor.data = torch.empty_strided(tensor.shape, wanted, dtype=tensor.dtype, device=tensor.device)


@dataclass(slots=True)
class _Series:
    device: Device
    before: Mapping[str, Others]
    do: Do
    parts: _Parts
    trials: int = 0
    """That were measured, or ended early."""
    references: References | None = field(init=False)
    """On an accelerator, whose own memory they take none of; elsewhere there is one precision to compare."""
    spare: int = field(default_factory=partial(os.open, os.devnull, os.O_RDONLY))

    def __post_init__(self) -> None:
        """Have a place for what precision checks leave."""
        self.references = {} if self.device.has_own_memory else None

    def do_one(self, folder: TrialFolder) -> bool:
        """Do a job and write its report; whether another one may follow."""
        started, refusals = perf_counter(), self.device.refusals()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGCONT, signal.SIGCHLD)}
        place = Place(folder, 0, 0, is_shared=True, earlier_trials=self.trials, references=self.references)
        report = outcome_of(lambda: self._do(place, started))
        if report.result.outcome != "ok":  # what was cut short may have left handlers of its own
            for number, handler in handlers.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            signal_handling._SIGCHLD_handler_set = False  # noqa: SLF001 - the next loader sets torch's again
        for stream in (sys.stdout, sys.stderr):  # this process may be ended at any time after this job
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        kept_bytes = self.parts.kept_bytes + sum(known.nbytes for known in (self.references or {}).values())
        own = {"workload_build_s": self.parts.build_s, "kept_bytes": kept_bytes}
        if not is_written(place, report.model_copy(update=own), self.spare):
            os._exit(REPORT_UNWRITTEN)
        if report.curves is not None and report.curves.is_cut:  # the device is lost
            return False
        was_full = report.result.outcome == "oom" and self.device.refusals() > refusals
        return report.result.outcome in {"ok", "pruned"} or was_full

    def _do(self, place: Place, started: float) -> RankReport:
        job = jobs.read_job(place.folder.job)
        assert not isinstance(job, jobs.DescribeJob | jobs.SeriesJob)  # noqa: S101 - our own bug
        process, config = job.process, job.config
        dump = HangDump(file=sys.stderr, ends_at=started + process.deadline_s)
        dump.before_deadline()
        device = replace(self.device, limit_bytes=process.limit_bytes)
        device.cap_memory()
        seed_all(process.seed)
        ends_at = started + DEADLINE_SHARE * process.deadline_s
        before = {} if self.trials else self.before
        start = Start(started=started, built_from=started, ends_at=ends_at, before=before)
        is_run = isinstance(job, jobs.TrialJob | jobs.StressJob)  # other jobs set TF32 themselves
        tf32 = tf32_products() if is_run and config.amp_dtype == "tf32" else nullcontext()
        with torch_threads(config.intra_op_threads), tf32:
            try:
                report = self.do(job, self.parts.as_workload(), device, place, dump, start)
            except EndedEarly:
                self.trials += 1
                return RankReport(result=TrialResult(outcome="pruned", reason="its parent has seen enough"))
        return self._as_one_of_several(report)

    def _as_one_of_several(self, report: RankReport) -> RankReport:
        """With the number of trials before it, and without the memory of the weights that are kept aside."""
        measurement, curves, stress = report.result.measurement, report.curves, report.stress
        if stress is not None:
            own_stress = stress.model_copy(update={"memory": self._own(stress.memory)})
            report = report.model_copy(update={"stress": own_stress})
        if curves is not None:
            device = tuple(point.model_copy(update=self._peak(point.peak_memory_bytes)) for point in curves.device)
            report = report.model_copy(update={"curves": curves.model_copy(update={"device": device})})
        if measurement is None:
            return report
        memory = self._own(measurement.memory)
        own = {"earlier_trials": self.trials, "memory": memory, **self._peak(measurement.peak_memory_bytes)}
        self.trials += 1
        return report.with_result(measurement=measurement.model_copy(update=own))

    def _peak(self, peak_bytes: int | None) -> dict[str, int | None]:
        return {"peak_memory_bytes": None if peak_bytes is None else self._without_weights(peak_bytes)}

    def _own(self, memory: MemorySample) -> MemorySample:
        return memory.model_copy(update={"peak_bytes": self._without_weights(memory.peak_bytes)})

    def _without_weights(self, peak_bytes: int) -> int:
        return peak_bytes if self.device.has_own_memory else max(0, peak_bytes - self.parts.kept_bytes)

    def is_cleared(self) -> bool:
        """Give back what the job has left; whether the device still works."""
        faulthandler.cancel_dump_traceback_later()
        with suppress(RuntimeError):
            self.device.synchronize()
            self._give_back()
            return True
        return False

    def _give_back(self) -> None:
        if self.parts.model is not None:
            self.parts.model.zero_grad(set_to_none=True)
        gc.collect()
        self.device.give_back()
        with suppress(AttributeError, OSError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
