"""A rank's whole life: read the job, do it, answer; in a shared process one job after another."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from multiprocessing import current_process
from pathlib import Path
from time import perf_counter
from typing import Any, assert_never

# A window ends by Student's t, and must not lose the 0.1 to 0.16 s of CPU time of this import.
import scipy.special  # noqa: F401
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data._utils import signal_handling

from autotune.apply.cores import (
    CoresError,
    addresses_of_ranks,
    bind_rank,
    can_bind,
    compile_cache_variables,
    set_threads,
)
from autotune.apply.precision import tf32_products
from autotune.config.plan import Workload
from autotune.protocol import messages
from autotune.protocol.disk import TrialFolder
from autotune.protocol.messages import REPORT_UNWRITTEN, RankReport
from autotune.protocol.payload import read_payload
from autotune.records.measurement import MemorySample
from autotune.records.result import Curves
from autotune.records.trial import TrialResult
from autotune.worker.build import (
    kept_weights,
    made_dataset,
    made_model,
    put_back,
    put_random_state,
    random_state,
    resolved,
    seed_all,
)
from autotune.worker.conditions import BEFORE_S, Others, conditions_before, others_before
from autotune.worker.device import Device, DeviceError, open_device
from autotune.worker.environment import describe
from autotune.worker.failures import HangDump, block_launches
from autotune.worker.group import open_group
from autotune.worker.jobs.curves import WorkloadBench, trace_curves
from autotune.worker.jobs.precision import References, compare_to_float32
from autotune.worker.jobs.probe import probe
from autotune.worker.jobs.stress import train_on_largest
from autotune.worker.place import DEADLINE_SHARE, Place, Start, failure_report, is_written
from autotune.worker.script.start import run_command
from autotune.worker.step import torch_threads
from autotune.worker.trial import EndedEarly, gpus_used, run_trial

# A rank's whole life: read the job, do it, answer; whatever happens becomes one RankReport. A process
# that is shared does one job of a workload after another, and builds its model and its dataset once.
#
# What changed a shared process for a configuration (precision of products, threads, the model's
# layout) is set back, and each job begins with the model's first weights, and with the random
# numbers that a new process goes on with once it has built both: else it would draw other batches.
#
# A job that fails is the last one, since nobody knows what it has left behind: the process ends,
# and another one goes on. A device that had no room for a batch is the exception: what the batch
# took is given back.


_TRIAL_VARIABLE = (
    "AUTOTUNE_TRIAL"  # set to "1" in a trial's environment, for the user's code to read
)
_done = partial(RankReport, result=TrialResult(outcome="ok"))


def run_rank(
    folder: TrialFolder, started: float, local_rank: int = 0, shared_from_s: float = inf
) -> int:
    """Do the job in a trial's folder and write the report, then those that follow in a shared process.

    Args:
        folder: The trial's.
        started: When the process began, by perf_counter: a fresh interpreter spends seconds of its
            deadline on imports.
        local_rank: This rank's number among those on this host, which are all of them unless the
            job names a part.
        shared_from_s: The process is shared if its workload takes as many seconds to build.

    Returns:
        The exit code: 0, or REPORT_UNWRITTEN.
    """
    job = messages.read_job(folder.job)
    _enter_callers_world(job.process)
    _share_sockets(folder)
    faulthandler.enable()
    part = job.part if isinstance(job, messages.TrialJob) else None
    first, host = (0, 0) if part is None else (part.first_rank, part.host)
    is_shared = shared_from_s < inf
    place = Place(folder, first + local_rank, local_rank, host, is_shared=is_shared)
    stack = folder.stack_of(place.rank).open("w") if _ranks_of(job) > 1 else sys.stderr
    spare = os.open(os.devnull, os.O_RDONLY)
    worker = _Worker(shared_from_s)
    if is_shared:
        place.connect()
    while True:
        dump = HangDump(file=stack, ends_at=started + job.process.deadline_s)
        dump.before_deadline()
        try:
            report = worker.do(job, place, dump, started)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit among it
            report = failure_report(error)
        if is_shared:
            report = worker.with_costs(report)
        if report.result.outcome != "pruned" and not is_written(place, report, spare):
            return REPORT_UNWRITTEN
        if not is_shared or not worker.is_sound_after(report):
            break

        # Wait for the next job.
        place.send({"done": True})
        following = None
        while following is None and place.channel is not None:  # that enough was seen may come late
            following = place.receive(None).get("folder")
        if following is None:  # the parent is gone
            break
        started = perf_counter()
        place = replace(place, folder=TrialFolder(Path(following)))
        job = messages.read_job(place.folder.job)
    if report.result.outcome == "ok":
        with suppress(RuntimeError):  # another rank has failed meanwhile, and reports it itself
            place.group.wait()  # a rank that ends first would end its group
    return 0


@dataclass(slots=True)
class _Worker:
    """Does the jobs of this process; what stays from one to the next."""

    shared_from_s: float
    device: Device | None = None
    """None until the first job opens it."""
    parts: _Parts | None = None
    before: Mapping[str, Others] = field(default_factory=dict)
    """Others' use of the devices before this process opened them."""
    trials: int = 0
    """That were measured, or ended early."""
    references: References | None = None
    """On an accelerator, whose own memory they take none of; elsewhere there is one precision to
    compare."""
    refusals: int = 0
    """Of the device to give memory, before the job."""
    handlers: Mapping[int, Any] = field(
        default_factory=lambda: {
            number: signal.getsignal(number) for number in (signal.SIGCONT, signal.SIGCHLD)
        }
    )

    def do(self, job: messages.Job, place: Place, dump: HangDump, started: float) -> RankReport:
        """Do a job.

        Raises:
            BaseException: Whatever the user's code raises, and what is wrong with the job.
        """
        if isinstance(job, messages.DescribeJob):
            refuse_bad_fork(job.process.device)
            device = open_device(job.process.device, limit_bytes=job.process.limit_bytes)
            return _done(environment=describe(device, job_blocks=job.process.blocks_launches))
        if job.command is not None:
            return run_command(job, place, dump, started)

        # Begin as a new process does.
        device = self.device = self._opened(job, place, started)
        self.refusals = device.refusals()
        if isinstance(job, messages.TrialJob):
            place.group = open_group(job, place.rank, device)
        device.cap_memory()  # after the group has met: NCCL's buffers lie outside torch
        seed_all(job.process.seed)
        place.earlier_trials = self.trials
        place.references = self.references
        start = Start(
            started=started,
            built_from=perf_counter(),
            ends_at=started + DEADLINE_SHARE * job.process.deadline_s,
            before={} if self.trials else self.before,
        )
        shared = self.parts
        workload = shared.as_workload() if shared else resolved(read_payload(job.payload))
        if job.config.compile:
            os.environ.update(compile_cache_variables())

        # Do the job. What its configuration sets in a shared process is set back.
        with ExitStack() as undo:
            if shared is not None:
                undo.enter_context(torch_threads(job.config.intra_op_threads))
                # jobs of other kinds set TF32 themselves
                sets_tf32 = isinstance(job, messages.TrialJob | messages.StressJob)
                if sets_tf32 and job.config.amp_dtype == "tf32":
                    undo.enter_context(tf32_products())
            try:
                if isinstance(job, messages.TrialJob):
                    report = run_trial(job, workload, device, place, dump, start)
                else:
                    report = _examine(job, workload, device, place, start)
            except EndedEarly:
                report = RankReport(result=TrialResult(outcome="pruned"))
        if shared is None:
            return report

        aside_bytes = 0 if device.has_own_memory else shared.kept_bytes
        report = _without_weights(report, aside_bytes, self.trials)
        self.trials += report.result.measurement is not None or report.result.outcome == "pruned"
        return report

    def _opened(self, job: messages.WorkloadJob, place: Place, started: float) -> Device:
        """Return the device, with this job's limit; the first job opens it."""
        limit_bytes = job.process.limit_bytes
        if self.device is not None:
            return replace(self.device, limit_bytes=limit_bytes)
        refuse_bad_fork(job.process.device)
        nearest = place.local_rank if _ranks_of(job) > 1 else 0
        is_dp = isinstance(job, messages.TrialJob) and job.config.is_dp
        count = job.config.world_size if is_dp else 1
        if place.is_shared or isinstance(job, messages.ProbeJob | messages.TrialJob):
            # A probe is the first of a search to open a device; a trial comes right after another,
            # whose kernels do not count.
            is_first = isinstance(job, messages.ProbeJob)
            quiet_s = BEFORE_S if is_first else perf_counter() - started
            self.before = others_before(job.process.device, nearest, count, quiet_s)
        device = open_device(job.process.device, nearest, count=count, limit_bytes=limit_bytes)
        if place.is_shared:
            self.parts = _Parts(job.payload, device, self.shared_from_s)
            self.references = {} if device.has_own_memory else None
        else:
            _set_threads(job, place.local_rank, device)
        return device

    def with_costs(self, report: RankReport) -> RankReport:
        """Return the report with what building took, and the RAM that is kept for later jobs."""
        if self.parts is None:
            return report
        references = sum(known.nbytes for known in (self.references or {}).values())
        kept_bytes = self.parts.kept_bytes + references
        return report.model_copy(
            update={"workload_build_s": self.parts.build_s, "kept_bytes": kept_bytes}
        )

    def is_sound_after(self, report: RankReport) -> bool:
        """Give back what a job has left; return whether another one may follow."""
        for stream in (
            sys.stdout,
            sys.stderr,
        ):  # this process may be ended at any time after this job
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if self.device is None or (report.curves is not None and report.curves.is_cut):
            return False  # it could not be opened, or is lost
        outcome = report.result.outcome
        was_full = outcome == "oom" and self.device.refusals() > self.refusals
        if outcome not in {"ok", "pruned"} and not was_full:
            return False
        if outcome != "ok":  # what was cut short may have left handlers of its own
            for number, handler in self.handlers.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            signal_handling._SIGCHLD_handler_set = False  # noqa: SLF001 - the next loader sets torch's again
        faulthandler.cancel_dump_traceback_later()
        with suppress(RuntimeError):
            self.device.synchronize()
            if self.parts is not None and self.parts.model is not None:
                self.parts.model.zero_grad(set_to_none=True)
            gc.collect()
            self.device.give_back()
            with suppress(AttributeError, OSError):  # another C library than glibc
                ctypes.CDLL(None).malloc_trim(0)
            return True
        return False


