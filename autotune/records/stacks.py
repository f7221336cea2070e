"""Record sampled stacks of a training process and its loader workers, summed by the user's own lines.

Comes in: samples of a profiler, from `worker/script/stacks`. Goes out: `Stacks`. Data only.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autotune.frozen import FrozenModel

StackPart = Literal[
    "item", "collate", "sampler", "waiting", "forward", "backward", "optimizer", "other"
]
"""Part of training that a sample belongs to, by torch's own frames on its stack: inside the
dataset, the collate function or the sampler; waiting for the loader; inside the outermost module,
the backward pass, the optimizer; else the script's own code."""


class StackLine(FrozenModel):
    """A line of the user's code, and its share of a process's samples."""

    part: StackPart
    """Part of training that the line is in."""
    place: str
    """File and line, such as "train.py:41"; of a library if no frame is the user's."""
    function: str
    """Function that the line is in."""
    code: str = ""
    """The line itself, stripped."""
    calls: str = ""
    """The library's function below the line that takes the most of its time: "zlib.decompress",
    "PIL.Image.Image.resize"; empty if that is the line itself."""
    calls_fraction: float | None = Field(default=None, ge=0, le=1)
    """Share of the samples inside that function; None if there is none, or if it was read from the
    line, because native code has no frame."""
    fraction: float = Field(ge=0, le=1)
    """Share of the samples of these processes."""


class Stacks(FrozenModel):
    """Samples of the training thread, and of the main threads of all loader workers."""

    seconds: float
    """Seconds of sampling."""
    samples: int
    """Samples of the training thread."""
    main: tuple[StackLine, ...] = ()
    """Lines of the training thread, largest share first."""
    main_parts: dict[StackPart, float] = Field(default_factory=dict)
    """Share of each part in the samples of the training thread."""
    worker_samples: int = 0
    """Samples of loader workers at work; those waiting for an index are left out."""
    workers: tuple[StackLine, ...] = ()
    """Lines of the loader workers, largest share first; shares of `worker_samples`."""
    worker_parts: dict[StackPart, float] = Field(default_factory=dict)
    """Share of each part, item or collate, in `worker_samples`."""
