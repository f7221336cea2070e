"""Compare some 20 optimizer steps of a candidate with float32, from the same start.

In: a PrecisionJob, whose configuration has the candidate's precision and batch. Out:
PrecisionFigures, for `records.trial` to judge. The model is built once, and every run begins from the
same weights, seeds and batches. A process that makes several comparisons trains in float32 once for
each batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autotune.apply.cores import set_cudnn_benchmark
from autotune.apply.precision import exact_matmuls, tf32_products
from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.messages.trials import float32_unknown, tf32_forbidden
from autotune.note import Note
from autotune.protocol.messages import PrecisionJob
from autotune.records.trial import (
    GUARD_STEPS,
    LOADING_SHARE,
    MIN_STEPS,
    OTHER_SEED,
    PrecisionFigures,
    deviation_of,
)
from autotune.space.scaling import with_batch
from autotune.worker.batch import copied
from autotune.worker.build import (
    build_dataset,
    build_model,
    build_optimizer,
    kept_weights,
    put_back,
    seed_all,
)
from autotune.worker.device import Device, tf32_overrides
from autotune.worker.failures import device_was_full, shortage_of
from autotune.worker.feed import Feed
from autotune.worker.loader import build_loader
from autotune.worker.side_alone import MOST_SKIPS, collect
from autotune.worker.step import Trainer, infer_step

# Gradients as vectors


_CHUNK = 2**22
"""Number of elements converted to float64 at once: 32 MiB."""


def gradient_cosine(
    first: Sequence[Tensor | None], second: Sequence[Tensor | None]
) -> float | None:
    """Return the cosine between two gradients as vectors; None if one is not finite.

    It is summed in float64 on the second's device, a few million elements at a time. Two gradients
    of zero count as equal.

    Args:
        first: Gradient of each parameter; None for a parameter without one.
        second: The same for the other gradient, in the same order.
    """
    total = torch.zeros(3, dtype=torch.float64)
    for ours, theirs in zip(first, second, strict=True):
        for a, b in _chunks(ours, theirs):
            total += torch.stack([a @ b, a @ a, b @ b]).to("cpu", torch.float64)
    product, *squares = total.tolist()
    if not all(map(isfinite, (product, *squares))):
        return None
    if 0 in squares:
        return 1.0 if squares[0] == squares[1] else 0.0
    return float(max(-1.0, min(1.0, product / (squares[0] * squares[1]) ** 0.5)))


def _chunks(ours: Tensor | None, theirs: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two gradients of a parameter in pairs of chunks; a missing gradient is zero."""
    present = theirs if theirs is not None else ours
    if present is None:
        return
    device = present.device
    wide = torch.float32 if present.device.type == "mps" else torch.float64
    zero = torch.zeros((), device=device).expand(dense(present).numel())
    first, second = (zero if part is None else dense(part).reshape(-1) for part in (ours, theirs))
    for a, b in zip(torch.split(first, _CHUNK), torch.split(second, _CHUNK), strict=True):
        yield a.to(device, wide), b.to(device, wide)


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense, real tensor without its graph; complex numbers become pairs."""
    found = gradient.detach()
    if found.is_sparse:
        found = found.to_dense()
    return torch.view_as_real(found) if found.is_complex() else found


# The comparison


_REFERENCE_SHARE = 0.5
"""Share of the time by which the reference has ended. Source: our convention."""
_REPEAT_SHARE = 0.6
"""Share of the time by which its repetition has ended; the candidate has the rest. Source: our
convention."""
_BRIEF_S = 30.0
"""Seconds of a brief comparison, unless MIN_STEPS of each run take longer. Source: our
convention."""
_LIBRARIES_OVERRIDE = "NVIDIA_TF32_OVERRIDE"
_PLAIN = {"amp_dtype": "float32", "compile": False, "compile_mode": "default", "fused": False}
"""Settings of the reference."""

_Gradient = list[Tensor | None]


def plain_config(config: TrainingConfig) -> TrainingConfig:
    """Return the configuration that another one is compared to: in float32, by plain kernels."""
    return config.model_copy(update=_PLAIN)


@dataclass(frozen=True, slots=True)
class _Scene:
    """Shared state of all runs of a comparison."""

    workload: Workload
    model: nn.Module
    initial: dict[str, Tensor]
    """Initial parameters and buffers, on the CPU."""
    device: Device
    seed: int
    begun: float
    """Start, by perf_counter."""
    left_s: float
    """Seconds until the deadline."""
    unhurried_s: float
    """Seconds of which a run takes no more than its share once it has enough steps."""

    def is_over(self, share: float, steps: int) -> bool:
        """Return whether a run that must end by a share of the time ends after this number of steps."""
        took_s = perf_counter() - self.begun
        is_unhurried = took_s > share * min(self.unhurried_s, self.left_s)
        return took_s > share * self.left_s or (is_unhurried and steps >= MIN_STEPS)


@dataclass(slots=True)
class _Trained:
    """The figures of a run."""

    compared_to: _Gradient | None = None
    """First gradient of the reference; None in the reference's own run."""
    losses: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    """True for each attempt at a step that the GradScaler skipped; empty without a GradScaler."""
    gradient: _Gradient | None = None
    """Gradient of the first step, on the CPU; in the reference's own run only."""
    cosine: float | None = None
    """Cosine between the first step's gradient and the reference's."""

    def before_step(self, model: nn.Module) -> None:
        """Keep the first gradient, or compare it; a cosine ignores the GradScaler's factor in it."""
        if self.losses:
            return
        gradient = [parameter.grad for parameter in model.parameters()]
        if self.compared_to is not None:
            self.cosine = gradient_cosine(self.compared_to, gradient)
            return
        self.gradient = [
            None if part is None else dense(part).to("cpu", copy=True) for part in gradient
        ]


