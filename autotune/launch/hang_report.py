"""Read the stack of a rank shortly before it was ended, as faulthandler has written it.

Source: Python/traceback.c of CPython (_Py_DumpTracebackThreads): threads come from the newest to the
oldest, the main thread last, and frames from the innermost to the outermost.
"""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BlockedIn = Literal["user_code", "unknown", "autotune", "user_collective", "collective"]
"""Position of a rank: user_code: in that or what it calls; user_collective: waiting for other ranks as
the user's code asked for; collective: in a wait that all ranks come to."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_OUR_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
_COLLECTIVES = "/torch/distributed/"
_WAITS_IN = (_COLLECTIVES, "/torch/nn/parallel/distributed.py")
_LIBRARIES = ("/site-packages/torch/", "/dist-packages/torch/", _OUR_PACKAGE)
# Torch/autograd/graph.py; DDP's all-reduce is awaited in it, without a frame.
_BACKWARD = "_engine_run_backward"
_DEVICE_WAITS_IN = (
    "/torch/cuda/",
    "/torch/accelerator/",
)  # by synchronize: for kernels, those of NCCL among them
_NOT_THE_USERS = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line that was being run."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line}, in {self.name}'

    def is_in(self, *parts: str) -> bool:
        """Return whether its file's path has one of these parts."""
        return any(part in self.file for part in parts)


def read_stack(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames, the innermost last; () if faulthandler wrote none."""
    parsed = [
        Frame(file=frame["file"], line=int(frame["line"]), name=frame["name"])
        for frame in _FRAME.finditer(_THREAD.split(text)[-1])
    ]
    return tuple(reversed(parsed))


def blocked_in(stack: tuple[Frame, ...]) -> BlockedIn:
    """Return where a rank was, by its innermost frame."""
    if not stack:
        return "unknown"
    innermost = stack[-1]
    waits_for_device = innermost.name == "synchronize" and innermost.is_in(*_DEVICE_WAITS_IN)
    if innermost.name == _BACKWARD or waits_for_device:
        return "collective"
    if innermost.is_in(*_WAITS_IN):
        callers = (frame for frame in reversed(stack) if not frame.is_in(_COLLECTIVES))
        is_librarys = next(callers, innermost).is_in(*_LIBRARIES)
        return "collective" if is_librarys else "user_collective"
    return "autotune" if innermost.file.startswith(_OUR_PACKAGE) else "user_code"


def users_part(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames of the user's own code; if there are none, those that are not ours, else all."""
    foreign = tuple(frame for frame in stack if not frame.file.startswith(_OUR_PACKAGE))
    not_own = (sysconfig.get_path("stdlib") + "/", "<frozen")
    own = tuple(
        frame
        for frame in foreign
        if not frame.file.startswith(not_own) and not frame.is_in(*_NOT_THE_USERS)
    )
    return own or foreign or stack
