"""What users do to a trial: models and datasets that fail in every way. Read by trials alone, from this file."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, get_worker_info

FEATURES = 4


def linear() -> nn.Module:
    return nn.Linear(FEATURES, 2)


def naming_its_compile_cache() -> NoReturn:
    raise RuntimeError(f"compiled code is in {os.environ.get('TORCHINDUCTOR_CACHE_DIR')}")


def pairs() -> TensorDataset:
    return TensorDataset(torch.randn(64, FEATURES), torch.randint(0, 2, (64,)))


class Faulty(nn.Module):
    """Does something in its forward pass, then what a linear layer does."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.layer, self.act = linear(), act

    def forward(self, inputs: Tensor) -> Tensor:
        self.act()
        outputs: Tensor = self.layer(inputs)
        return outputs


class Items(Dataset[tuple[Tensor, int]]):
    """Does something for each item."""

    def __init__(self, act: Callable[[int], object], length: int = 64) -> None:
        self.act, self.length = act, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.act(index)
        return torch.zeros(FEATURES), index % 2


def once(act: Callable[[], object]) -> Callable[[], None]:
    """Do something at the first call alone."""
    done: list[bool] = []

    def first_alone() -> None:
        if not done:
            done.append(True)
            act()

    return first_alone


# Ends of a process


def raising() -> nn.Module:
    return Faulty(_raise)


def _raise() -> NoReturn:
    raise ValueError("the model is broken")  # MARK: model


def raising_item() -> Dataset[Any]:
    return Items(_raise_item)


def _raise_item(index: int) -> NoReturn:
    raise OSError(f"item {index} is unreadable")  # MARK: item


def exiting_hard() -> NoReturn:
    """When it is built: an optimizer, which follows, imports for seconds in an interpreter of its own."""
    os._exit(3)


def segfaulting() -> nn.Module:
    return Faulty(lambda: ctypes.string_at(0))


def killing_itself() -> nn.Module:
    return Faulty(lambda: os.kill(os.getpid(), signal.SIGKILL))


def allocating_too_much() -> nn.Module:
    return Faulty(lambda: torch.empty(2**50))


def filling_the_device() -> nn.Module:
    def act() -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return Faulty(act)


def growing() -> NoReturn:
    """When it is built, as above."""
    held = []
    while True:
        held.append(bytearray(b"x") * 2**26)
        time.sleep(0.01)


def growing_and_printing() -> nn.Module:
    def act() -> None:
        held = []
        while True:
            held.append(bytearray(b"x") * 2**26)
            for _ in range(40):
                os.write(1, b"y" * 2**16)

    return Faulty(act)


def killing_its_parent() -> nn.Module:
    def act() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        hang()

    return Faulty(act)


# Hangs


def hang() -> NoReturn:
    while True:
        time.sleep(60)


def hanging() -> nn.Module:
    return Faulty(hang)


def hanging_deaf() -> NoReturn:
    """When it is built, as above."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(one, signal.SIG_IGN)
    hang()


def hanging_item() -> Dataset[Any]:
    def act(index: int) -> None:
        note_pid(index)
        if get_worker_info() is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            hang()

    return Items(act)


def note_pid(_: int = 0) -> None:
    with Path("pids").open("a") as file:
        file.write(f"{os.getpid()}\n")


def killing_itself_with_pid() -> nn.Module:
    def act() -> None:
        note_pid()
        os.kill(os.getpid(), signal.SIGKILL)

    return Faulty(act)


def noting_items() -> Dataset[Any]:
    return Items(note_pid)


def noting_sockets() -> Dataset[Any]:
    """Each worker has a place for its sockets, as one that hands on tensors has, and writes it down."""

    def act(_: int) -> None:
        if get_worker_info() is not None:
            place = get_temp_dir()
            Path(place, "listener").touch()
            with Path("sockets").open("a") as file:
                file.write(f"{place}\n")

    return Items(act)


def large_noting_items() -> Dataset[Any]:
    """Items of 1 MB through torch's named files in /dev/shm."""
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call] # torch's

    class Large(Items):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            note_pid()
            return torch.zeros(2**18), index % 2

    return Large(note_pid)


def wide_linear_killing_itself() -> nn.Module:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2**18, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            killing_itself_with_pid()(torch.zeros(1, FEATURES))
            return self.layer(inputs)  # type: ignore[no-any-return]

    return Wide()


# Output


def flood() -> None:
    os.write(1, b"the beginning\n")
    line = b"z" * 1023 + b"\n"
    for _ in range(25):
        for descriptor in (1, 2):
            os.write(descriptor, line * 1024)
    os.write(1, b"the end\n")


def closing_streams() -> nn.Module:
    def act() -> None:
        sys.stdout.close()
        sys.stderr.close()

    return Faulty(once(act))


def closing_streams_and_raising() -> nn.Module:
    def act() -> None:
        sys.stdout.close()
        sys.stderr.close()
        _raise()

    return Faulty(act)


def closing_descriptors() -> nn.Module:
    def act() -> None:
        os.close(1)
        os.close(2)

    return Faulty(once(act))


# Losses


def not_a_number(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.mean() * float("nan")


# Data


def nothing() -> Dataset[Any]:
    return Items(lambda _: None, length=0)


# A trial's world


def moving_away() -> nn.Module:
    return Faulty(once(lambda: os.chdir("/")))


def installing_handlers() -> nn.Module:
    def act() -> None:
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1):
            signal.signal(one, lambda *_: None)

    return Faulty(once(act))


