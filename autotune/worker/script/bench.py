"""Measure either side of a script alone, and compare its precision with float32.

In: a Scene, a script's training loop that the measurement drives. Out: a Bench for `jobs/curves`
and PrecisionFigures, as from a workload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from autotune.apply.cores import limited
from autotune.apply.precision import exact_matmuls, tf32_products
from autotune.config.training_config import TrainingConfig
from autotune.protocol.messages import PrecisionJob, RankReport
from autotune.records.trial import (
    GUARD_STEPS,
    LOADING_SHARE,
    MIN_STEPS,
    OTHER_SEED,
    PrecisionFigures,
    deviation_of,
)
from autotune.worker.batch import batch_fingerprint, copied, unwrapped
from autotune.worker.build import is_stream, kept_weights, put_back, seed_all
from autotune.worker.device import Device
from autotune.worker.feed import Feed
from autotune.worker.jobs.precision import gradient_cosine, plain_config
from autotune.worker.script.feeds import ScriptFeed, ScriptTrainer, StepFeed
from autotune.worker.script.overrides import SWITCHES, set_layout
from autotune.worker.script.sightings import Sightings
from autotune.worker.side_alone import collect

# The scene of a job, and the end of a script


@dataclass(slots=True, kw_only=True)
class Scene:
    """A training loop that was found in a script, and that the measurement now drives."""

    sightings: Sightings
    device: Device
    feed: ScriptFeed | StepFeed
    trainer: ScriptTrainer

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The training loader; None if the script has none."""
        return self.feed.loader if isinstance(self.feed, ScriptFeed) else None


Doer: TypeAlias = Callable[[Scene], RankReport]
"""Function that does a job in a scene."""


def no_loop(seen: Sightings) -> str:
    """Return a sentence that says why a script, which has ended, was not measured."""
    what = "made a DataLoader" if seen.made else "stepped an optimizer"
    return (
        f"a script must train to be measured, but it {what} and ended after {seen.most_steps} "
        f"optimizer steps; give it "
        "more epochs or more steps, and see that it trains when it is started so"
    )


def is_clean_exit(error: BaseException) -> bool:
    """Return whether an exception ends a script with success."""
    return isinstance(error, SystemExit) and error.code in {None, 0}


def ranks() -> int:
    """Return the number of ranks in the process group; 1 without a group."""
    group: Any = torch.distributed
    return int(group.get_world_size()) if group.is_available() and group.is_initialized() else 1


def rank() -> int:
    """Return this process's rank in the process group; 0 without a group."""
    group: Any = torch.distributed
    return int(group.get_rank()) if group.is_available() and group.is_initialized() else 0


