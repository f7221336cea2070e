"""The precision check: compare some 20 optimizer steps of a candidate with float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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

# Gradients as vectors: dense and real, and the cosine between two.
#
# Comes in: gradients, each parameter's in order. Goes out: tensors, a number.


_CHUNK = 2**22  # elements that are widened at once: 32 MiB of float64


def gradient_cosine(
    first: Sequence[Tensor | None], second: Sequence[Tensor | None]
) -> float | None:
    """Cosine between two gradients, each parameter's in order, as one vector; None where one is not finite.

    Summed in float64 on the second's device, a few million elements at a time. Two gradients of
    zero are equal.
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
    """Two parameters' gradients side by side in pieces; where one has no gradient, it is zero."""
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
    """A gradient without its graph, sparse ones filled up, complex ones as pairs of real numbers."""
    found = gradient.detach()
    found = found.to_dense() if found.is_sparse else found
    return torch.view_as_real(found) if found.is_complex() else found


# The precision check: some 20 optimizer steps of a candidate compared to float32, from the same
# start.
#
# Takes a PrecisionJob, whose configuration has the candidate's precision and batch; hands on
# PrecisionFigures, for `records.precision_check` to judge. The model is built once, and every run
# begins from the same weights, seeds and batches. In a process that makes several comparisons the
# float32 runs are made once for each batch size.


# The reference is over by then, the repetition by the next, the candidate has what is left:.
_REFERENCE_SHARE = 0.5
_REPEAT_SHARE = 0.6  # our own convention, all three
_BRIEF_S = (
    30.0  # of a brief comparison, unless MIN_STEPS of each run take longer: our own convention
)
_LIBRARIES_OVERRIDE = "NVIDIA_TF32_OVERRIDE"
_PLAIN = {"amp_dtype": "float32", "compile": False, "compile_mode": "default", "fused": False}
"""The reference, in what a candidate may differ in."""

_Gradient = list[Tensor | None]


@dataclass(frozen=True, slots=True)
class _Scene:
    """What all runs of a comparison share."""

    workload: Workload
    model: nn.Module
    initial: dict[str, Tensor]
    """Parameters and buffers to begin from, on the CPU."""
    device: Device
    seed: int


@dataclass(frozen=True, slots=True)
class _Time:
    """What a comparison may take."""

    begun: float
    left_s: float
    unhurried_s: float
    """Once a run has enough steps, no more than its share of that."""

    def until(self, share: float) -> _Until:
        """When a run ends that is to be over by a share of it."""
        return _Until(self.begun, share, self.left_s, self.unhurried_s)


@dataclass(frozen=True, slots=True)
class _Until:
    """When a run of steps ends early: at a share of the time that there is, or sooner once it has enough of them."""

    begun: float
    share: float
    left_s: float
    unhurried_s: float

    def is_over(self, steps: int) -> bool:
        """Whether no further step is taken after so many."""
        took_s = perf_counter() - self.begun
        is_unhurried = took_s > self.share * min(self.unhurried_s, self.left_s)
        return took_s > self.share * self.left_s or (is_unhurried and steps >= MIN_STEPS)


@dataclass(slots=True)
class _Trained:
    """The figures of a run."""

    compared_to: _Gradient | None = None
    """The reference's first gradient; None for the reference itself."""
    losses: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    """For each attempt at a step, where there is a GradScaler."""
    gradient: _Gradient | None = None
    """The first step's, on the CPU; of the reference alone."""
    cosine: float | None = None
    """Between the first step's gradient and the reference's."""

    def before_step(self, model: nn.Module) -> None:
        """Keep the first gradient, or compare it; it may bear the GradScaler's factor, which a cosine does not see."""
        if self.losses:
            return
        gradient = [parameter.grad for parameter in model.parameters()]
        if self.compared_to is None:
            self.gradient = [
                None if part is None else dense(part).to("cpu", copy=True) for part in gradient
            ]
        else:
            self.cosine = gradient_cosine(self.compared_to, gradient)


