"""Measure either side of a script alone, and compare its precision with float32."""

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
from autotune.worker.batch import copied, unwrapped
from autotune.worker.build import WorkloadFault, is_stream, kept_weights, put_back, seed_all
from autotune.worker.device import Device
from autotune.worker.feed import Feed, FeedEnded
from autotune.worker.jobs.precision import gradient_cosine
from autotune.worker.script.feeds import ScriptFeed, ScriptTrainer, StepFeed
from autotune.worker.script.overrides import SWITCHES, set_layout
from autotune.worker.script.sightings import Sightings
from autotune.worker.side_alone import collect

# What a job has to work with once a script's training loop is found, and what a script's own end
# means.
#
# Comes in: a feed and a trainer that drive the script, and what was seen of it. Goes out: a Scene,
# for a Doer.


@dataclass(slots=True, kw_only=True)
class Scene:
    """A script whose loop measuring has the lead of."""

    sightings: Sightings
    device: Device
    feed: ScriptFeed | StepFeed
    trainer: ScriptTrainer
    before_steps: Callable[[Callable[[torch.optim.Optimizer], None]], None]
    """Has something done right before each optimizer step."""

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The training loader; None where the script has none."""
        return self.feed.loader if isinstance(self.feed, ScriptFeed) else None


Doer: TypeAlias = Callable[[Scene], RankReport]
"""Does a job in a scene."""


def no_job(_: Scene) -> RankReport:
    """What a session without a job never comes to."""
    raise AssertionError("a session without a job measures nothing")


def told(work: Callable[[], RankReport]) -> RankReport:
    """Do some work; a script that ends meanwhile is told as a fault of the workload."""
    try:
        return work()
    except FeedEnded:
        raise WorkloadFault(
            "a script must train for some seconds to be measured, but it ended before that; give "
            "it more epochs or "
            "more steps, as a real training has"
        ) from None


def no_loop(seen: Sightings) -> str:
    """Why a script that has come to its end was not measured, in a sentence."""
    what = "made a DataLoader" if seen.made else "stepped an optimizer"
    return (
        f"a script must train to be measured, but it {what} and ended after {seen.most_steps} "
        f"optimizer steps; give it "
        "more epochs or more steps, and see that it trains when it is started so"
    )


def raised(error: BaseException) -> RankReport:
    """Raise an exception where a report is asked for."""
    raise error


def is_clean_exit(error: BaseException) -> bool:
    """Whether an exception is a script's way to end well."""
    return isinstance(error, SystemExit) and error.code in {None, 0}


def ranks() -> int:
    """Ranks that train in step, as the process group has it."""
    group: Any = torch.distributed
    return int(group.get_world_size()) if group.is_available() and group.is_initialized() else 1


def rank() -> int:
    """This process's rank, as the process group has it."""
    group: Any = torch.distributed
    return int(group.get_rank()) if group.is_available() and group.is_initialized() else 0


# Either side of a script alone: its loader made anew with other settings, its step fed with batches
# that are held.
#
# A Bench for `jobs/curves`: loaders are copies of the script's own with changed arguments, the
# device's points go through the script's own step, whose precision, layout and threads are switched
# from outside.


@dataclass(slots=True)
class ScriptBench:
    """See jobs.bench.Bench."""

    scene: Scene
    _initial: list[Mapping[str, Tensor]] = field(default_factory=list)

    @property
    def kept_bytes(self) -> int:
        """See Bench."""
        return sum(tensor.nbytes for kept in self._initial for tensor in kept.values())

    def feed(self, config: TrainingConfig) -> Feed:
        """See Bench."""
        loader = self.scene.loader
        assert loader is not None  # noqa: S101 - scenes asks for a bench only where there is one
        return Feed(loader_like(loader, config))

    def prepare(self, batch: Any) -> None:  # noqa: ARG002 - as a Bench has it
        """See Bench: the script has its model already."""
        self._initial = [kept_weights(module) for module in self.scene.sightings.outermost]

    def trainer(self, config: TrainingConfig) -> ScriptTrainer:
        """See Bench."""
        switch(config, self.scene)
        trainer = self.scene.trainer
        trainer.config = config
        return trainer

    def after_point(self, *, is_failed: bool) -> None:
        """See Bench; gradients are the script's to clear."""
        if is_failed:
            for module, kept in zip(self.scene.sightings.outermost, self._initial, strict=False):
                put_back(module, kept)


def switch(config: TrainingConfig, scene: Scene) -> None:
    """Have the script's modules compute in a configuration's precision and layout from here on."""
    is_half = config.amp_dtype in {"bfloat16", "float16"}
    SWITCHES.device_type = scene.device.torch_device.type
    SWITCHES.dtype = (
        getattr(torch, config.amp_dtype) if is_half and scene.sightings.autocast is None else None
    )
    if SWITCHES.channels_last != config.channels_last:
        SWITCHES.channels_last = config.channels_last
        for module in SWITCHES.modules:
            set_layout(module, channels_last=config.channels_last)


def _is_plain(batches: object) -> bool:
    """Whether a batch sampler is torch's own, or torchdata's Stateful one: it can be made anew with another size."""
    return type(batches) is BatchSampler or (
        isinstance(batches, BatchSampler) and type(batches).__module__.startswith("torchdata.")
    )


def loader_like(loader: DataLoader[Any], config: TrainingConfig) -> DataLoader[Any]:
    """A loader of the same data as the script's, in the same manner, with a configuration's settings."""
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


# The precision check inside a script: the same steps in float32 and in the candidate's precision,
# by its own step.
#
# Takes a scene whose script runs in float32, and a PrecisionJob; hands on PrecisionFigures, as
# jobs/precision does for a workload. Before each run the weights and the optimizers' states are put
# back, and learning rates held, whatever the script's schedule does. A framework may train on each
# batch one call late: each run begins with a batch that is not counted.


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
            (
                own,
                deepcopy(own.state_dict()),
                [group["lr"] for group in own.param_groups if "lr" in group],
            )
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
            self.run.gradient = [
                None if part is None else part.detach().to("cpu", copy=True) for part in parts
            ]


def compare_to_float32(scene: Scene, job: PrecisionJob, ends_at: float) -> PrecisionFigures:
    """Train the same steps in float32, in float32 with other random draws, and as the candidate would.

    `ends_at`, a time of perf_counter, cuts the steps short.
    """
    feed = scene.feed
    plain = job.config.model_copy(update={"amp_dtype": "float32"})
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
