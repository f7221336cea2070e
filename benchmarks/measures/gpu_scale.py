"""How large the parts of benchmarks/gpu.py are, what a part is given, and the workloads that they share by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from autotune.launch.launcher import Launcher
from autotune.launch.local import LocalLauncher
from benchmarks.cases.cpu import Case
from benchmarks.measures.gpu_watch import GpuWatch
from benchmarks.measures.part_guard import Figures, Keep
from benchmarks.yardsticks.plain_loop import PlainForks, run_plain

__all__ = [
    "LARGE",
    "PLAIN_STARTUP_S",
    "QUICK",
    "SMOKE",
    "TRIAL_S",
    "WORKLOADS",
    "Scale",
    "Task",
    "case_of",
    "fork_server",
    "one_server",
    "plain",
    "plain_alone",
]

WORKLOADS: Mapping[str, str] = {
    "gpt2": "benchmarks.cases.gpu:gpt2",
    "jpeg": "benchmarks.cases.gpu:jpeg_cnn",
    "launch_bound": "benchmarks.cases.gpu_checks:launch_bound",
    "resnet50": "benchmarks.cases.gpu:resnet50",
    "starved": "benchmarks.cases.gpu_checks:starved",
}
"""Where each workload is made, as the plain loop wants it."""
PLAIN_STARTUP_S = 6.0
"""Of a plain loop: the CUDA context, its workers and the first step, and once a part the import of torch. A guess: each
had taken 10 s on an H100, when it imported torch by itself."""
_PLAIN_WITHIN_S = 90.0  # a plain loop that hangs ends before its part does
TRIAL_S = 6.0  # of a trial with its start, as far as none was seen yet: a guess, on no GPU so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is."""

    is_small: bool
    time_share: float = 1.0
    """Of what parts need: with less they show that they run, and judge nothing."""
    device: str
    plain_s: float
    """Of a plain loop that shows a rate."""
    long_plain_s: float
    """Of one that a trial is held against."""
    skip_s: float
    start_trials: int
    memory_limit: str
    limited_batches: tuple[int, ...]
    absurd_batches: tuple[int, ...]
    fitted_batches: tuple[int, ...]
    """Of the memory line."""
    line_limit: str


LARGE = Scale(
    is_small=False,
    device="cuda:0",
    plain_s=5.0,
    long_plain_s=8.0,
    skip_s=1.5,
    start_trials=3,
    memory_limit="12GiB",
    limited_batches=(4, 8, 16, 64),
    absurd_batches=(
        8,
        16,
        24,
        1024,
    ),  # logits of 1,024 sequences: 98 GiB in float32, and as much of gradients
    fitted_batches=(4, 8, 16),
    line_limit="40GiB",
)
QUICK = replace(LARGE, time_share=0.3, plain_s=3.0, long_plain_s=5.0, skip_s=1.0, start_trials=1)
SMOKE = Scale(
    is_small=True,
    time_share=0.5,
    device="cpu",
    plain_s=1.0,
    long_plain_s=1.0,
    skip_s=0.3,
    start_trials=2,
    memory_limit="1GiB",
    limited_batches=(2, 4, 8),
    absurd_batches=(2, 4, 8),
    fitted_batches=(64, 128, 256),
    line_limit="1GiB",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a part is given."""

    scale: Scale
    seconds: float
    """What it may take; it is ended somewhat later."""
    folder: Path
    """Where recordings go, beside the JSON."""
    keep: Keep
    """Takes figures so far, which stay should the part not come to its end."""
    regimes: Sequence[str] = ()
    """Of the part `launch`, those to run; none: all."""
    begun: float = field(default_factory=monotonic)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.begun + self.seconds - monotonic()


def case_of(name: str, scale: Scale, **arguments: Any) -> Case:
    """A workload by its name.

    Raises:
        ImportError: the workload needs Pillow, which is not installed.
    """
    module, _, function = WORKLOADS[name].partition(":")
    case: Case = getattr(importlib.import_module(module), function)(
        is_small=scale.is_small, **arguments
    )
    return case


def fork_server(folder: Path) -> LocalLauncher:
    """A launcher that the caller closes; its server writes its log into the folder."""
    return LocalLauncher(folder / "server.log")


@contextmanager
def one_server() -> Iterator[Launcher]:
    """One fork server for all the searches and trials of a part, so that torch is imported once.

    One for the whole call would spare that import alone, since each trial makes its own CUDA context; and it would not
    bear the part's mark, by which the guard ends what a part has started.
    """
    with TemporaryDirectory(prefix="autotune-benchmark-") as folder:
        launcher = fork_server(Path(folder))
        try:
            yield launcher
        finally:
            launcher.close()


def plain_alone(
    name: str,
    scale: Scale,
    settings: Mapping[str, Any],
    *,
    seconds: float | None = None,
    **arguments: Any,
) -> Figures:
    """The plain loop on a workload, with nobody looking on: to hold a trial against, which nobody watches either."""
    return run_plain(
        WORKLOADS[name],
        settings,
        seconds=scale.plain_s if seconds is None else seconds,
        skip_s=scale.skip_s,
        device=scale.device,
        arguments={"is_small": scale.is_small, **arguments},
        deadline_s=_PLAIN_WITHIN_S,
        forks=_plain_forks(),
    )


@cache
def _plain_forks() -> PlainForks:
    """The part's own, so that it bears the part's mark; it ends with the part."""
    return PlainForks()


def plain(name: str, scale: Scale, settings: Mapping[str, Any], **arguments: Any) -> Figures:
    """The plain loop on a workload, and what NVML said of the device meanwhile."""
    with GpuWatch() as watch:
        figures = plain_alone(name, scale, settings, **arguments)
    start_s, end_s = figures["started_at"], figures["ended_at"]
    return {
        **figures,
        "settings": dict(settings),
        "busy_fraction": watch.busy_fraction(start_s, end_s),
        "power_w": watch.power_w(start_s, end_s),
        "nvml_peak_bytes": watch.peak_bytes(start_s, end_s),
        "nvml": watch.why_blind or "seen",
    }