@dataclass(frozen=True, slots=True)
class _Reference:
    """The float32 runs, with their batches."""

    plain: TrainingConfig
    """The float32 configuration, with the batch that fitted."""
    batches: list[Any]
    trained: _Trained
    repeat: _Trained
    """The run with another seed."""

    @property
    def is_whole(self) -> bool:
        """True if no deadline cut the runs too short for a comparison."""
        return min(len(self.trained.losses), len(self.repeat.losses)) >= MIN_STEPS

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient that is kept in RAM."""
        return sum(part.nbytes for part in self.trained.gradient or () if part is not None)


References: TypeAlias = dict[tuple[Any, ...], _Reference]
"""References of a process, by the settings that they depend on."""


def compare_to_float32(
    workload: Workload,
    job: PrecisionJob,
    device: Device,
    scratch: Path,
    ends_at: float,
    references: References | None = None,
) -> PrecisionFigures:
    """Train the same steps in float32, in float32 with another seed, and in the job's precision.

    float32 means torch's default: exact matrix products, and convolutions as they are, by default
    in TF32. If TORCH_ALLOW_TF32_CUBLAS_OVERRIDE or the user's code lets a trial's float32 run in
    TF32, the reference does not. If float32 does not fit into the memory, the batch is halved.

    Args:
        workload: The workload.
        job: The job, whose configuration is the candidate's.
        device: The device that trains.
        scratch: A folder for temporary files.
        ends_at: Time of perf_counter at which the steps are cut short.
        references: Earlier references of this process; a new one is added.

    Raises:
        Exception: float32 does not fit at a batch of one, or the candidate does not fit, see
            `out_of_memory`.
        WorkloadFault: Something about the workload can't be used.
    """
    # Train in float32, unless an earlier comparison has done so.
    begun = perf_counter()
    set_cudnn_benchmark(job.config.cudnn_benchmark)
    dataset = build_dataset(workload)
    model = build_model(workload, plain_config(job.config), device)
    scene = _Scene(
        workload,
        model,
        kept_weights(model),
        device,
        job.process.seed,
        begun,
        left_s=min(ends_at - begun, job.process.deadline_s),
        unhurried_s=_BRIEF_S if job.is_short_search else inf,
    )
    key = (job.config.micro_batch_size, job.config.max_tokens, job.config.channels_last, scene.seed)
    known = None if references is None else references.get(key)
    if known is None:
        known = _made_reference(scene, dataset, job, scratch)
        if references is not None and known.is_whole:
            references[key] = known

    # Train in the candidate's precision, at the batch that fitted in float32.
    batch = {"micro_batch_size": known.plain.micro_batch_size, "max_tokens": known.plain.max_tokens}
    candidate = job.config.model_copy(update=batch)
    exact = known.trained
    with tf32_products() if candidate.amp_dtype == "tf32" else nullcontext():
        tried = _train(
            scene, known.batches, candidate, len(exact.losses), 1.0, exact.gradient or []
        )
    steps = min(len(exact.losses), len(tried.losses))
    return PrecisionFigures(
        steps=steps,
        micro_batch_size=candidate.micro_batch_size,
        reference_losses=tuple(exact.losses[:steps]),
        losses=tuple(tried.losses[:steps]),
        gradient_cosine=tried.cosine,
        repeat_cosine=known.repeat.cosine,
        repeat_deviation=deviation_of(exact.losses, known.repeat.losses) or 0.0,
        skipped_steps=tuple(tried.skipped),
        notes=_overridden(candidate, device),
    )


def _made_reference(scene: _Scene, dataset: Any, job: PrecisionJob, scratch: Path) -> _Reference:
    """Train in float32 twice, at the job's batch, halved until it fits."""
    plain = plain_config(job.config)
    while True:
        feed = Feed(build_loader(scene.workload, dataset, plain, scratch))
        batches = _batches(feed, scene.begun + LOADING_SHARE * scene.left_s)
        refusals_before = scene.device.refusals()
        try:
            with exact_matmuls():
                trained = _train(scene, batches, plain, GUARD_STEPS, _REFERENCE_SHARE)
            break
        except Exception as error:
            shortage = shortage_of(
                error, is_full=partial(device_was_full, scene.device, refusals_before)
            )
            if shortage is None or shortage.memory != "device" or plain.micro_batch_size == 1:
                raise
        scene.model.zero_grad(set_to_none=True)
        scene.device.reset_peak()  # gives back what the allocator holds
        plain = with_batch(plain, plain.micro_batch_size // 2)
    with exact_matmuls():
        other = replace(scene, seed=scene.seed + OTHER_SEED)
        repeat = _train(other, batches, plain, MIN_STEPS, _REPEAT_SHARE, trained.gradient or [])
    return _Reference(plain, batches, trained, repeat)


def _batches(feed: Feed, stop_at: float) -> list[Any]:
    """Collect the loader's first batches, up to one for each step, then end its workers."""
    try:
        first = feed.start()
        came = collect(feed, count=GUARD_STEPS, first=first, seconds=stop_at - perf_counter())
    finally:
        feed.stop()
    return [delivery.batch for delivery in came]


def _train(
    scene: _Scene,
    batches: list[Any],
    config: TrainingConfig,
    steps: int,
    share: float,
    compared_to: _Gradient | None = None,
) -> _Trained:
    """Train optimizer steps from the initial weights; stop at a loss that is not finite.

    A batch whose step the GradScaler skipped is used again, so that losses compare step by step.

    Args:
        scene: Shared state of the runs.
        batches: Batches, used in turn.
        config: The configuration to train in.
        steps: Number of steps at most.
        share: Share of the time by which the run ends, see `_Scene.is_over`.
        compared_to: First gradient of the reference; None to keep this run's own.
    """
    # Build a trainer from the initial weights.
    put_back(scene.model, scene.initial)
    trained = _Trained(compared_to)
    device = scene.device
    optimizer = build_optimizer(scene.workload, scene.model, config.lr, fused=config.fused)
    optimizer.register_step_pre_hook(lambda *_: trained.before_step(scene.model))
    model: Any = scene.model
    if config.compile:
        model = torch.compile(scene.model, mode=config.compile_mode)
    scaler = config.grad_scaler(device.torch_device)
    accumulator = config.accumulator(model, optimizer, device=device.torch_device, scaler=scaler)
    step = infer_step(scene.workload, batches[0])
    trainer = Trainer(model, optimizer, step, config, device, accumulator)

    # Train step by step, each with its own seed.
    for _ in range(steps + MOST_SKIPS):
        at = len(trained.losses)
        if at == steps or ((at or trained.skipped) and scene.is_over(share, at)):
            break
        seed_all(scene.seed + at)
        before = scaler.get_scale()
        loss = float(trainer.train(copied(batches[at % len(batches)])))
        if at == 0:
            # Cap again: this precision's kernels were loaded meanwhile, outside the allocator.
            device.cap_memory()
        was_skipped = scaler.get_scale() < before
        if scaler.is_enabled():
            trained.skipped.append(was_skipped)
        if was_skipped and isfinite(loss):
            if at == 0:  # a fused optimizer is called for skipped steps too
                trained.cosine = trained.gradient = None
            continue
        trained.losses.append(loss)
        if not isfinite(loss):
            break
    optimizer.zero_grad(set_to_none=True)
    return trained


def _overridden(candidate: TrainingConfig, device: Device) -> tuple[Note, ...]:
    """Return notes on environment variables that override torch's precision in NVIDIA's libraries.

    A process can't undo them. Source: NVIDIA, "Accelerating AI Training with NVIDIA TF32 Tensor
    Cores", and cuBLAS's documentation: 0 forbids TF32. No other value is documented.
    """
    overrides = tf32_overrides() if device.kind == "cuda" else ()
    if f"{_LIBRARIES_OVERRIDE}=0" in overrides and candidate.amp_dtype == "tf32":
        return (tf32_forbidden(_LIBRARIES_OVERRIDE),)
    if f"{_LIBRARIES_OVERRIDE}=1" in overrides:
        return (float32_unknown(_LIBRARIES_OVERRIDE),)
    return ()
