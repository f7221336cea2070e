"""Simulated machines to search on, whose truth has no error: two laws of a training loop in which settings interact.

Each is a Ground at a spread between runs. The laws are made up so that no setting can be chosen by itself; nothing in
the product was fitted to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from autotune import TrainingConfig
from autotune.policy import WindowRules
from autotune.records.trial import TrialResult
from benchmarks.cases.surfaces import every_point
from benchmarks.replay.simulated import Noise, Sides, SimulatedMachine
from benchmarks.replay.truth import Truth, known_truth

__all__ = ["LANDSCAPES", "SPREADS", "Landscape"]

SPREADS = (0.015, 0.03, 0.05)
"""Between two runs of the same settings: from an idle machine to a shared one."""
_WINDOW = WindowRules(max_s=2.0)
"""Of whole trials for others than the product: as on the recorded surfaces."""
_CORES = 4
_ITEMS_PER_CORE = 300.0  # a second
_SHARPNESS = 8.0  # of the softer minimum: 8 % below two limits that are equal
_MIB = 2**20


@dataclass(frozen=True)
class Landscape:
    """A law with its grid, on a machine whose runs stray."""

    name: str
    alone: Callable[[TrainingConfig], Sides]
    """What loader and device reach alone."""
    together: Callable[[TrainingConfig], float]
    """Samples/s of both together."""
    baseline: TrainingConfig
    domains: Mapping[str, Sequence[Any]]
    limit_bytes: int
    spread: float
    is_held_out: bool = True
    """No constant is chosen on it."""

    @cached_property
    def configs(self) -> list[TrainingConfig]:
        """Every point."""
        return every_point(self.baseline.model_dump(exclude_defaults=True), self.domains)

    @cached_property
    def truth(self) -> Truth:
        """Of every point within the memory limit."""
        fitting = [
            config for config in self.configs if self.alone(config).peak_bytes <= self.limit_bytes
        ]
        return known_truth({config: self.together(config) for config in fitting})

    def visits_of(self, config: TrainingConfig) -> int:  # noqa: ARG002 - a Ground's
        """None: its rate is known."""
        return 0

    def launcher(self, seed: int) -> SimulatedMachine:
        """The machine, for the product's search."""
        noise = Noise(between_runs=self.spread)
        return SimulatedMachine(
            self.together, noise, seed, sides=self.alone, limit_bytes=self.limit_bytes
        )

    def trials_of(self, seed: int) -> Callable[[TrainingConfig], TrialResult]:
        """The same machine, for anybody else."""
        return partial(self.launcher(seed).run_whole, window=_WINDOW)


def _softer_minimum(*limits: float) -> float:
    return float(sum(limit**-_SHARPNESS for limit in limits) ** (-1 / _SHARPNESS))


def _in_turns_or_at_once(config: TrainingConfig, sides: Sides, *limits: float) -> float:
    """Loader and device in turns where there are no workers, else at the same time, within further limits."""
    if config.num_workers == 0:
        return 1 / (1 / sides.loader + 1 / sides.device)
    return _softer_minimum(sides.loader, sides.device, *limits)


def _sides_on_cores(config: TrainingConfig) -> Sides:
    """An item takes a core 1/300 s; bfloat16 pays from a batch of 64 on, few batches in advance hold large ones up."""
    batch, workers = config.micro_batch_size, config.num_workers
    loader = _ITEMS_PER_CORE * max(1, min(workers, _CORES))
    if workers and (config.prefetch_factor or 2) == 2:
        loader *= 0.9 if batch >= 64 else 0.97
    faster = (1.5 if batch >= 64 else 0.85) if config.amp_dtype == "bfloat16" else 1.0
    device = _threads(config) ** 0.6 * faster * batch / (0.01 + 0.0028 * batch)
    return Sides(loader=loader, device=device, peak_bytes=(200 + batch + 60 * workers) * _MIB)


def _rate_on_cores(config: TrainingConfig) -> float:
    """Workers and threads share the cores: more threads make a batch faster, and take more of a core for a sample."""
    sides = _sides_on_cores(config)
    core_s = 1 / _ITEMS_PER_CORE + _threads(config) / sides.device
    return _in_turns_or_at_once(config, sides, _CORES / core_s)


def _threads(config: TrainingConfig) -> int:
    return config.intra_op_threads or _CORES


def _sides_at_the_cliff(config: TrainingConfig) -> Sides:
    """A batch that outgrows a cache is a third slower, the sooner the more threads work; the largest pass the limit.

    In bfloat16 both come at twice the batch. Accumulation spares the optimizer's half of a small step.
    """
    batch, is_half = config.micro_batch_size, config.amp_dtype == "bfloat16"
    threads = _threads(config)
    outgrown = batch * threads / _CORES > (128 if is_half else 64)
    step_s = (
        0.01
        + 0.02 / config.grad_accum_steps
        + batch / (900 if is_half else 1000) / (threads / _CORES) ** 0.4
    )
    device = batch / step_s * (0.66 if outgrown else 1.0)
    loader = 700.0 * (1, 1, 1.7)[config.num_workers]
    megabytes = 64 + batch * (2 if is_half else 4) + 50 * config.num_workers
    return Sides(loader=loader, device=device, peak_bytes=megabytes * _MIB)


def _rate_at_the_cliff(config: TrainingConfig) -> float:
    return _in_turns_or_at_once(config, _sides_at_the_cliff(config))


def _at(spread: float) -> tuple[Landscape, ...]:
    told = f"{100 * spread:g} %"
    workers = {
        "prefetch_factor": (2, 8),
        "persistent_workers": (True,),
        "amp_dtype": ("float32", "bfloat16"),
    }
    return (
        Landscape(
            name=f"shared_cores, {told}",
            alone=_sides_on_cores,
            together=_rate_on_cores,
            baseline=TrainingConfig(micro_batch_size=32),
            domains={
                "micro_batch_size": (16, 32, 64, 128),
                "num_workers": (0, 1, 2, 4, 8),
                **workers,
                "intra_op_threads": (None, 1),
            },
            limit_bytes=2048 * _MIB,
            spread=spread,
        ),
        Landscape(
            name=f"cliff_and_limit, {told}",
            alone=_sides_at_the_cliff,
            together=_rate_at_the_cliff,
            baseline=TrainingConfig(micro_batch_size=16),
            domains={
                "micro_batch_size": (8, 16, 32, 64, 128, 256),
                "grad_accum_steps": (1, 2),
                "num_workers": (0, 1, 2),
                **workers,
                "prefetch_factor": (2,),
                "intra_op_threads": (None, 1),
            },
            limit_bytes=600 * _MIB,
            spread=spread,
        ),
    )


LANDSCAPES: Mapping[str, Landscape] = {one.name: one for spread in SPREADS for one in _at(spread)}
"""By name."""
