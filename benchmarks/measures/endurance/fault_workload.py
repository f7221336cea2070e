"""A user's module that trains well but for one fault, which strikes in the phases that fault.json beside it names.

It is copied beside a configuration and knows nothing of autotune but where a search's folders lie: the folder of the
trial that runs is named after its phase. Each process writes down where the fault has struck it.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate, get_worker_info

__all__ = ["collate", "dataset", "loss", "model"]

_HERE = Path(__file__).parent
_PLAN = json.loads((_HERE / "fault.json").read_text())
_ITEM_S = 0.01
_FEATURES = 8
_AGAIN = "-again"
"""In the name of a further run of a trial."""
_PREFIXES = {
    "probe": "probe",
    "trial-000": "baseline",
    "trial": "trial",
    "guard": "guard",
    "stress": "stress",
}
_HELD = list[Any]()
"""What lives as long as the process."""
_STRUCK = set[int]()
"""Processes that the fault has struck."""
_PHASES = dict[int, str]()


def model() -> nn.Module:
    _strike("model")
    return _Model()


def dataset() -> Dataset[tuple[Tensor, int]]:
    _strike("dataset")
    return _Items()


def collate(items: list[Any]) -> Any:
    _strike("collate")
    return default_collate(items)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    is_struck = _strike("loss")
    return nn.functional.cross_entropy(outputs, targets) * (float("nan") if is_struck else 1e-3)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_FEATURES, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        _strike("step")
        outputs: Tensor = self.layer(inputs)
        return outputs


class _Items(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if get_worker_info() is not None:
            _strike("worker")
        time.sleep(_ITEM_S)
        return torch.full((_FEATURES,), index / 4000), index % 2


def _phase() -> str:
    """What the trial that runs is for, by the name of its folder."""
    if not (searched := [path.name for path in (_HERE / "disk").glob("run/scratch/*")]):
        diagnosed = [path.name for path in (_HERE / "disk" / "tmp").glob("autotune-*/scratch/*")]
        return (
            {"baseline": "diagnose", "curves": "others"}.get(diagnosed[0].split("-")[0], "")
            if diagnosed
            else ""
        )
    name = searched[0]
    if _AGAIN in name:
        return "reference" if name.startswith("trial-000") else "repeat"
    return (
        "look"
        if name.startswith("curves")
        else next((_PREFIXES[one] for one in _PREFIXES if name.startswith(one)), "")
    )


def _strike(hook: str) -> bool:
    """Do what the fault does, at the first call in a process; whether it has struck this process."""
    if hook != _PLAN["hook"]:
        return False
    pid = os.getpid()
    if pid not in _PHASES:
        _PHASES[pid] = _phase()
        if _PHASES[pid] in _PLAN["phases"]:
            with (_HERE / "struck").open("a") as file:
                file.write(f"{_PHASES[pid]} {pid}\n")
            _STRUCK.add(pid)
            globals()[f"_{_PLAN['fault']}"]()
    return pid in _STRUCK


def _hang() -> NoReturn:
    while True:
        time.sleep(60)


# Ends of a process


def _segfault() -> None:
    ctypes.string_at(0)


def _os_exit() -> None:
    os._exit(3)


def _exit_zero() -> None:
    os._exit(0)


def _sys_exit() -> None:
    sys.exit(4)


def _exec() -> None:
    os.execv("/bin/true", ["true"])


def _exec_endless() -> None:
    os.execv("/bin/sleep", ["sleep", "600"])


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_killed_worker, _segfault_worker, _exit_worker = _killed, _segfault, _os_exit


def _keyboard_interrupt() -> None:
    raise KeyboardInterrupt


# Processes that are left


def _note_pid(pid: int) -> None:
    with (_HERE / "pids").open("a") as file:
        file.write(f"{pid}\n")


def _daemon() -> None:
    """Another session, nothing of the trial in its environment, its parent gone."""
    script = "from subprocess import DEVNULL, Popen; "
    script += (
        "print(Popen(['/bin/sleep', '600'], start_new_session=True, env={}, stdout=DEVNULL).pid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, start_new_session=True
    )
    _note_pid(int(done.stdout))


def _fork_bomb() -> None:
    """Each process forks twice, six times over: 63 that sleep, most of them with a session of their own."""
    own, depth = os.getpid(), 0
    while depth < 6:
        depth += 1
        if os.fork() == 0:
            with suppress(OSError):
                os.setsid()
            _note_pid(os.getpid())
            continue
        if os.getpid() == own:
            continue
    if os.getpid() != own:
        _hang()


def _hang_at_exit() -> None:
    atexit.register(_hang)
    util.Finalize(None, _hang, exitpriority=100)
    threading.Thread(target=_hang).start()


# Hangs


_hang_build = _hang_item = _hang_step = _hang_collate = _hang


def _hang_deaf() -> None:
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGQUIT):
        signal.signal(one, signal.SIG_IGN)
    _hang()


def _stopped_worker() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


_stopped_rank = _stopped_worker


def _deadlocked_worker() -> None:
    """A lock that another thread holds while the workers are forked."""
    lock = threading.Lock()
    held = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            _hang()

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    os.register_at_fork(after_in_child=lock.acquire)


# What is used up


def _ram_by_rlimit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
    _HELD.append(bytearray(2**30))


def _ram_by_cgroup() -> None:
    group = Path(_PLAN["cgroup"])
    (group / "cgroup.procs").write_text(str(os.getpid()))
    for _ in range(64):
        _HELD.append(bytearray(b"x") * 2**24)
    _hang()


def _ram_growing() -> None:
    for _ in range(48):
        _HELD.append(bytearray(b"x") * 2**26)
        time.sleep(0.05)
    _hang()


def _device_full() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total of 79.00 GiB"
    )


def _huge_tensor() -> None:
    _HELD.append(torch.empty(2**50))


def _fill(folder: str) -> None:
    """A file without a name takes all the room there is, until the process ends."""
    descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    _HELD.append(descriptor)
    for block in (b"x" * 2**20, b"x" * 4096):
        with suppress(OSError):
            while os.write(descriptor, block):
                pass


def _full_shm() -> None:
    _fill("/dev/shm")


def _full_disk() -> None:
    _fill(str(_HERE / "disk"))


def _used_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with suppress(OSError):
        while True:
            _HELD.append(os.dup(0))


# Output


def _closed_output() -> None:
    sys.stdout.close()
    sys.stderr.close()
    for descriptor in (1, 2):
        with suppress(OSError):
            os.close(descriptor)


def _flood() -> None:
    line = b"z" * 1023 + b"\n"
    for _ in range(_PLAN["flood_mib"]):
        os.write(1, line * 1024)


def _binary_output() -> None:
    os.write(1, bytes(range(256)) * 64)
    os.write(2, b"\xff\xfe\x00")


_ESCAPES = "\x1b[2J\x1b]0;owned\x07\x1b[31m<script>alert(1)</script>[red]\r\x9b31m\u202e"


def _escapes_printed() -> None:
    print(_ESCAPES)
    print(_ESCAPES, file=sys.stderr)


def _escapes() -> None:
    raise ValueError(f"owned {_ESCAPES}")


def _surrogate() -> None:
    raise ValueError("a file named \udcff\x00 is broken")


def _long_message() -> None:
    raise ValueError("a tensor of " + "0123456789 " * 5_000_000)


# A trial's world


def _signal_handlers() -> None:
    for one in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGCHLD,
        signal.SIGALRM,
        signal.SIGUSR1,
        signal.SIGPIPE,
    ):
        signal.signal(one, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)


def _cwd() -> None:
    os.chdir("/")


def _umask() -> None:
    os.umask(0o777)


def _strict_warnings() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", "This DataLoader will create"
    )  # torch's, of four workers on fewer cores


def _own_warning() -> None:
    warnings.simplefilter("error")
    warnings.warn("old", DeprecationWarning, stacklevel=1)


# Training


def _not_a_number() -> None:
    """The loss that calls this is no number from here on."""


def _recursion() -> None:
    _recursion()