@dataclass(slots=True)
class _Parts:
    """A workload's model and dataset, each built when it is first asked for; the model as it was then."""

    payload: Path
    device: Device
    kept_from_s: float
    """Seconds of building from which weights are kept aside: otherwise no job follows."""
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
    """States of the random generators once the model, or the dataset, was built."""

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of the weights that are kept aside, in RAM."""
        return sum(tensor.nbytes for tensor in self._initial.values())

    def as_workload(self) -> Workload:
        """Return the workload with these parts."""
        if self._workload is None:
            with self._timed():
                self._workload = resolved(read_payload(self.payload))
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
        is_lazy_model = any(map(is_lazy, self.model.parameters()))  # it makes weights later
        if not self._initial and self.build_s >= self.kept_from_s and not is_lazy_model:
            self._initial = kept_weights(self.model)
            self._strides = {name: tensor.stride() for name, tensor in self._initial.items()}
        elif self._initial:
            _lay_out(self.model, self._strides)
            put_back(self.model, self._initial)
        put_random_state(self._random_after["model"])
        return self.model

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
            tensor.data = torch.empty_strided(
                tensor.shape, wanted, dtype=tensor.dtype, device=tensor.device
            )


def _examine(
    job: messages.ProbeJob | messages.PrecisionJob | messages.CurvesJob | messages.StressJob,
    workload: Workload,
    device: Device,
    place: Place,
    start: Start,
) -> RankReport:
    """Do a job that is no trial."""
    scratch = place.folder.path
    match job:
        case messages.ProbeJob():
            return _done(
                facts=probe(workload, job.config, device, scratch),
                environment=describe(device, job_blocks=job.process.blocks_launches),
                conditions=conditions_before(gpus_used(device), start.before),
            )
        case messages.PrecisionJob():
            return _done(
                guard=compare_to_float32(
                    workload, job, device, scratch, start.ends_at, place.references
                )
            )
        case messages.CurvesJob():
            bench = WorkloadBench(workload, job, device, scratch)

            def keep(known: Curves) -> None:
                place.keep(_done(curves=known))

            return _done(curves=trace_curves(bench, job, device, start.ends_at, keep=keep))
        case messages.StressJob():
            return _done(stress=train_on_largest(workload, job, device, scratch, start.ends_at))
        case _:
            assert_never(job)


def _without_weights(report: RankReport, aside_bytes: int, trials: int) -> RankReport:
    """Return a shared process's report without the memory of weights kept aside, and with its earlier trials."""

    def own(memory: MemorySample) -> MemorySample:
        return memory.model_copy(update={"peak_bytes": max(0, memory.peak_bytes - aside_bytes)})

    measurement = report.result.measurement
    stress = report.stress
    curves = report.curves
    if measurement is not None:
        memory = own(measurement.memory)
        changes = {"memory": memory, "peak_memory_bytes": memory.peak_bytes}
        measurement = measurement.model_copy(update={"earlier_trials": trials, **changes})
        report = report.with_result(measurement=measurement)
    if stress is not None:
        stress = stress.model_copy(update={"memory": own(stress.memory)})
    if curves is not None:
        points = []
        for point in curves.device:
            peak_bytes = point.peak_memory_bytes and max(0, point.peak_memory_bytes - aside_bytes)
            points.append(point.model_copy(update={"peak_memory_bytes": peak_bytes}))
        curves = curves.model_copy(update={"device": tuple(points)})
    return report.model_copy(update={"stress": stress, "curves": curves})


