"""Sample the stacks of this process and its loader workers, with py-spy, while the script trains.

In: a folder of the trial, and the seconds to sample. Out: `Stacks`, or the reason why there are
none. py-spy runs as a child of the process that it reads, reads memory without stopping anything,
and ends with that process. Where the system forbids to read another process's memory, there are no
stacks, and training goes on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from contextlib import suppress
from math import ceil
from pathlib import Path
from time import perf_counter

from autotune.messages import stacks as messages
from autotune.note import Note
from autotune.records.stacks import Stacks
from autotune.worker.script.patching import open_file, opened, real_os
from autotune.worker.script.reading import PR_SET_PDEATHSIG, forbid_reading

RATE_HZ = 50
"""Samples a second. Source: py-spy 0.4.3 takes 4 % of a core for a process alone and 10 % with two
workers, at 100 Hz 6 % and 19 %; 5 s at 50 Hz give a share of one half with a standard error of
3 %."""
_GRACE_S = 3.0
"""Seconds in which py-spy must write its output and end. Source: it takes 0.1 s with two workers."""
_MOST_BYTES = 16 * 2**20
"""Bytes of output from which on it is not read. Source: 5 s of one process and two workers take
0.1 MB; 16 MiB are parsed in about a second."""
_LOG_BYTES = 4096
"""Bytes of py-spy's last messages that are read. Source: our convention."""

# The program. A small Python process asks the system to end it with this one, checks that it may
# read, and limits its output, then becomes py-spy: to do so in a fork of this process, which has
# threads, is not safe.


_BECOME = f"""
import ctypes, errno, os, resource, signal, sys

parent = int(sys.argv[1])
library = ctypes.CDLL(None, use_errno=True)
library.prctl({PR_SET_PDEATHSIG}, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != parent:
    sys.exit(1)

# With subprocesses, py-spy tries for seconds before it gives up, and gives no reason. The address
# is not mapped: where reading is allowed, it fails for that.
class Vector(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("size", ctypes.c_size_t)]

byte = ctypes.create_string_buffer(1)
own = Vector(ctypes.addressof(byte), 1)
read = library.process_vm_readv(parent, ctypes.byref(own), 1, ctypes.byref(Vector(8, 1)), 1, 0)
if read < 0 and ctypes.get_errno() in (errno.EPERM, errno.EACCES, errno.ENOSYS):
    sys.exit("Permission denied: " + os.strerror(ctypes.get_errno()))

_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
soft = {_MOST_BYTES} if hard == resource.RLIM_INFINITY else min(hard, {_MOST_BYTES})
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_program() -> str | None:
    """Return the path of py-spy: of this Python's environment, else on PATH; None if it is missing."""
    folders = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    folders.append(os.environ.get("PATH", os.defpath))
    return shutil.which("py-spy", path=os.pathsep.join(folders))