@dataclass(frozen=True, slots=True)
class _Reference:
    """The float32 runs, and the batches that they were of."""

    plain: TrainingConfig
    """With the batch that fitted."""
    batches: list[Any]
    trained: _Trained
    repeat: _Trained

    @property
    def is_whole(self) -> bool:
        """Whether no deadline has cut it so short that it tells nothing of another precision."""
        return min(len(self.trained.losses), len(self.repeat.losses)) >= MIN_STEPS

    @property
    def nbytes(self) -> int:
        """Of the gradient that it keeps, in RAM."""
        return sum(part.nbytes for part in self.trained.gradient or () if part is not None)


References: TypeAlias = dict[tuple[Any, ...], _Reference]
"""Those of a process, by what they depend on."""


def compare_to_float32(
    workload: Workload,
    job: PrecisionJob,
    device: Device,
    scratch: Path,
    ends_at: float,
    references: References | None = None,
) -> PrecisionFigures:
    """Train the same steps in float32, in float32 with other random draws, and as the candidate would.

    float32 is what torch means by it where nobody has changed that: exact matrix products, and
    convolutions as they are, by default in TF32. Where TORCH_ALLOW_TF32_CUBLAS_OVERRIDE or the
    user's code lets a trial's float32 run in TF32, the reference does not. Where float32 does not
    fit into the memory the batch is halved. `ends_at`, a time of perf_counter, cuts the steps
    short. `references` are those that this process has, to which this one's is added.

    Raises:
        Exception: float32 does not fit at a batch of one, or the candidate does not fit, see
            `out_of_memory`.
        WorkloadFault: something about the workload can't be used.
    """
    begun = perf_counter()
    time = _Time(
        begun, min(ends_at - begun, job.process.deadline_s), _BRIEF_S if job.is_brief else inf
    )
    set_cudnn_benchmark(job.config.cudnn_benchmark)
    dataset = build_dataset(workload)
    model = build_model(workload, job.config.model_copy(update=_PLAIN), device)
    scene = _Scene(workload, model, kept_weights(model), device, job.process.seed)
    key = (job.config.micro_batch_size, job.config.max_tokens, job.config.channels_last, scene.seed)
    known = None if references is None else references.get(key)
    if known is None:
        known = _made_reference(scene, dataset, job, scratch, time)
        if references is not None and known.is_whole:
            references[key] = known
    reference = known.trained
    batch = {"micro_batch_size": known.plain.micro_batch_size, "max_tokens": known.plain.max_tokens}
    candidate = job.config.model_copy(update=batch)
    with tf32_products() if candidate.amp_dtype == "tf32" else nullcontext():
        until = time.until(1.0)
        tried = _train(
            scene, known.batches, candidate, len(reference.losses), until, reference.gradient or []
        )
    return _figures(reference, known.repeat, tried, candidate, _overridden(candidate, device))


