"""Measure how much faster steps are without each mode that slows them down, in the running loop.

Comes in: a trainer whose window is over, and batches. Goes out: the modes observed, and a
`SwitchGain` for each one that is on and that can be switched off from outside: anomaly detection,
deterministic algorithms, trace functions, subnormal values. Steps with and without it are made in
turn; everything is put back afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import ceil
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autotune.messages.trials import steps_too_long_to_switch, switch_failed
from autotune.models.statistics import ratio_interval
from autotune.note import Note
from autotune.records.measurement import SwitchGain, SwitchName
from autotune.records.watched_run import Modes
from autotune.worker.batch import Reused
from autotune.worker.failures import cause_of
from autotune.worker.modes import (
    is_deterministic,
    is_traced,
    monitored_events,
    observe_modes,
)
from autotune.worker.side_alone import train_on
from autotune.worker.step import StepTrainer, torch_threads

# Constants without a source are our own convention.
_OBSERVED_S = 0.3
"""Seconds of steps that are observed."""
_OBSERVED_STEPS = (3, 200)
"""Optimizer steps that are observed: at least, and at most."""
_ROUNDS = 8
"""Pairs of stretches with and without a mode: Student's t is then 2.4 standard errors."""
_MOST_ROUNDS = 24
"""Pairs on a machine whose other programs disturb them."""
_PRECISION = 0.1
"""Half of the 95 % interval over the ratio at which eight pairs are enough."""
_FEWEST_ROUNDS = 3
"""Pairs of long steps."""
_LONGEST_S = 6.0
"""Seconds of a comparison from which it takes fewer pairs, and with these is left out."""
_SUBNORMAL_SHARE = 1e-4
"""Share of subnormal values from which it is compared. A value takes 150 cycles instead of part of
one, so a thousandth may double a step. Source: Intel 64 and IA-32 Architectures Optimization
Reference Manual, "Floating-point exceptions": an assist takes 150 cycles or more."""
_SAMPLED_VALUES = 4096
"""Values of a tensor that are looked at, evenly spaced."""


@dataclass(frozen=True, slots=True)
class SwitchReport:
    """Modes of the process, and gains of switching them off."""

    modes: Modes
    gains: tuple[SwitchGain, ...]
    notes: tuple[Note, ...]
    """Notes on comparisons that failed."""


@dataclass(frozen=True, slots=True)
class _Switch:
    """A mode that is on, and the way to switch it off for a while."""

    name: SwitchName
    off: Callable[[], AbstractContextManager[object]]
    """Return a context in which the mode is off."""
    share: float | None = None
    """Share of subnormal values."""
    is_at_one_thread: bool = False
    """Both sides are to compute with one thread."""


def measure_switches(
    trainer: StepTrainer,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    *,
    seconds: float,
    ends_at: float,
) -> SwitchReport:
    """Observe some steps, and compare steps with and without each mode that is on.

    Args:
        trainer: The trainer, in any state; its weights change.
        optimizer: Its optimizer.
        batches: Batches to train on, on the device; None in place of each for a script that makes
            its own.
        seconds: Seconds of a comparison, if steps are short.
        ends_at: Time of perf_counter at which the deadline is near; none is started after it.
    """
    supply = Reused(batches)
    per_step = trainer.config.grad_accum_steps
    if trainer.accumulated:  # a deadline or an extra measurement may have cut a step
        train_on(trainer, islice(supply, max(0, per_step - trainer.accumulated)))
    seen = _observe(trainer, supply)
    switches = list(_switches(trainer, optimizer, supply, seen))
    gains = []
    notes = []
    for switch in switches:
        if perf_counter() > ends_at:
            break
        try:
            gain = _compare(trainer, supply, switch, seen.step_s, seconds)
        except Exception as error:  # noqa: BLE001 - user code may raise anything with a mode off
            notes.append(switch_failed(mode=switch.name, cause=cause_of(error)))
            continue
        if gain is None:
            notes.append(steps_too_long_to_switch(mode=switch.name, step_s=seen.step_s))
        else:
            gains.append(gain)
    return SwitchReport(modes=seen.modes, gains=tuple(gains), notes=tuple(notes))


# Observing some steps


@dataclass(slots=True)
class _Seen:
    """Observations of some optimizer steps."""

    modes: Modes = field(default_factory=Modes)
    steps: int = 0
    step_s: float = 0.0
    """Mean seconds of a step."""
    anomaly_calls: int = 0
    """Calls that switched anomaly detection on within these steps."""


