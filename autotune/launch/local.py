"""The launcher of this machine: it forks ranks from a server, or starts an interpreter for each.

If that is sooner, trials share a process, one after another.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autotune.errors import LauncherError
from autotune.launch.launcher import Exit, Launch, may_share
from autotune.launch.processes import Ranks, Started, exit_code, kill_all, start_worker
from autotune.messages.trials import forks_cannot_open_device, not_preloaded, trials_cannot_share
from autotune.note import Note
from autotune.protocol.channel import Channel
from autotune.protocol.disk import (
    deadline_within,
    monotonic,
    private_file,
    read_model,
    write_atomic,
    write_model,
)
from autotune.protocol.messages import PreloadResult, RankReport, WorkloadJob, read_job
from autotune.records.trial import OUT_OF_MEMORY

# The fork server as its launcher sees it: the process, and the channel to it.
#
# Takes in trials to fork and modules to import; returns the ranks' pids, their exit codes as they
# come, and why a server can't be used. What it does with a message is in worker/serve.py.


_READY_WITHIN_S = 120.0  # our convention: `import torch` from a cold disk takes up to half a minute
_ANSWER_WITHIN_S = 30.0  # our convention: a fork takes 10 ms
_PRELOADED_WITHIN_S = (
    120.0  # our convention: a large framework from a cold disk takes half a minute
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """Modules that servers are to import."""

    names: Sequence[str]
    environment: Mapping[str, str]
    left: int
    """Servers that may try it, the next included."""


class Server:
    """The process that forks ranks. Starting it does not wait until it is ready."""

    def __init__(self, log: Path, environment: Mapping[str, str], token: str) -> None:
        self._log = log
        self._bad_forks: list[str] | None = None
        self._pids: list[int] = []
        """Ranks that are not reaped."""
        self._running = set[int]()
        """Those whose exit code has not come yet."""
        self._imports_from: float | None = None
        """When it could begin to import, as far as is known; None: it is not to, or is done."""
        self._was_asked = False
        with ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.enter_context(ours)
            with theirs, open(log, "wb", opener=private_file) as output:
                self.process = start_worker(
                    *("serve", str(theirs.fileno())),
                    environment=environment,
                    token=token,
                    stdin=subprocess.DEVNULL,
                    output=output.fileno(),
                    descriptors=[theirs.fileno()],
                )
            undo.pop_all()
        self.channel = Channel(ours)

    def bad_forks(self) -> list[str]:
        """Wait until the server is ready; return the devices that its forks can't open."""
        if self._bad_forks is None:
            self._bad_forks = self._answer(_READY_WITHIN_S)["bad_forks"]
            self._imports_from = self._imports_from and monotonic()
        return self._bad_forks

    def preload(self, preload: Preload) -> None:
        """Have it import modules, unless it has been asked; does not wait for it."""
        if self._was_asked or self._pids:
            return
        self._send({"preload": preload.names, "environment": preload.environment})
        self._was_asked = True
        self._imports_from = monotonic()

    def preload_fault(self) -> PreloadResult | None:
        """Wait until it has imported what it was to; return None if it can be used."""
        if self._imports_from is None:
            return None
        ends_at = self._imports_from + deadline_within(_PRELOADED_WITHIN_S)
        self._imports_from = None
        package = None
        try:
            while message := self.channel.receive(max(0.0, ends_at - monotonic())):
                package = message.get("importing", package)
                if "preloaded" in message:
                    result = PreloadResult.model_validate(message)
                    return result if result.reason else None
        except EOFError:
            return PreloadResult(reason="end", culprit=package)
        return PreloadResult(reason="hang", culprit=package)

    def fork(self, launch: Launch, shared_from_s: float, output: int) -> Started:
        """Have the server fork a trial's ranks, which print to `output`."""
        folder = str(launch.folder.path)
        self._send(
            {"folder": folder, "ranks": launch.ranks, "shared_from_s": shared_from_s}, output
        )
        self._pids = self._answer(_ANSWER_WITHIN_S)["pids"]
        self._running = set(range(launch.ranks))
        wakes = [self.channel.fileno()]
        return Started(pids=self._pids, ended=self._ended, wakes=wakes, spare=self.process.pid)

    def reap(self) -> bool:
        """Let the server reap the ranks: nothing of them runs any more, and their numbers are not used again.

        Returns:
            False if it can't yet: ranks run, or there are none; or if it can't be asked.
        """
        if self._running or not self._pids:
            return False
        try:
            self.channel.send({"reap": self._pids})
        except OSError:  # the server is gone, or has taken half of it
            return False
        self._pids = []
        return True

    def _ended(self) -> dict[int, int]:
        ended: dict[int, int] = {}
        try:
            while self._running - ended.keys() and (message := self.channel.receive(0.0)):
                ended[message["rank"]] = message["exit"]
        except EOFError:  # without the server its ranks die too
            ended |= dict.fromkeys(sorted(self._running - ended.keys()), -signal.SIGKILL)
        self._running -= ended.keys()
        return ended

    def has_ended(self) -> bool:
        """Return whether the process has ended, unless `preload_fault` is yet to find out why."""
        return self._imports_from is None and exit_code(self.process) is not None

    def _send(self, message: Mapping[str, object], *descriptors: int) -> None:
        try:
            self.channel.send(message, *descriptors)
        except OSError as error:
            raise self._failure("is gone") from error

    def _answer(self, within_s: float) -> dict[str, Any]:
        try:
            message = self.channel.receive(within_s)
        except EOFError:
            raise self._failure("has ended") from None
        if message is None:
            raise self._failure(f"did not answer within {within_s:.0f} s")
        return message

    def _failure(self, what: str) -> LauncherError:
        tail = ""
        with suppress(OSError):
            tail = self._log.read_text(errors="replace")[-2000:].strip()  # about a traceback
        return LauncherError(
            f"the process that starts trials {what}; its log {self._log} ends:\n{tail}"
        )


