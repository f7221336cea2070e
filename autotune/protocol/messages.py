"""What the parent and a trial's ranks exchange: file names, versioned JSON, atomic writes, the workload's payload.

The parent writes a Job into a trial's folder; each rank answers with a RankReport beside it. The workload travels
once a search as a payload: a cloudpickle stream, and one file of raw bytes in which every large array and tensor lies,
mapped copy-on-write by each trial, so that a big dataset is neither read nor copied anew. Only payloads that this run's
parent wrote are ever unpickled.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

import cloudpickle
from pydantic import BaseModel, ConfigDict

from autotune.errors import RunFolderError, WorkloadError
from autotune.records.conditions import DeviceConditions
from autotune.records.diagnosis import Curves
from autotune.records.precision_check import GuardFigures
from autotune.records.stress_check import StressFigures
from autotune.records.trial import TrialResult
from autotune.settings.environment import Environment
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import WorkloadFacts

if TYPE_CHECKING:
    from torch import UntypedStorage

__all__ = [
    "NO_EXTRAS",
    "TRIAL_VARIABLE",
    "Extras",
    "GroupPart",
    "Job",
    "RankReport",
    "TrialFolder",
    "WindowRules",
    "free_shared_memory",
    "read_model",
    "read_payload",
    "write_atomic",
    "write_model",
    "write_payload",
]

TRIAL_VARIABLE = "AUTOTUNE_TRIAL"
"""Set to "1" in a trial's environment."""
_VERSION = 1
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})  # of our files, not of user code
_ALIGNMENT = 64
_SMALLEST_MAPPED_BYTES = 16 * 1024
_CULPRIT_DEPTH = 6

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """The files of one trial; this class alone knows their names."""

    path: Path

    @property
    def job(self) -> Path:
        """What the rank is to do."""
        return self.path / "job.json"

    @property
    def report(self) -> Path:
        """What rank 0 answers."""
        return self.path / "report.json"

    @property
    def blocks(self) -> Path:
        """Where rank 0 writes each block of its window as it comes, a line each."""
        return self.path / "blocks.jsonl"

    @property
    def rendezvous(self) -> Path:
        """Where the ranks of a group meet: the file of torch.distributed's FileStore."""
        return self.path / "rendezvous"

    def report_of(self, rank: int) -> Path:
        """What a rank answers."""
        return self.report if rank == 0 else self.path / f"report-{rank}.json"

    def stack_of(self, rank: int) -> Path:
        """Where a rank of a group stood shortly before its end, as faulthandler writes it."""
        return self.path / f"stack-{rank}.txt"

    def has_stacks(self) -> bool:
        """Whether a rank of a group has written down where it stands."""
        with suppress(OSError):  # the user's code may remove it
            return any(path.stat().st_size > 0 for path in self.path.glob("stack-*.txt"))
        return False


class WindowRules(BaseModel):
    """How long a trial measures."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_s: float = 8.0
    """The window ends after so many seconds, whatever its interval is by then."""
    precision: float = 0.02
    """The window ends when half of its 95 % interval is this share of the rate."""
    block_s: float = 0.2
    """Least length of a block."""
    drains_at_edges: bool = False
    """Wait for the device at the end of each block before more is launched, also where it can time its own edges: to
    show what that costs (benchmarks/gpu.py)."""


class Extras(BaseModel):
    """What a trial measures after its window. It is done for as long as the deadline is far; the window is safe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    loader_ceiling: bool = False
    """The loader alone."""
    device_ceiling: bool = False
    """The device alone, on batches that it holds."""
    breakdown: bool = False
    """Where the time goes, by extra steps under a profiler, and what an item costs."""
    roofline: bool = False
    """Of curves alone: what a batch's operators compute and move, against what the device can do."""
    stretch_s: float = 0.5
    """Length of each of these."""


NO_EXTRAS = Extras()
"""The window alone."""