def _made_reference(
    scene: _Scene, dataset: Any, job: PrecisionJob, scratch: Path, time: _Time
) -> _Reference:
    """The float32 runs at the job's batch, or at the largest half of it that fits."""
    plain = job.config.model_copy(update=_PLAIN)
    while True:
        feed = Feed(build_loader(scene.workload, dataset, plain, scratch))
        batches = _batches(feed, time.begun + LOADING_SHARE * time.left_s)
        trained = _reference(scene, batches, plain, time.until(_REFERENCE_SHARE))
        if trained is not None:
            break
        plain = with_batch(plain, plain.micro_batch_size // 2)
    until = time.until(_REPEAT_SHARE)
    with exact_matmuls():
        other = replace(scene, seed=scene.seed + OTHER_SEED)
        repeat = _train(other, batches, plain, MIN_STEPS, until, trained.gradient or [])
    return _Reference(plain, batches, trained, repeat)


def _reference(
    scene: _Scene, batches: list[Any], plain: TrainingConfig, until: _Until
) -> _Trained | None:
    """The float32 run; None where it does not fit into the device's memory, and a smaller batch is left to try."""
    refusals_before = scene.device.refusals()
    try:
        with exact_matmuls():
            return _train(scene, batches, plain, GUARD_STEPS, until)
    except Exception as error:
        shortage = shortage_of(
            error, is_full=lambda: device_was_full(scene.device, refusals_before)
        )
        if shortage is None or shortage.memory != "device" or plain.micro_batch_size == 1:
            raise
    scene.model.zero_grad(set_to_none=True)
    scene.device.reset_peak()  # gives back what the allocator holds
    return None


def _batches(feed: Feed, stop_at: float) -> list[Any]:
    """The loader's first batches, one for each step as long as time and memory allow; ends its workers."""
    try:
        came = collect(
            feed, count=GUARD_STEPS, first=feed.start(), seconds=stop_at - perf_counter()
        )
    finally:
        feed.stop()
    return [delivery.batch for delivery in came]


def _figures(
    reference: _Trained,
    repeat: _Trained,
    tried: _Trained,
    candidate: TrainingConfig,
    remarks: tuple[Note, ...],
) -> PrecisionFigures:
    steps = min(len(reference.losses), len(tried.losses))
    return PrecisionFigures(
        steps=steps,
        micro_batch_size=candidate.micro_batch_size,
        reference_losses=tuple(reference.losses[:steps]),
        losses=tuple(tried.losses[:steps]),
        gradient_cosine=tried.cosine,
        repeat_cosine=repeat.cosine,
        repeat_deviation=deviation_of(reference.losses, repeat.losses) or 0.0,
        skipped_steps=tuple(tried.skipped),
        remarks=remarks,
    )


def _train(
    scene: _Scene,
    batches: list[Any],
    config: TrainingConfig,
    steps: int,
    until: _Until,
    compared_to: _Gradient | None = None,
) -> _Trained:
    """Optimizer steps from the initial weights; ends early at a loss that is not finite.

    A batch whose step the GradScaler skipped is taken again, so that losses compare step by step.
    """
    put_back(scene.model, scene.initial)
    trained = _Trained(compared_to)
    device = scene.device
    optimizer = build_optimizer(scene.workload, scene.model, config.lr, fused=config.fused)
    optimizer.register_step_pre_hook(lambda *_: trained.before_step(scene.model))
    model: Any = (
        torch.compile(scene.model, mode=config.compile_mode) if config.compile else scene.model
    )
    scaler = config.grad_scaler(device.torch_device)
    accumulator = config.accumulator(model, optimizer, device=device.torch_device, scaler=scaler)
    step = infer_step(scene.workload, batches[0])
    trainer = Trainer(model, optimizer, step, config, device, accumulator)
    for _ in range(steps + MOST_SKIPS):
        at = len(trained.losses)
        if at == steps or ((at or trained.skipped) and until.is_over(at)):
            break
        seed_all(scene.seed + at)
        before = scaler.get_scale()
        loss = float(trainer.train(copied(batches[at % len(batches)])))
        if at == 0:
            # Again: the kernels of this precision have been loaded, outside the allocator.
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
    """What the environment makes NVIDIA's libraries do whatever torch asks for; a process can't undo that.

    Source: NVIDIA, "Accelerating AI Training with NVIDIA TF32 Tensor Cores", and cuBLAS's
    documentation: 0 forbids TF32. No other value is documented.
    """
    overrides = tf32_overrides() if device.kind == "cuda" else ()
    if f"{_LIBRARIES_OVERRIDE}=0" in overrides and candidate.amp_dtype == "tf32":
        return (tf32_forbidden(_LIBRARIES_OVERRIDE),)
    if f"{_LIBRARIES_OVERRIDE}=1" in overrides:
        return (float32_unknown(_LIBRARIES_OVERRIDE),)
    return ()
