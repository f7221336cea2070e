"""Launchers on this machine: a fork server, a fresh interpreter, and trials that share one process."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from itertools import count
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

from pydantic import ValidationError

from autotune.errors import AutotuneError, LauncherError
from autotune.launch.launcher import Exit, Launch, Launcher, may_share, notes_of
from autotune.launch.processes import Started, exit_code, kill_all, sockets_in, start_worker, watch
from autotune.messages.trials import forks_cannot_open_device, not_preloaded, trials_cannot_share
from autotune.note import Note
from autotune.protocol.disk import (
    TrialFolder,
    deadline_within,
    monotonic,
    private_file,
    read_model,
    write_atomic,
    write_model,
)
from autotune.protocol.messages import DescribeJob, Job, RankReport, SeriesJob, read_job
from autotune.records.trial import OUT_OF_MEMORY, Outcome

# The fork server as its launcher sees it: the process, the socket to it, and the messages that go
# over it.
#
# Takes in trials to fork and modules to import; hands out the ranks' pids, their exit codes as they
# come, and why a server can't be used. What it does with a message is in worker/serve.py.


OF_IMPORTS = ("hang", "end")
"""Reasons of faults that happen in an import itself."""
_MESSAGE_BYTES = 64 * 1024  # our convention: far more than the numbers of a thousand ranks take
_READY_WITHIN_S = 120.0  # our convention: `import torch` from a cold disk takes up to half a minute
_ANSWER_WITHIN_S = 30.0  # our convention: a fork takes 10 ms
_PRELOADED_WITHIN_S = (
    120.0  # our convention: a large framework from a cold disk takes half a minute
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """What servers are to import."""

    names: Sequence[str]
    environment: Mapping[str, str]
    left: int
    """Servers that may try it, the next included."""
    is_close: bool = False
    """Whether it is looked after each package, to find the culprit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadFault:
    """Why a server that was to import modules is of no use."""

    reason: str
    """"threads", "device" or "processes", which it has now; "hang" or "end" of an import."""
    culprit: str | None
    """The package whose import it was; None where it is not known."""
    chain: Sequence[str] = ()
    """Modules whose import brings it."""
    preloaded: int = 0
    """Names from the first on that do not bring it."""


