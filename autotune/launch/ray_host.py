"""What runs on each host of a Ray cluster: an actor that measures trials there through a fork server of its own.

Receives the workload's payload once, in parts, and jobs as JSON; answers as JSON how the ranks
ended, with their reports and their log. No process of a host outlives its actor: the fork server
ends them when the actor is gone.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock

import psutil
import ray
from filelock import FileLock, Timeout
from pydantic import ConfigDict

from autotune.config.environment import Environment
from autotune.errors import AutotuneError, LauncherError
from autotune.frozen import FrozenModel
from autotune.launch.launcher import Exit, Launch
from autotune.launch.local import LocalLauncher
from autotune.launch.runner import TrialRunner
from autotune.policy import Ending
from autotune.protocol.disk import TrialFolder, remove_made, write_model
from autotune.protocol.messages import DescribeJob, GroupPart, Job, TrialJob
from autotune.records.measurement import Block
from autotune.version import __version__

_DESCRIBE_WITHIN_S = 120.0  # our convention, as local.py's for its start
_ENDS_WITHIN_S = 8.0  # our convention: less than the driver waits for it (ray_launcher.py)
_FILE_BYTES = (
    16 * 1024 * 1024
)  # our convention: a report has some 100 KiB; a larger one was written by user code
_FIRST_PORT = 20_000
_PORTS = 12_000  # below Linux's ephemeral ports (32768 on), which any process may take meanwhile
_PORT_TRIES = 100  # our convention: so many ports in use by chance mean that none is free
_OF_THE_HOST = (
    "CUDA_",
    "HIP_",
    "HOSTNAME",
    "NVIDIA_",
    "RAY_",
    "ROCR_",
    "SLURM",
    "TMPDIR",
    "XDG_",
    "ZE_",
)
_RAYS_OWN = ("RAY_", "OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")


class HostFacts(FrozenModel):
    """A host's description of itself."""

    version: str
    """Of autotune."""
    environment: Environment | None
    """The machine as trials see it; None where they can't be started."""
    reason: str = ""
    interface: str | None
    """Network interface that has the host's address in the cluster; None where none is found."""


class HostTask(FrozenModel):
    """What a host is to run of a trial."""

    ticket: str
    """By which it can be cancelled."""
    job: Job
    """The host replaces the paths of its payload and of the trial's folder by its own."""
    part: GroupPart
    """The host's ranks."""
    ram_ceiling_bytes: int | None
    ending: Ending


class HostAnswer(FrozenModel):
    """How a host's part of a trial ended."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    exit: Exit
    files: dict[str, bytes]
    """Reports and stacks, by their names in the trial's folder."""
    log: bytes