def _observe(trainer: StepTrainer, supply: Reused) -> _Seen:
    """Train some steps, and return the calls and modes seen in them."""
    seen = _Seen()
    least, most = _OBSERVED_STEPS
    with _counted_calls(seen):
        spent_s = 0.0
        while seen.steps < most and (seen.steps < least or spent_s < _OBSERVED_S):
            if seen.steps and spent_s > _LONGEST_S:
                break
            step_s, _ = train_on(trainer, islice(supply, trainer.config.grad_accum_steps))
            spent_s += step_s
            seen.steps += 1
        seen.step_s = spent_s / seen.steps
    modes = observe_modes(trainer.device.kind, has_group=trainer.config.process_count > 1)
    is_anomaly = modes.is_anomaly_detected or seen.anomaly_calls > 0
    seen.modes = modes.model_copy(update={"is_anomaly_detected": is_anomaly})
    return seen


@contextmanager
def _counted_calls(seen: _Seen) -> Iterator[None]:
    """Count calls that switch anomaly detection on."""
    set_anomaly = torch.set_anomaly_enabled

    def anomaly(mode: bool, check_nan: bool = True) -> None:
        seen.anomaly_calls += mode
        set_anomaly(mode, check_nan)

    with _anomaly_set_by(anomaly):
        yield


@contextmanager
def _anomaly_set_by(function: Callable[..., None]) -> Iterator[None]:
    """Let a function switch anomaly detection on and off within this context, instead of torch's."""
    plain = torch.set_anomaly_enabled
    torch.set_anomaly_enabled = function
    try:
        yield
    finally:
        torch.set_anomaly_enabled = plain


# The switches


def _switches(
    trainer: StepTrainer, optimizer: torch.optim.Optimizer, supply: Reused, seen: _Seen
) -> Iterator[_Switch]:
    """Yield the modes that are on, with the ways to switch them off."""
    kind = trainer.device.kind
    if seen.modes.is_anomaly_detected:
        yield _Switch("anomaly", _without_anomaly_detection)
    if is_traced() and not seen.modes.is_profiled:  # torch's profiler traces Python for its stacks
        yield _Switch("tracer", _without_tracing)
    if is_deterministic(kind):
        yield _Switch("deterministic", _nondeterministic)
    if kind == "cpu":
        share = _subnormal_share(trainer, optimizer, supply)
        if share >= _SUBNORMAL_SHARE and _can_flush():
            has_threads = torch.get_num_threads() > 1
            flushed = partial(_flushed, trainer)
            yield _Switch("denormals", flushed, share=share, is_at_one_thread=has_threads)


@contextmanager
def _without_anomaly_detection() -> Iterator[None]:
    """Switch anomaly detection off; the script's own calls that switch it on have no effect."""
    set_anomaly = torch.set_anomaly_enabled
    was_on = torch.is_anomaly_enabled()
    checked_nan = torch.is_anomaly_check_nan_enabled()

    def stay_off(mode: bool, check_nan: bool = True) -> None:  # noqa: ARG001 - as torch's own
        set_anomaly(False, check_nan)

    with _anomaly_set_by(stay_off):
        set_anomaly(False)
        try:
            yield
        finally:
            set_anomaly(was_on, checked_nan)


@contextmanager
def _nondeterministic() -> Iterator[None]:
    """Allow algorithms that are not deterministic, cuDNN's too."""
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn: Any = torch.backends.cudnn
    was_cudnn = cudnn.deterministic
    torch.use_deterministic_algorithms(False)
    cudnn.deterministic = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warns)
        cudnn.deterministic = was_cudnn


@contextmanager
def _without_tracing() -> Iterator[None]:
    """Suspend trace and profile functions of this thread.

    A profiler in C such as cProfile's is no function that sys.setprofile takes: it has methods to
    disable and enable it. From Python 3.12 on some use sys.monitoring instead.
    """
    monitoring: Any = getattr(sys, "monitoring", None)
    profile: Any = sys.getprofile()
    trace: Any = sys.gettrace()
    events = monitored_events()
    is_in_c = profile is not None and not callable(profile)
    if is_in_c:
        profile.disable()
    else:
        sys.setprofile(None)
    sys.settrace(None)
    for tool, _ in events:
        monitoring.set_events(tool, 0)
    try:
        yield
    finally:
        for tool, own in events:
            monitoring.set_events(tool, own)
        sys.settrace(trace)
        if is_in_c:
            profile.enable()
        else:
            sys.setprofile(profile)