class Server:
    """The process that forks ranks, and the socket to it. Starting it does not wait until it is ready."""

    def __init__(self, log: Path, environment: Mapping[str, str], token: str) -> None:
        self._log = log
        self._bad_forks: list[str] | None = None
        self._pids: list[int] = []
        """Ranks that are not reaped."""
        self._running = set[int]()
        """Those whose exit code has not come yet."""
        self._preloads: FileIO | None = None
        """What it imports: the names, then the package that it has come to. None: nothing, or it is
        done."""
        self._was_asked = False
        self._waited_from = 0.0
        """When it could begin to import, as far as is known."""
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(log, "wb", opener=private_file) as output:
            try:
                self.process = start_worker(
                    *("serve", str(theirs.fileno())),
                    environment=environment,
                    token=token,
                    stdin=subprocess.DEVNULL,
                    output=output.fileno(),
                    descriptors=[theirs.fileno()],
                )
            except LauncherError:
                self.connection.close()
                raise

    def bad_forks(self) -> list[str]:
        """Wait until the server is ready; the devices that its forks can't open."""
        if self._bad_forks is None:
            self._bad_forks = self._answer(_READY_WITHIN_S)["bad_forks"]
            self._waited_from = monotonic()
        return self._bad_forks

    def preload(self, preload: Preload) -> None:
        """Have it import modules, unless it has been asked; does not wait for it."""
        if self._was_asked or self._pids:
            return
        asked = json.dumps({"names": preload.names, "environment": preload.environment})
        message = json.dumps({"preload": "closely" if preload.is_close else "at the end"})
        names = os.fdopen(os.memfd_create("autotune-preload"), "r+b", buffering=0)
        names.write(asked.encode())
        try:
            socket.send_fds(self.connection, [message.encode()], [names.fileno()])
        except OSError as error:
            names.close()
            raise self._failure("is gone") from error
        self._preloads = names
        self._was_asked = True
        self._waited_from = monotonic()

    def preload_fault(self) -> PreloadFault | None:
        """Wait until it has imported what it was to; None where it can be used."""
        if self._preloads is None:
            return None
        message = self._receive(
            max(0.0, self._waited_from + deadline_within(_PRELOADED_WITHIN_S) - monotonic())
        )
        self._preloads.seek(0)
        package = self._preloads.read().decode()
        self._preloads.close()
        self._preloads = None
        if message:
            return PreloadFault(**message) if message["reason"] is not None else None
        culprit = (
            package if package.isidentifier() else None
        )  # else the names, which it has not even read
        return PreloadFault(reason="end" if message is not None else "hang", culprit=culprit)

    def close(self) -> None:
        """Close the connection, which ends the server if it waits for a request."""
        self.connection.close()
        if self._preloads is not None:
            self._preloads.close()

    def fork(self, launch: Launch, output: int) -> Started:
        """Have the server fork a trial's ranks, which print to `output`."""
        message = json.dumps({"folder": str(launch.folder.path), "ranks": launch.ranks}).encode()
        try:
            socket.send_fds(self.connection, [message], [output])
        except OSError as error:
            raise self._failure("is gone") from error
        self._pids = self._answer(_ANSWER_WITHIN_S)["pids"]
        self._running = set(range(launch.ranks))
        return Started(pids=self._pids, poll=self._poll, spare=self.process.pid)

    def reap(self) -> bool:
        """Let the server reap the ranks: nothing of them runs any more, and their numbers are not used again.

        False where it can't yet: ranks run, or there are none.
        """
        if self._running or not self._pids:
            return False
        with suppress(OSError):  # the server is gone
            self.connection.send(json.dumps({"reap": self._pids}).encode())
        self._pids = []
        return True

    def _poll(self, timeout_s: float) -> dict[int, int]:
        message = self._receive(timeout_s)
        if message is None:
            return {}
        gone = dict.fromkeys(
            sorted(self._running), -signal.SIGKILL
        )  # without the server its ranks die too
        ended: dict[int, int] = {message["rank"]: message["exit"]} if message else gone
        self._running -= ended.keys()
        return ended

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message: None where none comes in time, empty where the server is gone."""
        ready, _, _ = select.select([self.connection], [], [], timeout_s)
        if not ready:
            return None
        message = b""
        with suppress(ConnectionError):
            message = self.connection.recv(_MESSAGE_BYTES)
        return dict(json.loads(message or b"{}"))

    def _answer(self, within_s: float) -> dict[str, Any]:
        message = self._receive(within_s)
        if not message:
            raise self._failure(
                "has ended" if message is not None else f"did not answer within {within_s:.0f} s"
            )
        return message

    def _failure(self, what: str) -> LauncherError:
        tail = ""
        with suppress(OSError):
            tail = self._log.read_text(errors="replace")[-2000:].strip()  # about a traceback
        return LauncherError(
            f"the process that starts trials {what}; its log {self._log} ends:\n{tail}"
        )


# Launcher that starts a fresh interpreter for each rank: seconds of import for each trial, on any
# system.


class FreshInterpreterLauncher:
    """Has no process between trials.

    Args:
        environment: what trials see; None: this process's.
        log_line: why trials are started this way, where that was not asked for: the first trial's
            log begins with it.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, log_line: str = "") -> None:
        self._token = uuid.uuid4().hex
        self._environment = os.environ if environment is None else environment
        self._log_line = log_line

    def launch(self, launch: Launch) -> Exit:
        """Start an interpreter for each rank, in a session of its own, and wait for them."""
        with (
            ExitStack() as started
        ):  # reaps the ranks at its end, when all that they have started is gone

            def start(output: int, held: ExitStack) -> Started:
                held.enter_context(sockets_in(launch.folder))
                os.write(output, self._log_line.encode())
                self._log_line = ""
                ranks = [
                    started.enter_context(self._start(launch, rank, output))
                    for rank in range(launch.ranks)
                ]
                return Started(
                    pids=[rank.pid for rank in ranks], poll=partial(_poll, dict(enumerate(ranks)))
                )

            return watch(launch, self._token, start)

    def close(self) -> None:
        """Nothing to end."""

    def _start(self, launch: Launch, rank: int, output: int) -> subprocess.Popen[bytes]:
        return start_worker(
            *("run", str(launch.folder.path), str(rank)),
            environment=self._environment,
            token=self._token,
            stdin=subprocess.PIPE,  # closes with this process, and the rank ends
            output=output,
        )