class Host:
    """Measures one trial at a time on this host; `cancel`, `blocks` and `close` may be called meanwhile.

    Args:
        environment: the caller's; trials see it except for the host's own variables.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # Ray puts folders with its own packages before the user's.
        rays = str(Path(ray.__file__).parent) + os.sep
        sys.path[:] = [entry for entry in sys.path if not entry.startswith(rays)]
        _remove_left_behind()
        self._scratch, self._alive = _own_folder()
        self._environment = trial_environment(os.environ, environment)
        self._launcher = LocalLauncher(self._scratch / "server.log", self._environment)
        self._turn, self._cancelled, self._is_closing = Lock(), set[str](), Event()
        self._blocks: dict[str, list[Block]] = {}
        """Blocks of the trial that runs, by its ticket."""

    def describe(self, device: str, address: str) -> str:
        """Return HostFacts of this host, which has this address in the cluster, as JSON."""
        runner = TrialRunner(
            launcher=self._launcher,
            payload=self._scratch,
            scratch=self._scratch,
            logs=self._scratch,
            device=device,
            seed=0,
        )
        try:
            report = runner.describe(deadline_s=_DESCRIBE_WITHIN_S)
            found = report.environment
            reason = report.result.reason
        except AutotuneError as error:
            found = None
            reason = str(error)
        own = [
            name
            for name, known in psutil.net_if_addrs().items()
            if address in {entry.address for entry in known}
        ]
        return HostFacts(
            version=__version__,
            environment=found,
            reason=reason,
            interface=own[0] if own else None,
        ).model_dump_json()

    def take(self, key: str, name: str, offset: int, data: bytes) -> None:
        """Write a part of the payload's file `name`, the first of which begins it."""
        folder = self._payload(key)
        try:
            if not folder.exists():
                for old in self._scratch.glob(f"{_PAYLOAD}*"):
                    shutil.rmtree(old, ignore_errors=True)
                folder.mkdir(mode=0o700)
            with (folder / name).open("r+b" if offset else "wb") as file:
                file.seek(offset)
                file.write(data)
        except OSError as error:
            why = f"the workload can't be written to {folder} ({error.strerror or error})"
            raise LauncherError(f"{why}; free space there, or set TMPDIR for ray start") from error

    def free_port(self) -> int:
        """Return a port that is not in use now."""
        for port in secrets.SystemRandom().sample(
            range(_FIRST_PORT, _FIRST_PORT + _PORTS), _PORT_TRIES
        ):
            with suppress(OSError), socket.socket() as probe:
                probe.bind(("", port))
                return port
        raise OSError(f"no free port was found from {_FIRST_PORT} to {_FIRST_PORT + _PORTS}")

    def run(self, task: str) -> str:
        """Run a HostTask's ranks to their end; return a HostAnswer. Both are JSON."""
        with self._turn:  # a trial that was cancelled may not have ended yet
            return self._run(HostTask.model_validate_json(task)).model_dump_json()

    def cancel(self, ticket: str) -> None:
        """End a task if it runs, or as soon as it does."""
        self._cancelled.add(ticket)

    def blocks(self, ticket: str, known: int) -> list[str]:
        """Return further blocks of the task's window, as JSON; none before it begins and once it is over."""
        return [block.model_dump_json() for block in self._blocks.get(ticket, [])[known:]]

    def close(self) -> None:
        """End the trial that runs and the fork server, and remove the host's files."""
        self._is_closing.set()
        is_idle = self._turn.acquire(timeout=_ENDS_WITHIN_S)
        self._launcher.close()
        if is_idle:
            self._turn.release()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._alive.release()

    def _run(self, task: HostTask) -> HostAnswer:
        wanted = task.job.process.working_directory
        if not wanted.is_dir():
            where = f"trials must find the caller's folder on every host, but {socket.gethostname()} has no"
            raise LauncherError(f"{where} {wanted}; use a file system that the hosts share")
        folder = TrialFolder(Path(tempfile.mkdtemp(prefix="trial-", dir=self._scratch)))
        log = folder.path / "log"
        try:
            write_model(folder.job, self._own_job(task.job, folder))
            launch = Launch(
                folder=folder,
                log=log,
                deadline_s=task.job.process.deadline_s,
                ranks=task.part.ranks,
                ram_ceiling_bytes=task.ram_ceiling_bytes,
                ending=task.ending,
                should_end=lambda: self._is_closing.is_set() or task.ticket in self._cancelled,
            )
            self._blocks = {task.ticket: launch.blocks}
            exit_ = self._launcher.launch(launch)
            found = {path.name: _read(path) for path in answer_files(folder, task.part)}
            files = {name: data for name, data in found.items() if data is not None}
            return HostAnswer(exit=exit_, files=files, log=_read(log) or b"")
        finally:
            remove_made(folder.overlay)
            shutil.rmtree(folder.path, ignore_errors=True)

    def _own_job(self, job: Job, folder: TrialFolder) -> Job:
        kept = [entry for entry in job.process.sys_path if not entry or Path(entry).exists()]
        sys_path = tuple(dict.fromkeys([*kept, *sys.path]))
        changes: dict[str, object] = {
            "process": job.process.model_copy(update={"sys_path": sys_path})
        }
        if not isinstance(job, DescribeJob):
            changes["payload"] = self._payload(job.payload.name)
        if isinstance(job, TrialJob) and job.rendezvous is not None and job.part is None:
            changes["rendezvous"] = f"file://{folder.rendezvous}"
        return job.model_copy(update=changes)

    def _payload(self, key: str) -> Path:
        return self._scratch / f"{_PAYLOAD}{key}"


_PREFIX = "autotune-host-"
_PAYLOAD = "payload-"
_ALIVE = "alive"
"""A file in a host's folder that is locked for as long as the host lives."""


def trial_environment(here: Mapping[str, str], callers: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of trials on a host: the caller's, except for variables of the host's own or Ray's."""
    own = {name: value for name, value in here.items() if not name.startswith(_RAYS_OWN)}
    sent = {name: value for name, value in callers.items() if not name.startswith(_OF_THE_HOST)}
    return own | sent


def answer_files(folder: TrialFolder, part: GroupPart) -> list[Path]:
    """Return the files that some ranks of a trial may leave in its folder: their reports and stacks."""
    ranks = range(part.first_rank, part.first_rank + part.ranks)
    return [path for rank in ranks for path in (folder.report_of(rank), folder.stack_of(rank))]


def _read(path: Path) -> bytes | None:
    """Return a file's content, None if there is none; one that is far too large is cut, and is no valid report."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(_FILE_BYTES)
    return None


def _own_folder() -> tuple[Path, FileLock]:
    """Make a folder for this host's files, and lock it; another host may take it for one of the dead before that."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = FileLock(folder / _ALIVE, thread_local=False)
        with suppress(FileNotFoundError):
            lock.acquire()
            if (folder / _ALIVE).exists():
                return folder, lock


def _remove_left_behind() -> None:
    """Remove the folders of this user's actors that were killed.

    Hosts, or containers, may share the folder for temporary files: a process of another one is not
    seen from here, but the lock that it holds is.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError, Timeout):  # another host's actor may remove it at the same time
            if (folder / _ALIVE).exists() and folder.stat().st_uid == os.getuid():
                with FileLock(folder / _ALIVE, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)
