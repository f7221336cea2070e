"""A rank's whole life: read the job, do it, answer. Whatever happens becomes one RankReport.

A forked rank can't open a device that its parent had opened before. torch calls the children of a process that has used
a device, if only by `torch.cuda.is_available()`, bad forks (torch/csrc/cuda/Module.cpp, poison_fork): it raises in
them, or finds no device. A package that torch loads by itself, by an entry point of the group torch.backends, may do so
before it can be prevented.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing import current_process
from time import perf_counter
from typing import assert_never

import scipy.special  # noqa: F401 - a window ends by Student's t; 0.1 to 0.16 s of CPU time, which no window may lose
import torch

from autotune.protocol import jobs
from autotune.protocol.disk import TrialFolder
from autotune.protocol.payload import read_payload
from autotune.protocol.reports import REPORT_UNWRITTEN, RankReport
from autotune.records.diagnosis import Curves
from autotune.records.trial import TrialResult
from autotune.settings.applied.compile_cache import compile_cache_variables
from autotune.settings.applied.cores.numa import CoresError, addresses_of_ranks, bind_rank, can_bind
from autotune.settings.applied.process import set_threads
from autotune.settings.workload import Workload
from autotune.worker.answering import is_written
from autotune.worker.attach.start import run_command
from autotune.worker.failure.hang_dump import HangDump
from autotune.worker.failure.kernel_failures import block_launches
from autotune.worker.failure.outcome import outcome_of
from autotune.worker.jobs.bench import WorkloadBench
from autotune.worker.jobs.curves import trace_curves
from autotune.worker.jobs.precision import compare_to_float32
from autotune.worker.jobs.probe import probe
from autotune.worker.jobs.series import run_series
from autotune.worker.jobs.stress import train_on_largest
from autotune.worker.measure.conditions import BEFORE_S, Others, conditions_before, others_before
from autotune.worker.place import DEADLINE_SHARE, Place, Start
from autotune.worker.setup.build import resolved, seed_all
from autotune.worker.setup.device import Device, DeviceError, open_device
from autotune.worker.setup.environment import describe
from autotune.worker.setup.process_group import open_group
from autotune.worker.trial import gpus_used, run_trial

__all__ = ["bad_fork_devices_of_children", "refuse_bad_fork", "run_rank"]

_TRIAL_VARIABLE = "AUTOTUNE_TRIAL"  # set to "1" in a trial's environment, for the user's code to read
_DEVICES = ("cuda", "xpu", "mtia", "mps")
_done = partial(RankReport, result=TrialResult(outcome="ok"))


def run_rank(folder: TrialFolder, started: float, local_rank: int = 0) -> int:
    """Do the job in a trial's folder and write the report; the exit code: 0, or REPORT_UNWRITTEN.

    Args:
        folder: The trial's.
        started: When the process began, by perf_counter: a fresh interpreter spends seconds of its deadline on imports.
        local_rank: This rank's number among those on this host, which are all of them unless the job names a part.
    """
    job = jobs.read_job(folder.job)
    if isinstance(job, jobs.SeriesJob):
        with suppress(OSError):  # a full disk: the deadline counts a little later
            folder.begun.touch(mode=0o600)  # from now on the first job's deadline counts
    _enter_callers_world(job.process)
    _share_sockets(folder)
    faulthandler.enable()
    part = job.part if isinstance(job, jobs.TrialJob) else None
    first, host = (0, 0) if part is None else (part.first_rank, part.host)
    place = Place(folder, first + local_rank, local_rank, host)
    stack = folder.stack_of(place.rank).open("w") if _ranks_of(job) > 1 else sys.stderr
    dump = HangDump(file=stack, ends_at=started + job.process.deadline_s)
    dump.before_deadline()
    spare = os.open(os.devnull, os.O_RDONLY)
    report = outcome_of(lambda: _do(job, place, dump, started))
    if not is_written(place, report, spare):
        return REPORT_UNWRITTEN
    if report.result.outcome == "ok":
        with suppress(RuntimeError):  # another rank has failed meanwhile, and reports it itself
            place.group.wait()  # a rank that ends first would end its group
    return 0


def _do(job: jobs.Job, place: Place, dump: HangDump, started: float) -> RankReport:
    process = job.process
    if not isinstance(job, jobs.DescribeJob | jobs.SeriesJob) and job.command is not None:
        return run_command(job, place, dump, started)
    refuse_bad_fork(process.device)
    nearest = place.local_rank if _ranks_of(job) > 1 else 0
    count = job.config.world_size if isinstance(job, jobs.TrialJob) and job.config.strategy == "dp" else 1
    before = _others_before(job, nearest, count, started)
    device = open_device(process.device, nearest, count=count, limit_bytes=process.limit_bytes)
    if isinstance(job, jobs.DescribeJob):
        return _done(environment=describe(device, job_blocks=process.blocks_launches))
    if not isinstance(job, jobs.SeriesJob):
        _set_threads(job, place.local_rank, device)
    if isinstance(job, jobs.TrialJob):
        place.group = open_group(job, place.rank, device)
    device.cap_memory()  # after the group has met: NCCL's buffers lie outside torch
    seed_all(process.seed)
    ends_at = started + DEADLINE_SHARE * process.deadline_s
    start = Start(started=started, built_from=perf_counter(), ends_at=ends_at, before=before)
    if isinstance(job, jobs.SeriesJob):
        return run_series(job, device, place.folder, before, _do_with_workload)
    return _do_with_workload(job, resolved(read_payload(job.payload)), device, place, dump, start)


def _do_with_workload(
    job: jobs.WorkloadJob, workload: Workload, device: Device, place: Place, dump: HangDump, start: Start
) -> RankReport:
    scratch = place.folder.path
    if job.config.compile:
        os.environ.update(compile_cache_variables())
    match job:
        case jobs.TrialJob():
            return run_trial(job, workload, device, place, dump, start)
        case jobs.ProbeJob():
            return _done(
                facts=probe(workload, job.config, device, scratch),
                environment=describe(device, job_blocks=job.process.blocks_launches),
                conditions=conditions_before(gpus_used(device), start.before),
            )
        case jobs.PrecisionJob():
            return _done(guard=compare_to_float32(workload, job, device, scratch, start.ends_at, place.references))
        case jobs.CurvesJob():
            bench = WorkloadBench(workload, job, device, scratch)
            keep = partial(_keep_curves, place)
            return _done(curves=trace_curves(bench, job, device, start.ends_at, keep=keep))
        case jobs.StressJob():
            return _done(stress=train_on_largest(workload, job, device, scratch, start.ends_at))
        case _:
            assert_never(job)


def _keep_curves(place: Place, known: Curves) -> None:
    place.keep(_done(curves=known))


def _ranks_of(job: jobs.Job) -> int:
    """Processes that do the job together."""
    return job.config.process_count if isinstance(job, jobs.TrialJob) else 1


def _set_threads(job: jobs.WorkloadJob, local_rank: int, device: Device) -> None:
    """Cores and threads as configured; without a setting, ranks share the cores of their host, or their own.

    A probe describes the machine as it is: it stays unbound. So does a rank where a binding has no effect, as is noted.

    Raises:
        DeviceError: the rank can't be bound, and must not be measured as if it were.
    """
    ranks, part = _ranks_of(job), job.part if isinstance(job, jobs.TrialJob) else None
    here = 1 if ranks == 1 else ranks if part is None else part.ranks
    config = job.config
    if config.numa_binding is None or isinstance(job, jobs.ProbeJob) or not can_bind(device.torch_device):
        set_threads(config.intra_op_threads, here if ranks > 1 else None)
        return
    try:
        places = addresses_of_ranks(device.torch_device, local_rank, here, len(device.devices))
        threads = bind_rank(config.numa_binding, local_rank, places, is_alone=ranks == 1)
    except CoresError as error:
        raise DeviceError(str(error)) from error
    set_threads(config.intra_op_threads or threads, None)


def _others_before(job: jobs.Job, first: int, count: int, started: float) -> Mapping[str, Others]:
    """Other processes' use of this rank's `count` devices from `first` on, before it opens them.

    A probe is the first of a search to open a device; a trial comes right after another, whose kernels do not count.
    """
    if not isinstance(job, jobs.ProbeJob | jobs.TrialJob | jobs.SeriesJob):
        return {}
    is_first = isinstance(job, jobs.ProbeJob) or (isinstance(job, jobs.SeriesJob) and job.is_first)
    quiet_s = BEFORE_S if is_first else perf_counter() - started
    return others_before(job.process.device, first, count, quiet_s)


def _enter_callers_world(process: jobs.ProcessSetup) -> None:
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

    Source: multiprocessing/util.py (get_temp_dir); each process hands its configuration on to those that it starts.
    """
    with suppress(OSError):  # there is none: each process makes one of its own
        current_process()._config["tempdir"] = str(folder.sockets.readlink())  # type: ignore[attr-defined] # noqa: SLF001


def _bad_fork_devices() -> tuple[str, ...]:
    """Kinds of devices that this process can't open for having been forked."""
    found, registered = [], torch._C._get_privateuse1_backend_name()  # noqa: SLF001 - no public name
    for name in (*_DEVICES, registered):
        is_bad = getattr(getattr(torch, name, None), "_is_in_bad_fork", None)
        if is_bad is not None and is_bad():
            found.append(name)
    return tuple(found)


def bad_fork_devices_of_children() -> tuple[str, ...]:
    """Kinds of devices that a process forked from this one could not open. Forks one to find out."""
    reading, writing = os.pipe()
    pid = os.fork()  # by hand: a multiprocessing.Process would count, and so renumber those of the user's code
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
            f"a trial must be the first to open its device, but {', '.join(devices)} had been opened before its "
            "process was forked, most likely by a package that torch loads by itself; set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