def _ranks_of(job: messages.Job) -> int:
    """Return how many processes do the job together."""
    return job.config.process_count if isinstance(job, messages.TrialJob) else 1


def _set_threads(job: messages.WorkloadJob, local_rank: int, device: Device) -> None:
    """Set cores and threads as configured; without a setting, ranks share the cores of their host, or their own.

    A probe describes the machine as it is: it stays unbound. So does a rank where a binding has no
    effect, as is noted.

    Raises:
        DeviceError: the rank can't be bound, and must not be measured as if it were.
    """
    ranks = _ranks_of(job)
    part = job.part if isinstance(job, messages.TrialJob) else None
    here = 1 if ranks == 1 else ranks if part is None else part.ranks
    config = job.config
    if (
        config.numa_binding is None
        or isinstance(job, messages.ProbeJob)
        or not can_bind(device.torch_device)
    ):
        set_threads(config.intra_op_threads, here if ranks > 1 else None)
        return
    try:
        places = addresses_of_ranks(device.torch_device, local_rank, here, len(device.devices))
        threads = bind_rank(config.numa_binding, local_rank, places, is_alone=ranks == 1)
    except CoresError as error:
        raise DeviceError(str(error)) from error
    set_threads(config.intra_op_threads or threads, None)


def _enter_callers_world(process: messages.ProcessSetup) -> None:
    """Take on the caller's folder, search path and environment, before any call to a device."""
    os.environ[_TRIAL_VARIABLE] = "1"
    if process.blocks_launches:
        block_launches()
    os.environ.pop("PYTHONPATH", None)
    if process.python_path is not None:
        os.environ["PYTHONPATH"] = process.python_path
    sys.path[:] = process.sys_path
    os.chdir(process.working_directory)


