"""The precision check inside a script: the same steps in float32 and in the candidate's precision, by its own step.

Takes a scene whose script runs in float32, and a PrecisionJob; hands on PrecisionFigures, as jobs/precision does for a
workload. Before each run the weights and the optimizers' states are put back, and learning rates held, whatever the
script's schedule does. A framework may train on each batch one call late: each run begins with a batch that is not
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from autotune.protocol.jobs import PrecisionJob
from autotune.records.precision_check import (
    GUARD_STEPS,
    LOADING_SHARE,
    MIN_STEPS,
    OTHER_SEED,
    PrecisionFigures,
    deviation_of,
)
from autotune.settings.applied.float32_precision import exact_matmuls, tf32_products
from autotune.worker.attach.loop.bench import switch
from autotune.worker.attach.loop.feeds import ScriptFeed
from autotune.worker.attach.loop.scene import Scene
from autotune.worker.jobs.gradients import gradient_cosine
from autotune.worker.measure.batch import copied
from autotune.worker.measure.side_alone import collect
from autotune.worker.setup.build import kept_weights, put_back, seed_all

__all__ = ["compare_to_float32"]


_Gradient = list[Tensor | None]


@dataclass(slots=True)
class _Run:
    """The figures of a run."""

    losses: list[float] = field(default_factory=list)
    gradient: _Gradient | None = None
    """The first step's, on the CPU."""


@dataclass(slots=True)
class _Start:
    """What every run begins from."""

    scene: Scene
    weights: list[dict[str, Tensor]]
    states: list[tuple[torch.optim.Optimizer, dict[str, Any], list[float]]]
    run: _Run = field(default_factory=_Run)

    @classmethod
    def of(cls, scene: Scene) -> _Start:
        """As the script stands now."""
        optimizers = scene.sightings.optimizers
        states = [
            (own, deepcopy(own.state_dict()), [group["lr"] for group in own.param_groups if "lr" in group])
            for own in optimizers
        ]
        return cls(scene, [kept_weights(module) for module in scene.sightings.outermost], states)

    def again(self) -> None:
        """Put all of it back."""
        for module, kept in zip(self.scene.sightings.outermost, self.weights, strict=True):
            put_back(module, kept)
        for optimizer, state, _ in self.states:
            optimizer.load_state_dict(deepcopy(state))
        self.run = _Run()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hold the learning rates, and keep the first gradient of a run."""
        for own, _, rates in self.states:
            for group, rate in zip(own.param_groups, rates, strict=False):
                group["lr"] = rate
        if optimizer is self.scene.trainer.optimizer and self.run.gradient is None:
            parts = [part.grad for group in optimizer.param_groups for part in group["params"]]
            self.run.gradient = [None if part is None else part.detach().to("cpu", copy=True) for part in parts]


def compare_to_float32(scene: Scene, job: PrecisionJob, ends_at: float) -> PrecisionFigures:
    """Train the same steps in float32, in float32 with other random draws, and as the candidate would.

    `ends_at`, a time of perf_counter, cuts the steps short.
    """
    feed, plain = scene.feed, job.config.model_copy(update={"amp_dtype": "float32"})
    assert isinstance(feed, ScriptFeed)  # noqa: S101 - scenes has seen to it
    feed.take_over()
    seconds = LOADING_SHARE * (ends_at - perf_counter())
    batches = [delivery.batch for delivery in collect(feed, count=GUARD_STEPS, seconds=seconds)]
    feed.stop()
    begin = _Start.of(scene)
    scene.before_steps(begin.before_step)
    seed = job.process.seed
    switch(plain, scene)
    with exact_matmuls():
        reference = _train(begin, batches, GUARD_STEPS, seed, _share(ends_at, 1 / 3))
        repeat = _train(begin, batches, MIN_STEPS, seed + OTHER_SEED, _share(ends_at, 1 / 3))
    switch(job.config, scene)
    with tf32_products() if job.config.amp_dtype == "tf32" else nullcontext():
        tried = _train(begin, batches, GUARD_STEPS, seed, ends_at)
    steps = min(len(reference.losses), len(tried.losses))
    return PrecisionFigures(
        steps=steps,
        micro_batch_size=job.config.micro_batch_size,
        reference_losses=tuple(reference.losses[:steps]),
        losses=tuple(tried.losses[:steps]),
        gradient_cosine=_cosine(reference, tried),
        repeat_cosine=_cosine(reference, repeat),
        repeat_deviation=deviation_of(reference.losses, repeat.losses) or 0.0,
    )


def _share(ends_at: float, share: float) -> float:
    now = perf_counter()
    return now + share * (ends_at - now)


def _train(begin: _Start, batches: Sequence[Any], steps: int, seed: int, stop_at: float) -> _Run:
    trainer = begin.scene.trainer
    for _ in range(trainer.config.grad_accum_steps):
        trainer.train(copied(batches[0]))
    begin.again()
    run = begin.run
    for number in range(steps):
        if number >= 2 and perf_counter() > stop_at:
            break
        seed_all(seed + number)
        loss = torch.zeros(())
        for _ in range(trainer.config.grad_accum_steps):
            loss = trainer.train(copied(batches[number % len(batches)]))
        run.losses.append(float(loss))
        if not isfinite(run.losses[-1]):
            break
    return run


def _cosine(reference: _Run, other: _Run) -> float | None:
    if reference.gradient is None or other.gradient is None:
        return None
    return gradient_cosine(reference.gradient, other.gradient)