@contextmanager
def _flushed(trainer: StepTrainer) -> Iterator[None]:
    """Flush subnormal values to zero in the thread that trains, from its next batch on."""
    trainer.in_loop(partial(torch.set_flush_denormal, True))
    try:
        yield
    finally:
        trainer.in_loop(partial(torch.set_flush_denormal, False))


def _can_flush() -> bool:
    """Return whether this CPU can flush subnormal values, and does not do so yet."""
    smallest = torch.finfo(torch.float32).smallest_normal
    if float((torch.tensor([smallest]) * 0.5).item()) == 0.0:
        return False
    is_supported = torch.set_flush_denormal(True)
    torch.set_flush_denormal(False)
    return is_supported


# Subnormal values


class _SubnormalMode(TorchDispatchMode):
    """Count subnormal values in what operators return, some of each tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch
        self.subnormal = 0.0
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(tree_leaves(out))
        return out

    def count(self, values: Sequence[object]) -> None:
        """Count the subnormal values of tensors, and all values."""
        for value in values:
            if not isinstance(value, Tensor) or value.numel() == 0:
                continue
            with suppress(Exception):  # a tensor of a class of its own, without storage, ...
                share = _share_in(value)
                if share is not None:
                    self.subnormal += share * value.numel()
                    self.values += value.numel()


def _share_in(tensor: Tensor) -> float | None:
    """Return the share of subnormal values in a tensor; None for other types than float32 and float64.

    Narrower types are computed in float32, in which their subnormal values are normal; float16's
    smallest is 6e-8.
    """
    if tensor.dtype not in {torch.float32, torch.float64} or tensor.layout != torch.strided:
        return None
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    some = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)].abs()
    smallest = torch.finfo(tensor.dtype).smallest_normal
    is_subnormal = (some > 0) & (some < smallest)
    return float(is_subnormal.sum()) / some.numel()


def _subnormal_share(
    trainer: StepTrainer, optimizer: torch.optim.Optimizer, supply: Reused
) -> float:
    """Return the share of subnormal values that a step computes or keeps, the larger one."""
    kept = _SubnormalMode()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own_state = optimizer.state.get(parameter, {})
            kept.count([parameter, parameter.grad, *own_state.values()])
    with _SubnormalMode() as computed:
        for batch in islice(supply, trainer.config.grad_accum_steps):
            trainer.train(batch)
    shares = [mode.subnormal / mode.values for mode in (kept, computed) if mode.values]
    return max(shares, default=0.0)


# Comparing


def _compare(
    trainer: StepTrainer, supply: Reused, switch: _Switch, step_s: float, seconds: float
) -> SwitchGain | None:
    """Train stretches with and without a mode in turn, and return the ratio of their times.

    A step before each stretch is not timed: a framework may train on each batch one call late.

    Args:
        trainer: The trainer, between two optimizer steps.
        supply: Its batches.
        switch: The mode.
        step_s: Seconds of a step with the mode.
        seconds: Seconds of all stretches, if steps are short.

    Returns:
        None if steps are too long.
    """
    rounds = _ROUNDS
    steps = max(1, ceil(seconds / (2 * rounds) / max(step_s, 1e-6)))
    if 2 * rounds * (steps + 1) * step_s > _LONGEST_S:
        rounds = _FEWEST_ROUNDS
    if 2 * rounds * (steps + 1) * step_s > 2 * _LONGEST_S:
        return None

    def stretch_s(is_off: bool) -> float:
        with switch.off() if is_off else nullcontext():
            train_on(trainer, iter(supply.take(1, trainer.config.grad_accum_steps)))
            batches = islice(supply, steps * trainer.config.grad_accum_steps)
            return train_on(trainer, batches)[0]

    ratios = list[float]()
    begun = perf_counter()
    with torch_threads(1 if switch.is_at_one_thread else None):
        while len(ratios) < rounds:
            # Alternate which side comes first, so that a drift affects both.
            begins_off = len(ratios) % 2 == 1
            times_s = {is_off: stretch_s(is_off) for is_off in (begins_off, not begins_off)}
            ratios.append(times_s[False] / times_s[True])
            is_late = perf_counter() - begun > _LONGEST_S / 2
            has_all = len(ratios) == rounds and rounds < _MOST_ROUNDS
            if has_all and not is_late and ratio_interval(ratios).relative_half_width > _PRECISION:
                rounds += 1
    return SwitchGain(
        name=switch.name,
        ratio=ratio_interval(ratios),
        rounds=len(ratios),
        steps=steps,
        share=switch.share,
        is_at_one_thread=switch.is_at_one_thread,
    )