class GroupPart(BaseModel):
    """Those ranks of a group that run on one of several hosts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: int
    """Number of this host among those of the group, from 0."""
    first_rank: int
    """The lowest rank here; the others follow it."""
    ranks: int
    interface: str | None = None
    """Network interface by which the other hosts are reached; None: torch finds one."""


class Job(BaseModel):
    """What each rank of a trial is to do."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    version: Literal[1] = 1
    kind: Literal["describe", "probe", "trial", "guard", "curves", "stress"]
    """describe: the machine; probe: one look at the workload; trial: a measurement; guard: 20 steps against float32;
    curves: ceilings around the configuration; stress: training on the largest samples."""
    payload: Path
    config: TrainingConfig
    device: str
    seed: int
    deadline_s: float
    rendezvous: str | None = None
    """Where the ranks of strategy ddp meet, as init_method of torch.distributed.init_process_group: "file://" with the
    path as it is, or "tcp://host:port"; None where nobody is to be met."""
    part: GroupPart | None = None
    """Which of the ranks are on this host; None: all of them."""
    limit_bytes: int | None = None
    """Memory limit, enforced where the device can; None: not known yet (probe)."""
    window: WindowRules = WindowRules()
    blocks_launches: bool = False
    """Each launch waits for its kernel (CUDA_LAUNCH_BLOCKING), so that an error shows where it happens. For a trial
    that is run once more to find that place; what it measures is worth nothing."""
    streams_blocks: bool = False
    """Rank 0 writes each block of its window as it comes."""
    extras: Extras = Extras()
    variations: tuple[TrainingConfig, ...] = ()
    """For curves: configurations whose loader or device is to be measured alone; what differs from `config` tells."""
    known: Curves | None = None
    """For curves: points that an earlier process has measured, or ended at; they are handed on as they are."""
    sys_path: tuple[str, ...]
    working_directory: Path
    python_path: str | None
    """PYTHONPATH of the caller, put back before user code runs."""


class RankReport(BaseModel):
    """What a rank answers: a result, and for a probe what it found out."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    version: Literal[1] = 1
    rank: int = 0
    result: TrialResult
    environment: Environment | None = None
    facts: WorkloadFacts | None = None
    conditions: DeviceConditions | None = None
    """Of a probe: what was on the device before it was opened."""
    guard: GuardFigures | None = None
    curves: Curves | None = None
    stress: StressFigures | None = None
    is_workload_fault: bool = False
    """The reason is a sentence about the user's workload, complete as it stands."""
    is_collateral: bool = False
    """This rank failed only since another one was gone: its connection was closed, or a collective timed out."""


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, readable by its owner alone.

    Raises:
        RunFolderError: the folder can't be written or its disk is full.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise RunFolderError(_disk_message(path, error)) from error


def write_model(path: Path, model: BaseModel) -> None:
    """Write a model as JSON, atomically."""
    write_atomic(path, model.model_dump_json().encode())


def read_model(path: Path, model_type: type[Model]) -> Model:
    """Read what `write_model` wrote.

    Raises:
        OSError, pydantic.ValidationError: the file is missing, or not of this kind and version.
    """
    return model_type.model_validate_json(path.read_bytes())


def free_shared_memory(pid: int) -> None:
    """Remove the files in /dev/shm that a dead process has left: torch's, by the sharing strategy "file_system".

    The process of torch that would remove them (torch_shm_manager) is swept with the trial.
    Source: torch/csrc/MapAllocator.cpp (NewProcessWideShmHandle): "/torch_", pid, "_", random, "_", counter.
    """
    for path in Path("/dev/shm").glob(f"torch_{pid}_*"):  # noqa: S108 - torch's own place
        with suppress(OSError):
            path.unlink()