def _share_sockets(folder: TrialFolder) -> None:
    """Have this process and its loader workers put sockets where they are removed, whatever ends the workers.

    Source: multiprocessing/util.py (get_temp_dir); each process hands its configuration on to those
    that it starts.
    """
    with suppress(OSError):  # there is none: each process makes one of its own
        current_process()._config["tempdir"] = str(folder.sockets.readlink())  # type: ignore[attr-defined] # noqa: SLF001


# A forked rank can't open a device that its parent had opened before. torch calls the children of a
# process that has used a device, if only by `torch.cuda.is_available()`, bad forks
# (torch/csrc/cuda/Module.cpp, poison_fork): it raises in them, or finds no device. A package that
# torch loads by itself, by an entry point of the group torch.backends, may do so before it can be
# prevented.


_DEVICES = ("cuda", "xpu", "mtia", "mps")


def _bad_fork_devices() -> tuple[str, ...]:
    """Return the kinds of devices that this process can't open for having been forked."""
    found = []
    registered = torch._C._get_privateuse1_backend_name()  # noqa: SLF001 - no public name
    for name in (*_DEVICES, registered):
        is_bad = getattr(getattr(torch, name, None), "_is_in_bad_fork", None)
        if is_bad is not None and is_bad():
            found.append(name)
    return tuple(found)


def bad_fork_devices_of_children() -> tuple[str, ...]:
    """Return the kinds of devices that a process forked from this one could not open. Forks one to find out."""
    reading, writing = os.pipe()
    pid = (
        os.fork()
    )  # by hand: a multiprocessing.Process would count, and so renumber those of the user's code
    if pid == 0:
        with suppress(BaseException):  # nothing of this process may run on in its fork
            os.write(writing, " ".join(_bad_fork_devices()).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:  # noqa: PTH123 - a descriptor
        names = answer.read()
    os.waitpid(pid, 0)
    return tuple(names.decode().split())


def refuse_bad_fork(device: str) -> None:
    """Refuse to search for a device where it can't be opened: it might seem not to exist.

    Raises:
        DeviceError: this process was forked from one that had opened a device.
    """
    devices = _bad_fork_devices()
    if devices and device != "cpu":
        raise DeviceError(
            f"a trial must be the first to open its device, but {', '.join(devices)} had been "
            f"opened before its "
            "process was forked, most likely by a package that torch loads by itself; set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
