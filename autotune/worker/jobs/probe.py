"""One look at the workload before the study: facts for the search space, and the page cache warmed.

Builds everything once, takes one batch through a training step, and hands on WorkloadFacts. What is wrong with the
workload shows here, before any trial.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload, WorkloadFacts
from autotune.worker.failure.out_of_memory import shortage_of
from autotune.worker.measure.feed import Feed
from autotune.worker.measure.step import Trainer, count_samples, infer_step, make_trainer, tensors_of
from autotune.worker.setup.build import (
    build_dataset,
    build_loader,
    build_model,
    build_optimizer,
    dataset_length,
    optimizer_facts,
)
from autotune.worker.setup.device import Device

__all__ = ["probe"]

_IMAGE_DIMS = 4
_WARMING_MAX_S = 5.0
_WARMING_LOOK_S = 0.3


def probe(workload: Workload, config: TrainingConfig, device: Device, scratch: Path) -> WorkloadFacts:
    """Find out about the workload by running one small step of it.

    Raises:
        WorkloadFault: something about it can't be used.
    """
    dataset = build_dataset(workload)
    length = dataset_length(dataset)
    small = TrainingConfig(
        micro_batch_size=config.micro_batch_size if length is None else min(config.micro_batch_size, length)
    )
    loader = build_loader(workload, dataset, small, scratch)
    feed = Feed(loader)
    batch = feed.start().batch
    step = infer_step(workload, batch)
    model = build_model(workload, small, device)
    optimizer = build_optimizer(workload, model, config.lr)
    trainer = make_trainer(model, optimizer, step, small, device)
    has_unused = _train_once(trainer, batch)
    is_iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    _warm_page_cache(feed)
    samples = max(1, count_samples(batch, small.micro_batch_size))
    return WorkloadFacts(
        dataset_length=length,
        is_iterable=is_iterable,
        is_sharded=not is_iterable or workload.worker_init_fn is not None or _is_sharded(dataset),
        fixed_batch_size=_fixed_batch_size(workload, loader, samples),
        has_4d_input=any(tensor.ndim == _IMAGE_DIMS and tensor.is_floating_point() for tensor in tensors_of(batch)),
        parameter_count=sum(parameter.numel() for parameter in model.parameters()),
        trainable_parameter_count=sum(each.numel() for each in model.parameters() if each.requires_grad),
        gradient_bytes=sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad),
        has_buffers=any(True for _ in model.buffers()),
        has_unused_parameters=has_unused,
        optimizer=optimizer_facts(optimizer),
        step_source=step.source,
    )


def _train_once(trainer: Trainer, batch: Any) -> bool:
    """One step, to see that it works, and whether parameters get no gradient in it (DDP must know).

    Whether the memory suffices is for the baseline's trial to tell.
    """
    wanted = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    reached = set[int]()
    hooks: list[Any] = [
        one.register_post_accumulate_grad_hook(lambda own: reached.add(id(own)))  # type: ignore[no-untyped-call] # torch
        for one in wanted
    ]
    try:
        trainer.train(batch)
        trainer.device.synchronize()
    except Exception as error:
        if shortage_of(error) is None:
            raise
        trainer.optimizer.zero_grad(set_to_none=True)
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return len(reached) < len({id(one) for one in wanted})


def _fixed_batch_size(workload: Workload, loader: DataLoader[Any], samples: int) -> int | None:
    sampler = workload.batch_sampler
    if sampler is None or not hasattr(sampler, "__iter__"):
        return None
    return int(getattr(loader.batch_sampler, "batch_size", samples))


class _WatchedInfo(torch_worker.WorkerInfo):
    """A worker's info that notes whether somebody asks which worker of how many he is."""

    was_asked = False

    def __getattribute__(self, name: str) -> Any:
        if name in {"id", "num_workers"}:
            type(self).was_asked = True
        return object.__getattribute__(self, name)


def _is_sharded(dataset: Any) -> bool:
    """Whether an iterable dataset shares its items out: it asks for its place, or two workers get different items.

    Each place is played in this process, one item long. Source: torch.utils.data.get_worker_info.
    """
    firsts = []
    _WatchedInfo.was_asked = False
    for place in range(2):
        torch_worker._worker_info = _WatchedInfo(id=place, num_workers=2, seed=0, dataset=dataset)  # noqa: SLF001 # type: ignore[attr-defined] # what get_worker_info() answers
        try:
            torch.manual_seed(0)
            firsts.append(next(iter(dataset), None))
        finally:
            torch_worker._worker_info = None  # noqa: SLF001 # type: ignore[attr-defined] # as above
    if _WatchedInfo.was_asked:
        return True
    ours, theirs = (tensors_of(first) for first in firsts)
    if not ours:
        return bool(firsts[0] != firsts[1])
    return len(ours) != len(theirs) or not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _warm_page_cache(feed: Feed) -> None:
    """Take batches until a while brings nothing from the disk: else the first trial, the baseline, pays for all."""
    begun = looked = perf_counter()
    read = _bytes_from_disk()
    while not feed.take().is_restart:
        now = perf_counter()
        if now - looked >= _WARMING_LOOK_S:
            read, before, looked = _bytes_from_disk(), read, now
            if read == before or now - begun >= _WARMING_MAX_S:
                return


def _bytes_from_disk() -> int:
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return 0
