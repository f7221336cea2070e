"""The stack of a rank shortly before it was ended, as faulthandler has written it.

Receives the text; hands on the main thread's frames, whether they wait for other ranks, and which are the user's.
Source: Python/traceback.c of CPython (_Py_DumpTracebackThreads): threads come from the newest to the oldest, the main
thread last, and frames from the innermost to the outermost.
"""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Frame", "Whereabouts", "read_stack", "users_part", "whereabouts"]

Whereabouts = Literal["elsewhere", "unknown", "ours", "calling", "waiting"]
"""Of the innermost frame: in user code or what it calls; not known; in autotune; in a wait for other ranks that the
user's code asked for; in a wait that all ranks come to."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_OUR_PACKAGE = str(Path(__file__).resolve().parents[2]) + "/"
_COLLECTIVES = "/torch/distributed/"
_WAITS_IN = (_COLLECTIVES, "/torch/nn/parallel/distributed.py")
_LIBRARIES = ("/site-packages/torch/", "/dist-packages/torch/", _OUR_PACKAGE)
_BACKWARD = "_engine_run_backward"  # torch/autograd/graph.py; DDP's all-reduce is awaited in it, without a frame
_DEVICE_WAITS_IN = ("/torch/cuda/", "/torch/accelerator/")  # by synchronize: for kernels, those of NCCL among them
_NOT_THE_USERS = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line that was being run."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line}, in {self.name}'


def read_stack(text: str) -> tuple[Frame, ...]:
    """The main thread's frames, the innermost last; () where faulthandler wrote none."""
    frames = _FRAME.finditer(_THREAD.split(text)[-1])
    parsed = [Frame(file=frame["file"], line=int(frame["line"]), name=frame["name"]) for frame in frames]
    return tuple(reversed(parsed))


def whereabouts(stack: tuple[Frame, ...]) -> Whereabouts:
    """What a rank was doing, by its innermost frame."""
    if not stack:
        return "unknown"
    innermost = stack[-1]
    if innermost.name == _BACKWARD:
        return "waiting"
    if any(place in innermost.file for place in _WAITS_IN):
        caller = next((frame.file for frame in reversed(stack) if _COLLECTIVES not in frame.file), innermost.file)
        return "waiting" if any(place in caller for place in _LIBRARIES) else "calling"
    if innermost.name == "synchronize" and any(place in innermost.file for place in _DEVICE_WAITS_IN):
        return "waiting"
    return "ours" if innermost.file.startswith(_OUR_PACKAGE) else "elsewhere"


def users_part(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames of the user's own code; where there are none, those that are not ours, else all."""
    foreign = tuple(frame for frame in stack if not frame.file.startswith(_OUR_PACKAGE))
    library = sysconfig.get_path("stdlib") + "/"
    own = tuple(frame for frame in foreign if not frame.file.startswith((library, "<frozen")))
    return tuple(frame for frame in own if not any(part in frame.file for part in _NOT_THE_USERS)) or foreign or stack