class Sampling:
    """A running py-spy, or the reason why there is none.

    Args:
        process: The program.
        folder: Folder of its output and its log.
        seconds: Seconds to sample.
        thread: The training thread's id in the system.
        reason: Reason why it did not start.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | None,
        folder: Path,
        seconds: float,
        thread: int,
        reason: Note | None = None,
    ) -> None:
        self._process = process
        self._output = folder / "stacks.txt"
        self._log = folder / "stacks.log"
        self._seconds = seconds
        self._thread = thread
        self._reason = reason
        self._started = perf_counter()

    @classmethod
    def start(cls, folder: Path, seconds: float) -> Sampling:
        """Start to sample this process and its subprocesses; call it in the training thread.

        Call `allow_reading` first, before loader workers start. Raises nothing: a reason is kept for
        `finish`.

        Args:
            folder: Folder of the trial, not redirected: its physical path.
            seconds: Seconds to sample; `finish` may end it earlier.
        """
        thread = threading.get_native_id()
        program = find_program()
        if program is None:
            return cls(None, folder, seconds, thread, messages.sampling_not_installed())
        words = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), program, "record"]
        words += ["--pid", str(os.getpid()), "--subprocesses", "--threads", "--idle"]
        words += ["--nonblocking", "--full-filenames", "--rate", str(RATE_HZ)]
        words += ["--duration", str(max(1, ceil(seconds)))]
        words += ["--format", "raw", "--output", str(folder / "stacks.txt")]
        try:
            # Its messages go to a file: a pipe would have to be read.
            flags = real_os.O_WRONLY | real_os.O_CREAT | real_os.O_TRUNC
            with (
                opened(os.devnull, real_os.O_RDONLY) as nothing,
                opened(str(folder / "stacks.log"), flags) as log,
            ):
                process = subprocess.Popen(
                    words, stdin=nothing, stdout=log, stderr=log, env=_environment()
                )
        except Exception as error:  # noqa: BLE001 - a script may have replaced Popen
            forbid_reading()
            reason = messages.sampling_not_started(f"{type(error).__name__}: {error}")
            return cls(None, folder, seconds, thread, reason)
        return cls(process, folder, seconds, thread)

    def finish(self) -> Stacks | str:
        """End py-spy and return the stacks, or the reason why there are none."""
        sampled_s = min(self._seconds, perf_counter() - self._started)
        try:
            if self._reason is None:
                self._reason = self._end()
            if self._reason is None:
                return self._read(sampled_s)
            return str(self._reason)
        finally:
            forbid_reading()
            for file in (self._output, self._log):
                with suppress(OSError):
                    real_os.unlink(file)

    def _end(self) -> Note | None:
        """Let py-spy write its output and end; return the reason if it did not."""
        process = self._process
        assert process is not None  # noqa: S101 - else there is a reason
        process.send_signal(signal.SIGINT)  # it writes what it has; nothing if it has ended
        try:
            code = process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return messages.sampling_late(_GRACE_S)
        if code == 0:
            return None
        if code == -signal.SIGXFSZ or self._size() >= _MOST_BYTES:
            return messages.sampling_too_large(_MOST_BYTES)
        return self._failure(code)

    def _failure(self, code: int) -> Note:
        """Return why py-spy ended with an exit code other than 0, by its last messages."""
        try:
            with open_file(self._log, "rb") as file:
                file.seek(max(0, real_os.stat(self._log).st_size - _LOG_BYTES))
                log = file.read(_LOG_BYTES).decode(errors="replace")
        except OSError:
            log = ""
        lowered = log.lower()
        if any(word in lowered for word in _FORBIDDEN):
            return messages.sampling_forbidden("yama" if _yama_forbids() else "system")
        if code == -signal.SIGINT:
            return messages.sampling_not_begun()
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        last = "".join(filter(str.isprintable, lines[-1])) if lines else ""
        return messages.sampling_failed(code, last[:200])

    def _read(self, sampled_s: float) -> Stacks | str:
        from autotune.worker.script.stack_lines import sum_stacks

        if self._size() >= _MOST_BYTES:
            return str(messages.sampling_too_large(_MOST_BYTES))
        try:
            with open_file(self._output, encoding="utf-8", errors="replace") as file:
                raw = file.read()
        except OSError:
            return str(messages.sampling_found_nothing())
        folder = Path("/")
        with suppress(OSError):  # the working folder may have been removed
            folder = Path(real_os.getcwd())
        stacks = sum_stacks(raw, thread=self._thread, seconds=sampled_s, folder=folder)
        if not stacks.samples:
            return str(messages.sampling_found_nothing())
        return stacks

    def _size(self) -> int:
        """Return the bytes of the larger one of the output and the log."""
        sizes = [0]
        for file in (self._output, self._log):
            with suppress(OSError):
                sizes.append(real_os.stat(file).st_size)
        return max(sizes)


def _environment() -> dict[str, str]:
    """Return this process's environment without variables of autotune, Python and Rust."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AUTOTUNE_", "PYTHON", "RUST_"))
    }


_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_FORBIDDEN = ("permission denied", "operation not permitted", "eperm", "os error 1)")
"""Words of py-spy's messages if the system forbids it. Source: py-spy's main.rs, and strerror."""


def _yama_forbids() -> bool:
    """Return whether Yama is set to more than the memory of descendants, which was allowed."""
    try:
        with open_file(_YAMA) as file:
            return int(file.read()) > 1
    except (OSError, ValueError):
        return False