def _poll(running: dict[int, subprocess.Popen[bytes]], timeout_s: float) -> dict[int, int]:
    """As Started has it; ranks that have ended are taken out of those that run."""
    until = monotonic() + timeout_s
    while True:
        codes = {rank: exit_code(process) for rank, process in running.items()}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        left_s = until - monotonic()
        if ended or left_s <= 0:
            for rank in ended:
                del running[rank]
            return ended
        sleep(min(0.01, left_s))


# Launcher over a fork server: one process that has imported torch forks each rank in some 10 ms.
# Linux only.
#
# Where the server answers that its forks can't open a device, each rank is an interpreter of its
# own from then on, unless trials run on the CPU.
#
# Told what a script imports, it has the server import that too, while its caller goes on: the next
# trial waits for it. Where the server can't be forked any more after that, it is ended, and another
# leaves out what was in the way.


# Our convention: all, twice without what was in the way, then what the last one had come through.
_PRELOADS = 4


class _BadForkError(Exception):
    """The server's forks can't open a device that trials may run on."""


class ForkServerLauncher:
    """Starts the server at once, in the background; the first trial waits for it.

    Args:
        server_log: where the server's own output goes.
        environment: what trials see; None: this process's.
        device: torch's name for what trials run on, or "auto".
    """

    def __init__(
        self,
        server_log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        device: str = "auto",
    ) -> None:
        self._log, self._token, self._device = server_log, uuid.uuid4().hex, device
        self._environment = os.environ if environment is None else environment
        self._server: Server | None = Server(self._log, self._environment, self._token)
        self._preload: Preload | None = None
        self._fresh: FreshInterpreterLauncher | None = None
        """Starts trials in place of a server whose forks can't open a device."""
        self.notes: tuple[Note, ...] = ()
        """Why the server is not used, or has not imported all that it was to."""

    def launch(self, launch: Launch) -> Exit:
        """Fork the trial's ranks and wait for them; a server that has died is started anew."""
        if self._fresh is not None:
            return self._fresh.launch(launch)
        try:
            return watch(launch, self._token, partial(self._fork, launch))
        except _BadForkError:
            pass  # the trial begins below: what it raises must not name this as its context
        finally:
            if self._server is None or not self._server.reap():
                self.close()  # the server's next answer would be to the trial that is gone
        return self.launch(launch)

    def preload(self, names: Sequence[str], environment: Mapping[str, str]) -> None:
        """As Preloads has it; a second call takes the place of the first, with a new server."""
        if self._fresh is not None:
            return
        if self._preload is not None:
            self.close()
        self._preload = (
            Preload(names=tuple(names), environment=dict(environment), left=_PRELOADS)
            if names
            else None
        )
        with suppress(LauncherError):  # the next launch begins anew, or tells it
            self._begun_server()

    def close(self) -> None:
        """End the server and all processes that have its token."""
        if self._server is not None:
            self._server.close()
            kill_all([self._server.process.pid], self._token)
            self._server.process.wait()
        self._server = None

    def _fork(self, launch: Launch, output: int, held: ExitStack) -> Started:
        try:
            return self._fork_once(launch, output, held)
        except LauncherError:  # it has died since the last trial
            self.close()
            return self._fork_once(launch, output, held)

    def _fork_once(self, launch: Launch, output: int, held: ExitStack) -> Started:
        server = self._ready_server()
        held.enter_context(sockets_in(launch.folder))
        return server.fork(launch, output)

    def _begun_server(self) -> Server:
        """The server, which may not be ready yet, with what it is to import."""
        self._server = self._server or Server(self._log, self._environment, self._token)
        if self._preload is not None:
            self._server.preload(self._preload)
        return self._server

    def _ready_server(self) -> Server:
        while True:
            server = self._begun_server()
            bad = server.bad_forks()
            if bad and self._device != "cpu":
                self._give_up_forks(", ".join(bad))
                raise _BadForkError
            fault = server.preload_fault()
            if fault is None or self._preload is None:
                return server
            self.close()
            self._preload = self._reduced(self._preload, fault)

    def _reduced(self, tried: Preload, fault: PreloadFault) -> Preload | None:
        """What the next server is to import; what it is not is noted."""
        if fault.culprit is None and fault.reason not in OF_IMPORTS and not tried.is_close:
            return replace(tried, is_close=True, left=tried.left - 1)
        names = _names_without(tried, fault)
        packages = _packages(set(tried.names).difference(names))
        self.notes += (not_preloaded(packages, fault.culprit, fault.reason),)
        return replace(tried, names=names, left=tried.left - 1) if names else None

    def _give_up_forks(self, devices: str) -> None:
        why = (
            f"each trial starts an interpreter of its own: a package that torch loads by itself "
            f"has opened {devices}, "
            "which a fork can't open after that; set TORCH_DEVICE_BACKEND_AUTOLOAD=0 where you "
            "don't need the package"
        )
        self.notes += (forks_cannot_open_device(devices),)
        self._fresh = FreshInterpreterLauncher(self._environment, log_line=f"autotune: {why}\n")
        self.close()