# The launcher. If a server answers that its forks can't open a device, each rank is an interpreter
# of its own from then on, unless trials run on the CPU.
#
# Given what a script imports, it has the server import that too, while its caller goes on: the next
# trial waits for it. If the server can't be forked any more after that, it is ended, and another
# leaves out what was in the way.
#
# A process that trials share builds the workload once, and measures one configuration after
# another. What it can't change runs in processes of its own: several ranks, a model that is
# compiled, bound cores. So that only one thing runs at a time, the shared process is ended before
# that. A trial that is stopped early ends itself there, and its process lives on.
#
# A trial that crashes there is the process's last. If others were measured before it, it is tried
# once more as the first of a new one. If it runs there, that was the others' doing (a dataset that
# can be read once); the second time so, every trial has a process of its own from then on. If it
# crashes again, later ones are not tried twice. What ran out of memory, or into its deadline, is
# not tried again.


# Our convention: all, twice without what was in the way, then what the last one had come through.
_PRELOADS = 4
_FALSE_FAILURES = 2
"""After this many trials that fail only in a reused process, stop reusing processes: our own
convention."""


class LocalLauncher:
    """Starts trials on this machine. A fork server starts at once; the first trial waits for it.

    Args:
        server_log: Where the output of a fork server goes, which forks each rank in some 10 ms
            (Linux only); None: each rank is a new interpreter, which takes seconds.
        environment: What trials see; None: this process's.
        device: torch's name for what trials run on, or "auto".
        shared_from_s: Seconds in which the first job builds the workload from which trials share a
            process.

    Attributes:
        is_sharing: Whether trials may share a process, as far as is known by now.
        notes: Why the server is not used, or has not imported all that it was to; that trials can't
            share a process.
    """

    def __init__(
        self,
        server_log: Path | None,
        environment: Mapping[str, str] | None = None,
        *,
        device: str = "auto",
        shared_from_s: float = inf,
    ) -> None:
        self.is_sharing = shared_from_s < inf
        self.notes: tuple[Note, ...] = ()
        self._server_log = server_log
        """None as well once forks can't open a device."""
        self._environment = os.environ if environment is None else environment
        self._device = device
        self._shared_from_s = shared_from_s
        self._token = uuid.uuid4().hex
        self._preload: Preload | None = None
        self._interpreters: list[subprocess.Popen[bytes]] = []
        """Those of the ranks that run."""
        self._shared: Ranks | None = None
        self._shared_kind: tuple[object, ...] = ()
        self._kept_bytes = 0
        """RAM that a shared process takes next to its jobs, as far as is known."""
        self._is_decided = False
        self._tries_again = True
        self._false_failures = 0
        """Trials that failed after others alone."""
        self._server: Server | None = None
        self._begin_server()

    def launch(self, launch: Launch) -> Exit:
        """Run a trial in a process of its own, or in the shared one if it can be."""
        job = read_job(launch.folder.job)
        if not self.is_sharing or not may_share(job):
            self.end_shared()
            ranks = self._start(launch, inf)
            try:
                return ranks.follow(launch)
            finally:
                self._end(ranks)
        had_others = self._can_share(job)
        exit_ = self._run_shared(launch, job)
        left_s = launch.deadline_s - exit_.wall_s
        has_crashed = _has_crashed(_report_of(launch), exit_)
        if not had_others or not self._tries_again or left_s < exit_.wall_s or not has_crashed:
            return exit_
        return self._run_again(launch, job, exit_, left_s)

    def preload(self, names: Sequence[str], environment: Mapping[str, str]) -> None:
        """Have the server import modules; a second call takes the place of the first, with a new server."""
        if self._preload is not None:
            self._end_server()
        self._preload = (
            Preload(names=tuple(names), environment=dict(environment), left=_PRELOADS)
            if names
            else None
        )
        with suppress(LauncherError):  # the next launch begins again, or raises it
            self._begin_server()

    def end_shared(self) -> None:
        """End the shared process, so that what comes next has the machine to itself."""
        shared = self._shared
        self._shared = None
        if shared is not None:
            self._end(shared)

    def close(self) -> None:
        """End all processes of this launcher."""
        self.end_shared()
        self._end_server()

    def _start(self, launch: Launch, shared_from_s: float) -> Ranks:
        """Start a trial's ranks; a server that has died since the last trial is started again."""
        try:
            return self._start_once(launch, shared_from_s)
        except LauncherError:
            return self._start_once(launch, shared_from_s)

    def _start_once(self, launch: Launch, shared_from_s: float) -> Ranks:
        try:
            server = self._ready_server()
            fork = self._start_interpreters if server is None else server.fork
            start = partial(fork, launch, shared_from_s)
            return Ranks(launch, self._token, start, is_shared=shared_from_s < inf)
        except BaseException:
            self._reap()
            raise

    def _start_interpreters(self, launch: Launch, shared_from_s: float, output: int) -> Started:
        for rank in range(launch.ranks):
            interpreter = start_worker(
                *("run", str(launch.folder.path), str(rank), str(shared_from_s)),
                environment=self._environment,
                token=self._token,
                stdin=subprocess.PIPE,  # closes with this process, and the rank ends
                output=output,
            )
            self._interpreters.append(interpreter)
        running = dict(enumerate(self._interpreters))

        def ended() -> dict[int, int]:
            codes = {rank: exit_code(process) for rank, process in running.items()}
            return {
                rank: code for rank, code in codes.items() if code is not None and running.pop(rank)
            }

        return Started(pids=[one.pid for one in self._interpreters], ended=ended)

    def _end(self, ranks: Ranks) -> None:
        try:
            ranks.end()
        finally:
            self._reap()

    def _reap(self) -> None:
        for interpreter in self._interpreters:
            interpreter.communicate()
        self._interpreters.clear()
        if self._server is not None and not self._server.reap():
            self._end_server()  # its next answer would be to the trial that is gone

    # The server.

    def _begin_server(self) -> Server | None:
        """Start the server unless it runs, and tell it what it is to import; None: ranks are interpreters."""
        if self._server_log is None:
            return None
        if self._server is not None and self._server.has_ended():
            self._end_server()
        self._server = self._server or Server(self._server_log, self._environment, self._token)
        if self._preload is not None:
            try:
                self._server.preload(self._preload)
            except LauncherError:
                self._end_server()  # it may have taken half of a message
                raise
        return self._server

    def _ready_server(self) -> Server | None:
        while (server := self._begin_server()) is not None:
            bad = server.bad_forks()
            if bad and self._device != "cpu":
                self.notes += (forks_cannot_open_device(", ".join(bad)),)
                self._server_log = None
                self._end_server()
                break
            fault = server.preload_fault()
            if fault is None or self._preload is None:
                return server
            self._end_server()
            self._preload = self._reduced(self._preload, fault)
        return None

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.channel.close()  # which ends it if it waits for a request
            kill_all([self._server.process.pid], self._token)
            self._server.process.wait()
        self._server = None

    def _reduced(self, tried: Preload, fault: PreloadResult) -> Preload | None:
        """Return what the next server is to import; what it is not is noted."""
        names = tuple[str, ...]()
        if fault.reason in {"hang", "end"}:  # nothing is tried again
            pass
        elif tried.left == 2:
            names = tuple(tried.names[: fault.preloaded])
        elif tried.left > 2:
            inside = tuple(f"{name}." for name in fault.chain)
            names = tuple(name for name in tried.names if not f"{name}.".startswith(inside))
        packages = sorted({name.partition(".")[0] for name in {*tried.names}.difference(names)})
        self.notes += (not_preloaded(packages, fault.culprit, fault.reason or ""),)
        return replace(tried, names=names, left=tried.left - 1) if names else None

    # The shared process.

    def _can_share(self, job: WorkloadJob) -> bool:
        """Return whether the shared process waits for such a job."""
        shared = self._shared
        return shared is not None and shared.can_go_on() and self._shared_kind == _kind_of(job)

    def _run_shared(self, launch: Launch, job: WorkloadJob) -> Exit:
        """Do a job in the shared process; one that was ended early, and did not end well before, has no report."""
        try:
            if self._shared is not None and self._can_share(job):
                self._shared.begin(launch)
            else:
                self.end_shared()
                self._shared = self._start(launch, self._shared_from_s)
                self._shared_kind = _kind_of(job)
            exit_ = self._shared.follow(launch, self._kept_bytes)
        except BaseException:  # Ctrl-C among them
            self.end_shared()
            raise
        report = _report_of(launch)
        if exit_.ended_for == "cancelled" and not _is_ok(report):
            launch.folder.report.unlink(missing_ok=True)
        build_s = None if report is None else report.workload_build_s
        if report is not None:
            self._kept_bytes = report.kept_bytes
        if not self._is_decided and build_s is not None:
            self._is_decided = True
            self.is_sharing = build_s >= self._shared_from_s
        if not self._shared.is_done or not self.is_sharing:
            self.end_shared()
        return exit_

    def _run_again(self, launch: Launch, job: WorkloadJob, first: Exit, left_s: float) -> Exit:
        """Run a trial that has crashed after others as the first of a process: that counts, unless it must be ended."""
        before = launch.folder.report.read_bytes() if launch.folder.report.exists() else None
        launch.folder.report.unlink(missing_ok=True)
        launch.blocks.clear()
        write_model(launch.folder.job, job.within(left_s))
        kept = launch.log.with_stem(f"{launch.log.stem}-shared")
        with suppress(OSError):  # the next run writes over it
            launch.log.replace(kept)
        again = self._run_shared(replace(launch, deadline_s=left_s), job)
        took_s = first.wall_s + again.wall_s
        if again.ended_for not in {None, "cancelled"} and before is not None:
            write_atomic(launch.folder.report, before)
            return replace(first, wall_s=took_s)
        if again.ended_for != "cancelled" and not _is_ok(_report_of(launch)):
            self._tries_again = False
            return replace(again, wall_s=took_s)
        self._false_failures += 1
        if self._false_failures == _FALSE_FAILURES:
            self.notes += (trials_cannot_share(f"{kept.parent.name}/{kept.name}"),)
            self.is_sharing = False
            self.end_shared()
        return replace(again, wall_s=took_s)


def _kind_of(job: WorkloadJob) -> tuple[object, ...]:
    """Return what all jobs of a process have in common.

    A process keeps the algorithms that cuDNN has once chosen. Source: ATen's Conv_v8.cpp, whose
    cache of plans does not know the switch.
    """
    own = job.process
    world = (own.device, own.seed, own.sys_path, own.working_directory, own.python_path)
    return (job.payload, job.config.cudnn_benchmark, *world)


def _has_crashed(report: RankReport | None, exit_: Exit) -> bool:
    """Return whether a trial has failed in a way that the trials before it may have caused.

    A SIGKILL is somebody else's, or the kernel's: whoever has asked for the trial knows what to
    make of it.
    """
    is_killed = exit_.was_oom_killed or -signal.SIGKILL in (exit_.code, *exit_.codes)
    is_full = report is not None and report.result.outcome in OUT_OF_MEMORY
    return exit_.ended_for is None and not is_killed and not _is_ok(report) and not is_full


def _report_of(launch: Launch) -> RankReport | None:
    with suppress(OSError, ValidationError):
        return read_model(launch.folder.report, RankReport)
    return None


def _is_ok(report: RankReport | None) -> bool:
    return report is not None and report.result.outcome == "ok"
