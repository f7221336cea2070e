"""The gradient's noise: squared norms of gradients at fixed weights, of micro-batches and of their mean.

Takes a NoiseScaleJob, whose configuration has the micro-batch and the precision; hands on GradientNorms, for
`analysis.noise_scale` to judge. No optimizer steps: the weights stay as the checkpoint has them. Beside the model and
its gradients it keeps one sum of gradients, in float32. It runs in one process, whatever the ranks: whose micro-batches
are averaged changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import harmonic_mean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from autotune.analysis.noise_scale import FEWEST_GROUPS
from autotune.protocol.jobs import NoiseScaleJob
from autotune.records.noise_scale import GradientNorms
from autotune.settings.applied.process import set_cudnn_benchmark
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload
from autotune.worker.jobs.gradients import dense
from autotune.worker.measure.feed import Feed
from autotune.worker.measure.step import Step, infer_step
from autotune.worker.setup.build import build_dataset, build_model
from autotune.worker.setup.checkpoint import load_checkpoint
from autotune.worker.setup.device import Device
from autotune.worker.setup.loader import build_loader

__all__ = ["measure_gradients"]

_GROUPS = 16
"""Groups that the time is shared among: our own convention, an interval needs some of them."""
_MOST_IN_A_GROUP = 256
"""Micro-batches: our own convention."""
_SHARE = 0.8
"""Of the time that is left, for micro-batches: our own convention."""
_LONGEST = 6
"""Times its seconds that the fewest groups may take: our own convention."""
_LEAST_IN_A_GROUP = 2
_EPOCH_GROUPS = 8
"""Groups that an epoch has at least: the mean of a whole epoch is always the same."""


class _Gradients:
    """Gradients of micro-batches, each by itself, and their sum since it was last taken."""

    def __init__(self, model: nn.Module, step: Step, config: TrainingConfig, device: Device) -> None:
        self.model, self.step, self.config, self.device = model, step, config, device
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.total = [torch.zeros_like(dense(parameter).float()) for parameter in self.trained]

    def add(self, batch: Any) -> Tensor:
        """Add the gradient of a micro-batch's mean loss; its squared norm, still on the device."""
        for parameter in self.trained:
            parameter.grad = None
        place = self.device.torch_device
        with self.config.autocast(place):
            loss = self.step.function(self.model, self.config.to_device(batch, place))
        loss.backward()  # type: ignore[no-untyped-call] # torch
        found = [(sum_, parameter.grad) for sum_, parameter in zip(self.total, self.trained, strict=True)]
        own = [(sum_, dense(gradient).float()) for sum_, gradient in found if gradient is not None]
        for sum_, gradient in own:
            sum_.add_(gradient)
        return _square([gradient for _, gradient in own])

    def take(self, count: int) -> Tensor:
        """The squared norm of the mean of so many; begins a new sum."""
        square = _square(self.total) / count**2
        for sum_ in self.total:
            sum_.zero_()
        return square


def measure_gradients(
    workload: Workload, job: NoiseScaleJob, device: Device, scratch: Path, ends_at: float
) -> GradientNorms:
    """Measure gradients for `job.seconds`, or until a time of perf_counter.

    Raises:
        WorkloadFault: something about the workload or its checkpoint can't be used.
        Exception: any that the user's code raises, or that means that the memory does not suffice.
    """
    set_cudnn_benchmark(job.config.cudnn_benchmark)
    dataset, model = build_dataset(workload), build_model(workload, job.config, device)
    if workload.checkpoint is not None:
        load_checkpoint(workload.checkpoint, model)
    loader = build_loader(workload, dataset, job.config, scratch)
    epoch_samples, feed = _epoch_samples(loader), Feed(loader)  # which counts the sampler's batches by one of its own
    try:
        first = feed.start()
        gradients = _Gradients(model, infer_step(workload, first.batch), job.config, device)
        gradients.add(first.batch).item()  # what a first batch takes longer
        gradients.take(1)
        now = perf_counter()
        latest = now + min(_SHARE * (ends_at - now), _LONGEST * job.seconds)
        most = min(_MOST_IN_A_GROUP, (feed.epoch_batches or _MOST_IN_A_GROUP * _EPOCH_GROUPS) // _EPOCH_GROUPS)
        groups, samples = _groups(gradients, feed, min(job.seconds, latest - now), latest, most)
    finally:
        feed.stop()
    return GradientNorms(
        micro_batch_samples=harmonic_mean(samples),
        micro_batches=len(samples) // len(groups),
        groups=tuple(groups),
        epoch_samples=epoch_samples,
        has_checkpoint=workload.checkpoint is not None,
    )


def _epoch_samples(loader: Any) -> int | None:
    """Samples of an epoch that draws each of them once; None where it may draw one again, or that is not known."""
    sampler = loader.sampler if type(getattr(loader, "batch_sampler", None)) is BatchSampler else None
    if type(sampler) is RandomSampler:
        count = len(sampler)
        return count if not sampler.replacement and count <= len(sampler.data_source) else None
    return len(sampler) if isinstance(sampler, SequentialSampler | SubsetRandomSampler) else None


def _groups(
    gradients: _Gradients, feed: Feed, seconds: float, latest: float, most: int
) -> tuple[list[tuple[float, float]], list[int]]:
    """Norms of groups for so many seconds, of a few until the latest; the samples of each micro-batch.

    The first group ends with its share of the time: the others have as many micro-batches. The loader's queue is used
    up before, else it would seem to be faster than it is.
    """
    share_s, begun = seconds / _GROUPS, perf_counter()
    for _ in range(feed.queue_capacity):
        feed.take()
        if perf_counter() - begun > share_s:
            break
    begun, groups, samples = perf_counter(), list[tuple[float, float]](), list[int]()
    count = max(most, _LEAST_IN_A_GROUP)
    while len(groups) < _GROUPS:
        group_begun, squares, sizes = perf_counter(), list[Tensor](), list[int]()
        ends_at = begun + seconds if len(groups) >= FEWEST_GROUPS else latest
        is_first = not groups
        while len(squares) < count and (is_first or perf_counter() < ends_at):
            delivery = feed.take()
            squares.append(gradients.add(delivery.batch))
            sizes.append(delivery.samples)
            if is_first and len(squares) >= _LEAST_IN_A_GROUP:
                squares[-1].item()  # the device has come so far
                count = len(squares) if perf_counter() > min(group_begun + share_s, latest) else count
        if len(squares) < count:
            break
        groups.append((torch.stack(squares).mean().item(), gradients.take(count).item()))
        samples += sizes
    return groups, samples


def _square(gradient: Sequence[Tensor]) -> Tensor:
    """The squared norm of a gradient as one vector."""
    if not gradient:
        return torch.zeros(())
    norms = torch.stack([torch.linalg.vector_norm(part) for part in gradient])
    return (norms if norms.device.type == "mps" else norms.double()).square().sum()