def _names_without(tried: Preload, fault: PreloadFault) -> tuple[str, ...]:
    """Names that another server may import."""
    if fault.culprit is None or fault.reason in OF_IMPORTS or tried.left <= 1:
        return ()
    if tried.left == 2:
        return tuple(tried.names[: fault.preloaded])
    inside = tuple(f"{name}." for name in fault.chain)
    return tuple(name for name in tried.names if not f"{name}.".startswith(inside))


def _packages(names: Iterable[str]) -> list[str]:
    return sorted({name.partition(".")[0] for name in names})


# Launcher whose trials share a process: it builds the workload once, and measures one configuration
# after another.
#
# Other than a Launcher's, that process lives on between trials, until `end_shared`. What it can't
# change runs as the launcher below starts it, in processes of its own: several ranks, a model that
# is compiled, bound cores. So that only one thing runs at a time, the shared process is ended
# before that. A trial that is stopped early ends itself there, and its process lives on.
#
# A trial that crashes there is the process's last. Where others were measured before it, it is
# tried once more as the first of a new one. If it runs there, that was the others' doing (a dataset
# that can be read once); the second time so, every trial has a process of its own from then on.
# Where it crashes again, later ones are not tried twice. What ran out of memory, or into its
# deadline, is not tried again.


_TICK_S = 0.01
"""Between two looks whether a job is done: our own convention, beside trials of seconds."""
_BEGUN_WITHIN_S = 150.0
"""The launcher below waits for its server for up to two minutes, and tells what has become of it."""
_FALSE_FAILURES = 2
"""Trials that fail after others alone, from which on trials share no process: our own convention."""


@dataclass(slots=True, kw_only=True)
class _Shared:
    """A process that does jobs one after another, as a trial of the launcher below that runs in a thread."""

    folder: TrialFolder
    log: Path
    kind: SeriesJob
    """What it can do."""
    exit: Future[Exit]
    ending: Event
    """Set where it is to end."""
    ceiling: list[int | None]
    """The RAM ceiling of the job that it does, alone."""
    has_begun: bool = False

    def end(self) -> Exit:
        """End it, and wait until nothing of it is left."""
        self.ending.set()
        try:
            return self.exit.result()
        finally:
            shutil.rmtree(self.folder.path, ignore_errors=True)


