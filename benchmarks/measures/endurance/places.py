"""Places and users that a search may run in and as: names of folders, rights, homes, temporary folders, locks, limits.

Comes in: an empty folder. Goes out: how a command line is started there, and the answer that is expected of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.measures.endurance.live_search import WORKLOAD
from benchmarks.measures.endurance.short_windows import SHORT

__all__ = ["PLACES", "Place", "command_line", "fill", "lacks"]

_CONFIG = """
workload: {model: "work.py:model", dataset: "work.py:dataset", loss: "work.py:loss"}
space: {num_workers: [0, 2], micro_batch_size: 32, grad_accum_steps: 1, amp_dtype: float32, prefetch_factor: 2,
        persistent_workers: true, intra_op_threads: null}
budget: {n_trials: 2, timeout_s: 60}
device: cpu
run_dir: run
"""
_WORKS = ""
_Tool = Literal["setpriv", "unshare", "cc", "prlimit"]
_COMMAND = f"{SHORT}\nfrom autotune.cli import main\nmain()"
_NOBODY = 65534
_STRANGER = 54321
"""A user without a name, a home and a line in /etc/passwd."""
_NO_LOCKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
int flock(int fd, int operation) { errno = ENOLCK; return -1; }
static int refused(int command) { return command == F_SETLK || command == F_SETLKW || command == F_GETLK; }
#define REFUSING(name) \\
    int name(int fd, int command, ...) { \\
        va_list given; va_start(given, command); void *argument = va_arg(given, void *); va_end(given); \\
        if (ALSO_RECORDS && refused(command)) { errno = ENOLCK; return -1; } \\
        return ((int (*)(int, int, ...)) dlsym(RTLD_NEXT, #name))(fd, command, argument); \\
    }
REFUSING(fcntl)
REFUSING(fcntl64)
"""
_FLOCK_ALONE = _NO_LOCKS.replace("flock(int fd, int operation)", "unused(int fd, int operation)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where and how a search is started, and the answer to expect."""

    answer: str = _WORKS
    """A regular expression of the one sentence that refuses; "": the search ends well."""
    below: str = "."
    """The folder that it runs in, below the case's."""
    config: str = "tune.yaml"
    arguments: Sequence[str] = ()
    prefix: Callable[[Path], Sequence[str]] = lambda _: ()
    """What starts it: another user, another mount namespace. Receives the case's folder."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables; None: not set. {folder} is the case's."""
    tool: _Tool | None = None
    """A command that `prefix` needs."""

    @property
    def needs_root(self) -> bool:
        """Whether root alone can start it so."""
        return self.tool in {"setpriv", "unshare"}


def _as_user(user: int, *, owns: bool = True) -> Callable[[Path], Sequence[str]]:
    """Another user, who may read everything here, as the interpreter may lie in a home, but write only his own."""

    def prefix(folder: Path) -> Sequence[str]:
        for path in [folder, *folder.rglob("*")] if owns else [_made(folder / "out")]:
            os.chown(path, user, user, follow_symlinks=False)
        folder.chmod(0o755)
        rights = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
        return ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", *rights]

    return prefix


def _mounted(*commands: str) -> Callable[[Path], Sequence[str]]:
    """A mount namespace of its own in which these have run."""
    return lambda _: ["unshare", "--mount", "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh"]


def _shim(source: str, *, also_records: bool) -> Callable[[Path], Sequence[str]]:
    def prefix(folder: Path) -> Sequence[str]:
        code, library = folder / "shim.c", folder / "shim.so"
        code.write_text(source)
        flags = ["-shared", "-fPIC", "-w", f"-DALSO_RECORDS={int(also_records)}"]
        subprocess.run(["cc", *flags, "-o", str(library), str(code), "-ldl"], check=True)
        return ["env", f"LD_PRELOAD={library}"]

    return prefix


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


_NAMES = {
    "spaces": "a b",
    "quotes": "a'b\"c",
    "a newline": "a\nb",
    "non-ASCII": "größe-数据",
    "a leading dash": "-a",
    "a percent sign": "100%20",
    "a hash": "a#b",
    "a question mark": "a?b=c",
    "braces": "{SCHEMA_VERSION}{a}",
    "a colon": "a:b",
    "a dollar and backticks": "$(exit)`exit`",
    "an escape": "a\x1b[31mb",
    "200 characters": "x" * 200,
}
PLACES: Mapping[str, Place] = {
    **{f"folder: {label}": Place(below=name) for label, name in _NAMES.items()},
    **{
        f"run_dir: {label}": Place(arguments=["--set", f"run_dir='{name}'"])
        for label, name in _NAMES.items()
        if label not in {"quotes", "a newline", "an escape"}
    },
    "config: odd": Place(config="./-a b?#%20 数.yaml"),
    "folder: no UTF-8": Place(below="a\udcffb", answer="must be UTF-8"),
    "read-only checkout, run_dir elsewhere": Place(
        tool="setpriv",
        prefix=_as_user(_NOBODY, owns=False),
        arguments=["--set", "run_dir={folder}/out/run"],
    ),
    "read-only checkout": Place(
        tool="setpriv", prefix=_as_user(_NOBODY, owns=False), answer="Permission denied"
    ),
    "no home variable": Place(tool="setpriv", prefix=_as_user(_NOBODY), environment={"HOME": None}),
    "a home that is not there": Place(
        tool="setpriv", prefix=_as_user(_NOBODY), environment={"HOME": "/nonexistent"}
    ),
    "a user without a name": Place(
        tool="setpriv", prefix=_as_user(_STRANGER), environment={"HOME": None}
    ),
    "TMPDIR elsewhere, /tmp read-only": Place(
        tool="unshare",
        prefix=_mounted(
            "mount --bind /tmp /tmp",
            "mount -o remount,bind,ro /tmp",
            "mount --bind {folder} {folder}",
            "mount -o remount,bind,rw {folder}",
        ),
        environment={"TMPDIR": "{folder}"},
    ),
    "no temporary folder at all": Place(
        tool="unshare",
        prefix=_mounted(
            "mount -t tmpfs -o ro none /var/tmp",
            "mount --bind /tmp /tmp",
            "mount --bind {folder} {folder}",
            "mount -o remount,bind,ro /tmp",
        ),
    ),
    "TMPDIR of 100 characters": Place(
        prefix=lambda folder: ["env", f"TMPDIR={_made(folder / ('x' * 100))}"]
    ),
    "no flock": Place(
        tool="cc", prefix=_shim(_NO_LOCKS, also_records=False), answer="without locks"
    ),
    "no locks of records": Place(
        tool="cc", prefix=_shim(_FLOCK_ALONE, also_records=True), answer="database is locked"
    ),
    "64 MB of /dev/shm": Place(
        tool="unshare", prefix=_mounted("mount -t tmpfs -o size=64m none /dev/shm")
    ),
    "umask 000": Place(prefix=lambda _: ["sh", "-c", 'umask 000; exec "$@"', "sh"]),
    "umask 077": Place(prefix=lambda _: ["sh", "-c", 'umask 077; exec "$@"', "sh"]),
    "umask 777": Place(prefix=lambda _: ["sh", "-c", 'umask 777; exec "$@"', "sh"], answer="umask"),
    "a limit of memory": Place(tool="prlimit", prefix=lambda _: ["prlimit", f"--data={3 * 2**30}"]),
}


def fill(place: Place, folder: Path) -> Path:
    """Write workload and configuration; the folder to run in."""
    below = folder / place.below
    below.mkdir(exist_ok=True)
    (below / "work.py").write_text(WORKLOAD)
    (below / place.config).write_text(_CONFIG)
    return below


def command_line(place: Place, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The words and the environment of the search."""
    words = [
        *place.prefix(folder),
        sys.executable,
        "-c",
        _COMMAND,
        "run",
        place.config,
        *place.arguments,
    ]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
    }
    variables |= {"PYTHONDONTWRITEBYTECODE": "1", "AUTOTUNE_TEST_LONGEST_DEADLINE_S": "60"}
    for name, value in place.environment.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value.replace("{folder}", str(folder))
    return [word.replace("{folder}", str(folder)) for word in words], variables


def lacks(place: Place) -> str:
    """What is missing here to try a place; "" where nothing is."""
    if place.needs_root and os.geteuid() != 0:
        return "needs root"
    return (
        f"needs {place.tool}" if place.tool is not None and shutil.which(place.tool) is None else ""
    )