def write_payload(value: object, folder: Path) -> None:
    """Write an object, such as a Workload, for ranks to read; tensors and arrays are stored to be mapped.

    Raises:
        WorkloadError: a part of it can't be pickled; the message names the attribute.
        RunFolderError: the folder can't be written or its disk is full.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / "stream").open("wb") as stream, (folder / "bytes").open("wb") as raw:
            pickler = _Pickler(stream, raw)
            _dump(pickler, value)
        write_atomic(folder / "index.json", json.dumps({"version": _VERSION, "buffers": pickler.buffers}).encode())
    except OSError as error:
        _remove_payload(folder)
        raise RunFolderError(_disk_message(folder, error)) from error
    except BaseException:
        _remove_payload(folder)
        raise


def _dump(pickler: _Pickler, value: object) -> None:
    try:
        pickler.dump(value)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise
        place, reason = _culprit(value, error)
        raise WorkloadError(
            f"{place} can't be carried to a trial ({reason}). Pass a zero-argument function that builds it instead: "
            "autotune calls it inside each trial."
        ) from error


def _remove_payload(folder: Path) -> None:
    for name in ("stream", "bytes"):
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)


def read_payload(folder: Path) -> Any:
    """Read what this run's parent wrote by `write_payload`; writes to its arrays stay in this process."""
    index = json.loads((folder / "index.json").read_bytes())
    with (folder / "bytes").open("rb") as raw, (folder / "stream").open("rb") as stream:
        size = os.fstat(raw.fileno()).st_size
        mapped = memoryview(mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_COPY)) if size else memoryview(b"")
        buffers = [mapped[start : start + length] for start, length in index["buffers"]]
        return _Unpickler(stream, mapped, buffers).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle ships no types
    """Puts large arrays (out-of-band buffers) and all tensor storages into a file of raw bytes.

    Storages go by persistent id, as in torch.save, so that tensors which share one still do.
    """

    def __init__(self, stream: BinaryIO, raw: BinaryIO) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._take_buffer)
        self.buffers: list[tuple[int, int]] = []
        self._raw = raw
        self._storages: dict[tuple[int, int], tuple[int, UntypedStorage]] = {}

    def persistent_id(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(obj, torch.storage.TypedStorage):
            return None
        storage: UntypedStorage = obj._untyped_storage  # noqa: SLF001 - as torch.save does; no public accessor
        if storage.device.type == "meta" or storage.nbytes() == 0:
            return None
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._storages:
            array = torch.empty(0, dtype=torch.uint8).set_(storage.cpu()).numpy()  # type: ignore[no-untyped-call] # torch
            start = self._append(memoryview(array))
            self._storages[key] = start, storage  # held, so that no other gets its address meanwhile
        return "storage", self._storages[key][0], storage.nbytes(), obj.dtype

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _SMALLEST_MAPPED_BYTES:
            return True
        self.buffers.append((self._append(view), view.nbytes))
        return False

    def _append(self, view: memoryview) -> int:
        start = -(-self._raw.tell() // _ALIGNMENT) * _ALIGNMENT
        self._raw.seek(start)
        self._raw.write(view)
        return start


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, mapped: memoryview, buffers: list[memoryview]) -> None:
        super().__init__(stream, buffers=buffers)
        self._mapped = mapped
        self._storages: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        import torch

        _, start, length, dtype = pid
        if start not in self._storages:
            tensor = torch.frombuffer(self._mapped, dtype=torch.uint8, count=length, offset=start)
            self._storages[start] = tensor.untyped_storage()
        storage = self._storages[start]
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call] # torch


def _culprit(value: object, error: Exception) -> tuple[str, str]:
    """The innermost attribute that does not pickle, such as "model.encoder.lock", and the reason."""
    path: list[str] = []
    reason = f"{type(error).__name__}: {error}"
    for _ in range(_CULPRIT_DEPTH):
        for name, child in _children(value):
            failure = _pickle_failure(child)
            if failure is not None:
                path.append(name)
                value, reason = child, failure
                break
        else:
            break
    return ".".join(path) or type(value).__name__, reason


def _children(value: object) -> list[tuple[str, object]]:
    if is_dataclass(value) and not isinstance(value, type):
        return [(one.name, getattr(value, one.name)) for one in fields(value)]
    if isinstance(value, dict):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    named: Callable[[], Any] | None = getattr(value, "named_children", None)
    modules = list(named()) if named is not None and not isinstance(value, type) else []
    attributes = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
    own = [(name, child) for name, child in attributes.items() if name not in {"_modules", "_parameters", "_buffers"}]
    return [*modules, *own]


def _pickle_failure(value: object) -> str | None:
    with open(os.devnull, "wb") as nowhere, open(os.devnull, "wb") as raw:  # noqa: PTH123 - a device, not a path
        try:
            _Pickler(nowhere, raw).dump(value)
        except Exception as error:  # noqa: BLE001 - a user's __reduce__ may raise anything
            return f"{type(error).__name__}: {error}"
    return None


def _disk_message(path: Path, error: OSError) -> str:
    return (
        f"autotune must be able to write to its run folder, but {path} can't be written ({error.strerror or error}). "
        "Free space there, or name another folder by run_dir (a search) or TMPDIR (anything else)."
    )