def flooding_and_leaving_a_daemon() -> nn.Module:
    """Trains well, and writes down what it saw of its world and which process it left."""

    def act() -> None:
        flood()
        started = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
        Path("daemon").write_text(str(started.pid))

    Path("world").write_text(json.dumps(seen_world()))
    return Faulty(once(act))


def spawning_nameless_daemon() -> nn.Module:
    """A daemon that bears nothing of its trial: another session, no environment, its parent gone."""

    def act() -> None:
        script = "from subprocess import DEVNULL, Popen; "
        script += "print(Popen(['/bin/sleep', '600'], start_new_session=True, env={}, stdout=DEVNULL).pid)"
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            check=True,
            start_new_session=True,
        )
        Path("note").write_bytes(done.stdout)

    return Faulty(once(act))


def seen_world() -> dict[str, Any]:
    return {
        "variable": os.environ.get("AUTOTUNE_TRIAL"),
        "python_path": os.environ.get("PYTHONPATH"),
        "mine": os.environ.get("SOMETHING_OF_MINE"),
        "begun_with": Path("/proc/self/environ").read_text().split("\0"),
        "sys_path": sys.path,
        "folder": str(Path.cwd()),
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "is_session_leader": os.getsid(0) == os.getpid(),
        "input": sys.stdin.read(),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    }


def trial_folder() -> Path:
    """The trial's own folder, found as user code should not: in the frames above."""
    from autotune.protocol.disk import TrialFolder

    return next(one.path for one in gc.get_objects() if isinstance(one, TrialFolder))


def overwriting() -> nn.Module:
    def act() -> None:
        for name in ("report.json", "job.json"):
            (trial_folder() / name).write_bytes(b"{}")

    return Faulty(once(act))


def deleting() -> nn.Module:
    def act() -> None:
        folder = trial_folder()
        for one in folder.iterdir():
            one.unlink()
        folder.rmdir()

    return Faulty(once(act))


def using_up_descriptors() -> nn.Module:
    """No file can be opened any more, and what the step does fails."""

    def act() -> NoReturn:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        with suppress(OSError):
            while True:
                os.dup(0)
        _raise()

    return Faulty(act)


def taking_its_folder_away() -> nn.Module:
    """Nothing can be written where the report belongs: a file stands there in place of the folder."""

    def act() -> NoReturn:
        folder = trial_folder()
        shutil.rmtree(folder)
        folder.touch()
        _raise()

    return Faulty(act)


def flooding_the_channel() -> nn.Module:
    """Sends the parent junk and half a message, and leaves the connection open in a daemon."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{(trial_folder() / 'sockets').readlink()}/channel")
    connection.setblocking(False)
    with suppress(BlockingIOError):
        for _ in range(100_000):
            connection.sendall(b'[]\n{"done": 1}\n{"block": {"samples": -1}}\n\xff\n')
        connection.sendall(b'{"measured')
    subprocess.Popen(["sleep", "600"], pass_fds=[connection.fileno()])
    return linear()


def killing_its_reader() -> Items:
    return Items(lambda _: in_rank(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def hanging_its_reader() -> Items:
    return Items(lambda _: in_rank(lambda: time.sleep(3600)))


def in_rank(act: Callable[[], object]) -> None:
    """Do something where an item is made outside of a loader worker."""
    if get_worker_info() is None:
        act()


# A device's failures, as torch tells of them


def failing_late() -> nn.Module:
    """Its kernel fails, which is noticed where the host waits next; where launches wait, it is noticed at once."""

    def act() -> None:
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            raise RuntimeError(ASSERTED)  # MARK: kernel
        raise RuntimeError(ASSERTED)  # MARK: later

    return Faulty(act)


def failing_unless_launches_wait() -> nn.Module:
    def act() -> None:
        if os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
            raise RuntimeError(ASSERTED)

    return Faulty(act)


def failing_otherwise_where_launches_wait() -> nn.Module:
    def act() -> NoReturn:
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            raise MemoryError
        raise RuntimeError(ASSERTED)

    return Faulty(act)


ASSERTED = (
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
)


def of_200_mib() -> nn.Module:
    """Its weights are most of what a trial takes."""
    model = linear()
    model.register_buffer("idle", torch.ones(50 * 2**20))
    return model


def losing_the_device_at_8() -> nn.Module:
    """Nothing works any more in a process that has seen a batch of eight."""
    return LosingAt(8)


def dying_at_8() -> nn.Module:
    return LosingAt(8, then=os.abort)


def losing_the_device_at_any_other_size() -> nn.Module:
    return LosingAt(2, 8, 16)


class LosingAt(nn.Module):
    """Notes each process and size of batch."""

    def __init__(self, *sizes: int, then: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.layer, self.sizes, self.then, self.is_lost = linear(), sizes, then, False

    def forward(self, inputs: Tensor) -> Tensor:
        with Path("sizes").open("a") as file:
            file.write(f"{os.getpid()} {len(inputs)}\n")
        self.is_lost |= len(inputs) in self.sizes
        if self.is_lost:
            (self.then or _lose)()
        outputs: Tensor = self.layer(inputs)
        return outputs


def _lose() -> NoReturn:
    raise RuntimeError(
        "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress'"
    )


def forking_and_looking() -> nn.Module:
    """A process forked from this one writes down what it would refuse."""
    from autotune.worker.device import DeviceError
    from autotune.worker.rank import refuse_bad_fork

    pid = os.fork()
    if pid == 0:
        try:
            refuse_bad_fork("cpu")
            refuse_bad_fork("cuda:0")
        except DeviceError as error:
            Path("note").write_text(str(error))
        os._exit(0)
    os.waitpid(pid, 0)
    return linear()