class WarmWorkerLauncher:
    """Starts no process before the first trial.

    Args:
        below: Starts the shared process, and the trials that can't share one.
        scratch: Where the folder of the shared process goes.
        logs: Where its log goes, as warm-1.log and so on: all that its trials print.
        least_build_s: Where a workload takes less to build, in the first job, each trial has a
            process of its own.
    """

    def __init__(
        self,
        below: Launcher,
        scratch: Path,
        logs: Path,
        *,
        least_build_s: float = 0.0,
    ) -> None:
        self.below = below
        self._scratch = scratch
        self._logs = logs
        self._least_build_s = least_build_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="autotune-warm-worker")
        self._shared: _Shared | None = None
        self._endings: list[Event] = []
        """Of all processes so far."""
        self._kept_bytes = 0
        """RAM that the shared process takes beside its jobs."""
        self._is_decided = False
        self._tries_again = True
        self._false_failures = 0
        """Trials that failed after others alone."""
        self.is_sharing = True
        """Whether trials may share a process, as far as is known by now."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """Those of the launcher below, and that trials can't share a process."""
        own = (trials_cannot_share(),) if self._false_failures >= _FALSE_FAILURES else ()
        return (*notes_of(self.below), *own)

    def launch(self, launch: Launch) -> Exit:
        """Run a trial in the shared process where it can be, else as the launcher below does."""
        job = read_job(launch.folder.job)
        if not self.is_sharing or not may_share(job):
            self.end_shared()
            return self.below.launch(launch)
        had_others = self._ready_for(job) is not None
        exit_ = self._run(launch, job)
        left_s = launch.deadline_s - exit_.wall_s
        has_crashed = _has_crashed(_report_in(launch.folder), exit_)
        if not had_others or not self._tries_again or left_s < exit_.wall_s or not has_crashed:
            return exit_
        return self._run_again(launch, job, exit_, left_s)

    def end_shared(self) -> None:
        """End the shared process, so that what comes next has the machine to itself; the launcher below lives on."""
        shared = self._shared
        self._shared = None
        if shared is not None:
            with suppress(AutotuneError):  # it was never started, and its trial has said so
                shared.end()

    def close(self) -> None:
        """End everything."""
        for ending in self._endings:
            ending.set()
        try:
            self.end_shared()
            self._pool.shutdown()
        finally:
            self.below.close()

    def _decide(self, report: RankReport) -> None:
        """Whether trials share a process, by what the first job has built."""
        self._kept_bytes = report.kept_bytes
        build_s = report.workload_build_s
        if not self._is_decided and build_s is not None:
            self._is_decided = True
            if build_s < self._least_build_s:
                self.is_sharing = False
                self.end_shared()

    def _run_again(self, launch: Launch, job: Job, first: Exit, left_s: float) -> Exit:
        """A trial that has crashed after others, as the first of a process: that counts, unless it must be ended."""
        before = launch.folder.report.read_bytes() if launch.folder.report.exists() else None
        for leftover in (launch.folder.report, launch.folder.blocks):
            leftover.unlink(missing_ok=True)
        job = job.model_copy(
            update={"process": job.process.model_copy(update={"deadline_s": left_s})}
        )
        write_model(launch.folder.job, job)
        again = self._run(replace(launch, deadline_s=left_s), job)
        took_s = first.wall_s + again.wall_s
        if again.ended_for not in {None, "cancelled"} and before is not None:
            write_atomic(launch.folder.report, before)
            return replace(first, wall_s=took_s)
        if again.ended_for != "cancelled" and _outcome_of(_report_in(launch.folder)) != "ok":
            self._tries_again = False
            return replace(again, wall_s=took_s)
        self._false_failures += 1
        if self._false_failures >= _FALSE_FAILURES:
            self.is_sharing = False
            self.end_shared()
        return replace(again, wall_s=took_s)

    def _ready_for(self, job: Job) -> _Shared | None:
        """The shared process, where it runs and can do this job."""
        shared = self._shared
        return (
            shared
            if shared is not None and not shared.exit.done() and shared.kind == _kind_of(job)
            else None
        )

    def _shared_for(self, launch: Launch, job: Job) -> _Shared:
        shared = self._ready_for(job)
        if shared is None:
            self.end_shared()
            shared = self._shared = self._begun(launch, job)
        return shared

    def _run(self, launch: Launch, job: Job) -> Exit:
        """Do a job; one that the parent has seen enough of, and that did not end well before, has no report."""
        exit_ = self._done(launch, job)
        report = _report_in(launch.folder)
        if report is not None:
            self._decide(report)
        if not launch.folder.enough.exists() or _outcome_of(report) == "ok":
            return exit_
        launch.folder.report.unlink(missing_ok=True)
        return Exit(code=None, ended_for="cancelled", wall_s=exit_.wall_s)

    def _done(self, launch: Launch, job: Job) -> Exit:
        begun = monotonic()
        try:
            shared = self._shared_for(launch, job)
            begun = _when_begun(shared, begun)
            ceiling_bytes = launch.ram_ceiling_bytes
            shared.ceiling[:] = [
                None if ceiling_bytes is None else ceiling_bytes + self._kept_bytes
            ]
            _write_log_pointer(launch.log, shared.log)
            write_atomic(shared.folder.next, str(launch.folder.path).encode())
            is_late = _is_late(shared, launch, begun + launch.deadline_s)
            if not is_late and not shared.exit.done():
                return Exit(code=0, codes=(0,), wall_s=monotonic() - begun)
        except BaseException:  # Ctrl-C among them
            self.end_shared()
            raise
        self._shared = None
        exit_ = shared.end()
        if is_late:
            exit_ = Exit(code=None, ended_for="deadline", wall_s=0.0)
        return replace(exit_, wall_s=monotonic() - begun)

    def _begun(self, launch: Launch, job: Job) -> _Shared:
        kind = _kind_of(job)
        ending = Event()
        ceiling = [launch.ram_ceiling_bytes]
        self._endings.append(ending)
        number = next(
            number for number in count(1) if not (self._logs / f"warm-{number}.log").exists()
        )
        folder = TrialFolder(Path(tempfile.mkdtemp(prefix="warm-", dir=self._scratch.absolute())))
        own = {"is_first": len(self._endings) == 1, "least_build_s": self._least_build_s}
        write_model(folder.job, kind.model_copy(update=own))
        log = self._logs / f"warm-{number}.log"
        process = Launch(
            folder=folder,
            log=log,
            deadline_s=kind.process.deadline_s,
            ram_ceiling=lambda: ceiling[0],
            should_end=ending.is_set,
        )
        exit_ = self._pool.submit(self.below.launch, process)
        return _Shared(
            folder=folder, log=log, kind=kind, exit=exit_, ending=ending, ceiling=ceiling
        )