def train_once(scene: Scene, prints: list[int] | None = None) -> int:
    """Let the script train on a batch, and return the optimizer steps that it made.

    Args:
        scene: The training loop.
        prints: Gets the batch's fingerprint.

    Raises:
        FeedEnded: The script has ended.
        LoopMoved: It now trains on another loader.
    """
    seen = scene.sightings
    delivery = scene.feed.take()
    if prints is not None:
        prints.append(batch_fingerprint(delivery.batch))
    seen.batch(delivery.batch, delivery.samples // ranks())
    before = seen.steps.copy()
    scene.trainer.train(delivery.batch)
    return max((seen.steps - before).values(), default=0)


# The bench of a script


@dataclass(slots=True)
class ScriptBench:
    """Give feeds and trainers of a script in any configuration; implements jobs.curves.Bench.

    Loaders are copies of the script's own, with changed arguments. The device's points run the
    script's own step, whose precision and layout are switched from outside.
    """

    scene: Scene
    _initial: list[Mapping[str, Tensor]] = field(default_factory=list)
    """Weights and buffers of each outermost module before the first point, on the CPU."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the weights that are kept aside."""
        return sum(tensor.nbytes for kept in self._initial for tensor in kept.values())

    def feed(self, config: TrainingConfig) -> Feed:
        """Return a feed of a configuration's loader, not started."""
        loader = self.scene.loader
        assert loader is not None  # noqa: S101 - the session makes a bench only if there is one
        return Feed(loader_like(loader, config))

    def prepare(self, batch: Any) -> None:  # noqa: ARG002 - as Bench declares it
        """Keep the weights of the script's model, which exists already."""
        self._initial = [kept_weights(module) for module in self.scene.sightings.outermost]

    def trainer(self, config: TrainingConfig) -> ScriptTrainer:
        """Return the script's trainer, switched to a configuration's precision and layout."""
        switch(config, self.scene)
        trainer = self.scene.trainer
        trainer.config = config
        return trainer

    def after_point(self, *, is_failed: bool) -> None:
        """Put the weights back if the point failed; the script clears its gradients itself."""
        if is_failed:
            for module, kept in zip(self.scene.sightings.outermost, self._initial, strict=False):
                put_back(module, kept)


def switch(config: TrainingConfig, scene: Scene) -> None:
    """Switch the script's modules to a configuration's precision and layout from now on.

    A script with an autocast of its own keeps its precision.
    """
    SWITCHES.device_type = scene.device.torch_device.type
    SWITCHES.dtype = None
    if config.is_half and scene.sightings.autocast is None:
        SWITCHES.dtype = getattr(torch, config.amp_dtype)
    if SWITCHES.channels_last != config.channels_last:
        SWITCHES.channels_last = config.channels_last
        for module in SWITCHES.modules:
            set_layout(module, channels_last=config.channels_last)


def _is_plain(batches: object) -> bool:
    """Return whether a batch sampler is torch's or torchdata's, to be rebuilt with another size."""
    if type(batches) is BatchSampler:
        return True
    return isinstance(batches, BatchSampler) and type(batches).__module__.startswith("torchdata.")


def loader_like(loader: DataLoader[Any], config: TrainingConfig) -> DataLoader[Any]:
    """Return a copy of the script's loader with a configuration's settings.

    Args:
        loader: The script's loader; its dataset, sampler and collate function are reused.
        config: The settings, batch size included. A batch sampler of the user's keeps its size.
    """
    own = unwrapped(loader)
    arguments: dict[str, Any] = {**config.dataloader_kwargs(), "collate_fn": own.collate_fn}
    arguments["worker_init_fn"] = limited(loader.worker_init_fn, config.worker_threads)
    if config.num_workers and config.multiprocessing_context is None:
        arguments["multiprocessing_context"] = loader.multiprocessing_context
    if is_stream(loader.dataset):
        arguments["drop_last"] = loader.drop_last
        if loader.batch_size is None:
            arguments["batch_size"] = None
    elif _is_plain(own.batch_sampler):
        arguments |= {
            "sampler": own.batch_sampler.sampler,
            "drop_last": own.batch_sampler.drop_last,
        }
    elif own.batch_sampler is not None:
        arguments.pop("batch_size")
        arguments["batch_sampler"] = own.batch_sampler
    else:
        arguments |= {"batch_size": None, "sampler": loader.sampler}
    return DataLoader(loader.dataset, **arguments)


# The precision check: the same steps in float32 and in the candidate's precision
#
# Before each run the weights and the optimizers' states are put back, and the learning rates are
# held, whatever the script's schedule does. A framework may train on each batch one call late, so
# each run begins with a batch that is not counted.


_Gradient = list[Tensor | None]


@dataclass(slots=True)
class _Run:
    """The figures of a run."""

    losses: list[float] = field(default_factory=list)
    gradient: _Gradient | None = None
    """Gradient of the first step, on the CPU."""


class _Start:
    """Keep the script's state from which every run begins.

    Args:
        scene: The scene, with the script in that state.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.run = _Run()
        """The present run."""
        self._weights = [kept_weights(module) for module in scene.sightings.outermost]
        self._states: list[tuple[torch.optim.Optimizer, dict[str, Any], list[float]]] = []
        """Each optimizer with its state and the learning rates of its groups."""
        for own in scene.sightings.optimizers:
            rates = [group["lr"] for group in own.param_groups if "lr" in group]
            self._states.append((own, deepcopy(own.state_dict()), rates))
            own.register_step_pre_hook(self._before_step)

    def again(self) -> None:
        """Put the initial state back, and begin a new run."""
        for module, kept in zip(self.scene.sightings.outermost, self._weights, strict=True):
            put_back(module, kept)
        for optimizer, state, _ in self._states:
            optimizer.load_state_dict(deepcopy(state))
        self.run = _Run()

    def _before_step(self, optimizer: torch.optim.Optimizer, *__: object) -> None:
        """Reset the learning rates, and keep the first gradient of a run."""
        for own, _, rates in self._states:
            for group, rate in zip(own.param_groups, rates, strict=False):
                group["lr"] = rate
        if optimizer is self.scene.trainer.optimizer and self.run.gradient is None:
            parts = [part.grad for group in optimizer.param_groups for part in group["params"]]
            self.run.gradient = [
                None if part is None else part.detach().to("cpu", copy=True) for part in parts
            ]


def compare_to_float32(
    scene: Scene, feed: ScriptFeed, job: PrecisionJob, ends_at: float
) -> PrecisionFigures:
    """Train the same steps in float32, in float32 with another seed, and in the job's precision.

    Args:
        scene: A scene, whose script runs in float32.
        feed: The scene's feed, iterated here.
        job: The job, with the precision to compare.
        ends_at: Time of perf_counter at which the steps are cut short.

    Returns:
        Losses and gradient cosines, as jobs/precision returns them for a workload.
    """
    # Collect batches for all runs.
    seconds = LOADING_SHARE * (ends_at - perf_counter())
    batches = [delivery.batch for delivery in collect(feed, count=GUARD_STEPS, seconds=seconds)]
    feed.stop()

    # Train on them in float32 twice, then in the job's precision.
    begin = _Start(scene)
    seed = job.process.seed
    switch(plain_config(job.config), scene)
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
    """Return the time at which a share of the remaining time is over."""
    now = perf_counter()
    return now + share * (ends_at - now)


def _train(begin: _Start, batches: Sequence[Any], steps: int, seed: int, stop_at: float) -> _Run:
    """Train a run from the initial state; at least two steps, and none after `stop_at`."""
    # One step that is not counted, since a framework may be one batch late.
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