def _kind_of(job: Job) -> SeriesJob:
    """The process that a job which may share one needs."""
    assert not isinstance(job, DescribeJob | SeriesJob)  # noqa: S101 - our own bug
    # longer than a search: each job has a deadline of its own
    process = job.process.model_copy(update={"deadline_s": 7 * 24 * 3600.0, "limit_bytes": None})
    return SeriesJob(
        process=process, payload=job.payload, cudnn_benchmark=job.config.cudnn_benchmark
    )


def _when_begun(shared: _Shared, asked: float) -> float:
    """When a process of its own would have begun to count: where this one is new, once it runs."""
    if shared.has_begun:
        return asked
    while (
        not shared.exit.done()
        and not shared.folder.begun.exists()
        and monotonic() < asked + _BEGUN_WITHIN_S
    ):
        wait([shared.exit], _TICK_S)
    shared.has_begun = True
    return monotonic()


def _is_late(shared: _Shared, launch: Launch, ends_at: float) -> bool:
    """Wait until a job is done, or its process has ended; whether its deadline is over before that.

    Where the parent has seen enough of it, it is told so, and has some seconds to end its block.
    """
    is_told = launch.should_end is None
    while not shared.exit.done() and shared.folder.next.exists():
        if monotonic() >= ends_at:
            return True
        if not is_told and launch.should_end is not None and launch.should_end():
            with suppress(OSError):  # a full disk: it goes on to the end of its window
                launch.folder.enough.touch(mode=0o600)
                now = monotonic()  # a block takes no longer than all has taken so far
                ends_at = min(
                    ends_at,
                    now + max(launch.ending.block_within_s, now - (ends_at - launch.deadline_s)),
                )
            is_told = True
        wait([shared.exit], _TICK_S)
    return False


def _has_crashed(report: RankReport | None, exit_: Exit) -> bool:
    """Whether a trial has failed in a way that the trials before it may have caused.

    A SIGKILL is somebody else's, or the kernel's: whoever has asked for the trial knows what to
    make of it.
    """
    is_killed = exit_.was_oom_killed or -signal.SIGKILL in (exit_.code, *exit_.codes)
    outcome = _outcome_of(report)
    return (
        exit_.ended_for is None
        and not is_killed
        and outcome != "ok"
        and outcome not in OUT_OF_MEMORY
    )


def _report_in(folder: TrialFolder) -> RankReport | None:
    with suppress(OSError, ValidationError):
        return read_model(folder.report, RankReport)
    return None


def _outcome_of(report: RankReport | None) -> Outcome | None:
    return None if report is None else report.result.outcome


def _write_log_pointer(log: Path, of_all: Path) -> None:
    """Leave in a trial's log where its output is; a full disk costs the log, not the trial."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(OSError), open(os.open(log, flags, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
        file.write(
            f"autotune: this ran in a process that trials may share; what it prints is in "
            f"{of_all.name}\n"
        )
