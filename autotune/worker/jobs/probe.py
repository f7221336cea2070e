"""The probe: one small step of the workload before any trial, for the facts that the search space needs.

Takes a workload; builds all of it once, trains on one batch, and hands on WorkloadFacts. Anything wrong with the
workload shows here. Reads batches until the page cache is warm: otherwise the first trial, the baseline, would pay.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker

from autotune.settings.applied.batch import IMAGE_DIMS
from autotune.settings.applied.loader import drops_last, fixed_batches, observed_settings
from autotune.settings.applied.optimizer import base_lr, can_fuse, is_fused
from autotune.settings.applied.tf_data import TfData, TfLoader
from autotune.settings.environment import GRAPH_KINDS
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import BESIDE_A_LOADER, ObjectFacts, Workload, WorkloadFacts
from autotune.worker.failure.out_of_memory import shortage_of
from autotune.worker.jobs.first_items import FirstItems, look_at_items
from autotune.worker.measure.batch import leaves_of, tensors_of
from autotune.worker.measure.feed import BatchFeed, Delivery, Feed
from autotune.worker.measure.step import Trainer, infer_step, make_trainer
from autotune.worker.setup.algorithms import has_convolutions, is_deterministic
from autotune.worker.setup.build import (
    build_dataset,
    build_model,
    build_optimizer,
    dataset_of,
    is_stream,
    length_of,
    optimizer_facts,
    seed_all,
)
from autotune.worker.setup.device import Device
from autotune.worker.setup.loader import build_loader
from autotune.worker.setup.machine import bytes_from_disk
from autotune.worker.setup.own_batches import is_factory, made_batches, mean_samples, takes_batch_size, takes_budget

__all__ = ["is_sharded", "probe", "warm_page_cache"]

_WARMING_MAX_S = 5.0  # our own convention: a data set that is not in RAM by then is read from the disk in trials too
_WARMING_PAUSE_S = 0.3  # our own convention: between two readings of the disk's counter
_LEAST_BATCHES = 3  # our own convention: fewer tell nothing of the shapes of all
_Shapes = tuple[tuple[int, ...], ...]
"""Of a batch's tensors, in order."""


def probe(workload: Workload, config: TrainingConfig, device: Device, scratch: Path) -> WorkloadFacts:
    """Find out about the workload by running one small step of it.

    Raises:
        WorkloadFault: something about it can't be used.
    """
    data = build_dataset(workload)
    dataset, objects = dataset_of(data), _objects(workload, data, config)
    is_tf_data, size = isinstance(dataset, TfData), objects.observed.micro_batch_size
    length = dataset.length(size) if isinstance(dataset, TfData) else length_of(dataset)
    small = TrainingConfig(
        micro_batch_size=size if length is None else min(size, length),
        max_tokens=config.max_tokens,
        lr=objects.observed.lr,
    )
    own, budget_samples = workload.batch_sampler, None
    if takes_budget(own) and not takes_batch_size(own):  # first: later random draws depend on how long things took
        budget_samples = mean_samples(made_batches(own, dataset, small), length)
    feed = Feed(build_loader(workload, data, small, scratch))
    first = feed.start()
    model = build_model(workload, small, device)
    optimizer = build_optimizer(workload, model, small.lr)
    objects = _with(objects, **_switched_on(optimizer, device))
    trainer = make_trainer(model, optimizer, infer_step(workload, first.batch), small, device)
    has_unused, has_sparse = _train_once(trainer, first.batch)
    fewest = _LEAST_BATCHES if device.kind in GRAPH_KINDS else 1  # elsewhere nothing depends on the shapes
    items, shapes = _look(feed, first, fewest)
    is_iterable, inputs = is_stream(dataset), tensors_of(first.batch)
    fixed = _fixed_size(workload, data, feed.loader, first.samples)
    if fixed is not None and objects.has_loader:
        objects = _with(objects, micro_batch_size=fixed)
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return WorkloadFacts(
        dataset_length=length,
        is_iterable=is_iterable,
        is_sharded=not is_iterable or is_tf_data or workload.worker_init_fn is not None or is_sharded(dataset),
        is_tf_data=is_tf_data,
        fixed_batch_size=fixed,
        has_token_budget=takes_budget(own),
        budget_samples=budget_samples,
        has_4d_input=any(tensor.ndim == IMAGE_DIMS and tensor.is_floating_point() for tensor in inputs),
        parameter_count=sum(parameter.numel() for parameter in parameters),
        trainable_parameter_count=sum(parameter.numel() for parameter in trained),
        gradient_bytes=sum(parameter.nbytes for parameter in trained),
        has_buffers=any(True for _ in model.buffers()),
        has_unused_parameters=has_unused,
        has_convolutions=has_convolutions([model]),
        has_fixed_shapes=len({*shapes}) == 1 if len(shapes) >= _LEAST_BATCHES else None,
        is_deterministic=is_deterministic(),
        slow_tail_fraction=None if items is None else items.slow_tail_fraction,
        cores_per_item=None if items is None else items.cores_per_item,
        optimizer=optimizer_facts(optimizer, can_fuse=not has_sparse and can_fuse(optimizer)),
        step_source=trainer.step.source,
        objects=objects,
    )


def _switched_on(optimizer: torch.optim.Optimizer, device: Device) -> dict[str, bool]:
    """What the user's own code has switched on by now, under the names of settings."""
    found = {
        "fused": is_fused(optimizer) and can_fuse(optimizer),  # else trials leave it as it is
        "cudnn_benchmark": device.kind in GRAPH_KINDS and torch.backends.cudnn.benchmark,
    }
    return {name: True for name, is_on in found.items() if is_on}


def _look(feed: Feed, first: Delivery, fewest: int) -> tuple[FirstItems | None, list[_Shapes]]:
    """A look at the items, with a warm page cache behind it, and the shapes of so many batches, or of more.

    A tf.data pipeline has no items of its own.
    """
    shapes: list[_Shapes] = []
    items = None

    def warm() -> None:
        shapes[:] = warm_page_cache(feed, first, fewest=fewest)

    if isinstance(feed.loader, TfLoader):
        warm()
    else:
        items = look_at_items(feed.loader, feed.start_s + feed.first_wait_s, warm)
    if not shapes:  # the page cache was warm
        shapes = warm_page_cache(feed, first, fewest=fewest, longest_s=0.0)
    return items, shapes


def _objects(workload: Workload, data: Any, config: TrainingConfig) -> ObjectFacts:
    """What the user's loader and optimizer are set to; `config` is the baseline that was given."""
    found: dict[str, Any] = {}
    beside: tuple[str, ...] = ()
    if isinstance(data, DataLoader):
        beside = tuple(name for name in BESIDE_A_LOADER if getattr(workload, name) is not None)
        found = observed_settings(data)
        if workload.batch_sampler is not None:  # it makes the batches, of the baseline's size
            found.pop("micro_batch_size", None)
    if isinstance(workload.optimizer, torch.optim.Optimizer):
        lr = base_lr(workload.optimizer)
        found |= {} if lr is None else {"lr": lr}
    known = ObjectFacts(
        observed=TrainingConfig(micro_batch_size=config.micro_batch_size, lr=config.lr),
        has_loader=isinstance(data, DataLoader),
        drop_last=drops_last(data) if isinstance(data, DataLoader) else None,
        beside=beside,
    )
    return _with(known, **found)


def _with(objects: ObjectFacts, **found: Any) -> ObjectFacts:
    observed = TrainingConfig.model_validate(objects.observed.model_dump() | found)
    return objects.model_copy(update={"observed": observed, "names": (*objects.names, *found)})


def _fixed_size(workload: Workload, data: Any, loader: DataLoader[Any] | TfLoader, first: int) -> int | None:
    """Samples of a batch that only the user's batch sampler, or a dataset that makes batches, decides; else None."""
    is_own = workload.batch_sampler is None and isinstance(data, DataLoader) and fixed_batches(data)
    if not is_own and (workload.batch_sampler is None or is_factory(workload.batch_sampler)):
        return None
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) and size > 0 else max(1, first)


def _train_once(trainer: Trainer, batch: Any) -> tuple[bool, bool]:
    """Train one step, to find out that it works.

    Whether the memory suffices is for the baseline's trial to find out.

    Returns:
        Whether some parameters get no gradient (DDP must know that), and whether some get a sparse one.
    """
    wanted = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    reached, sparse = set[Tensor](), set[Tensor]()

    def note_gradient(parameter: Tensor) -> None:
        reached.add(parameter)
        if parameter.grad is not None and parameter.grad.is_sparse:
            sparse.add(parameter)

    with ExitStack() as hooks:
        for parameter in wanted:
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(note_gradient))  # type: ignore[no-untyped-call] # torch
        try:
            trainer.train(batch)
            trainer.device.synchronize()
        except Exception as error:
            if shortage_of(error) is None:
                raise
            trainer.optimizer.zero_grad(set_to_none=True)
            return False, bool(sparse)
    return reached < set(wanted), bool(sparse)


class _WatchedInfo(torch_worker.WorkerInfo):
    """A worker's info that notes whether the dataset asks which worker of how many it is in."""

    was_asked = False

    def __getattribute__(self, name: str) -> Any:
        if name in {"id", "num_workers"}:
            type(self).was_asked = True
        return object.__getattribute__(self, name)


def is_sharded(dataset: Any) -> bool:
    """Whether an iterable dataset shares its items out: it asks for its worker, or two workers get different items.

    This process takes the part of each worker for one item. Source: torch.utils.data.get_worker_info.
    """
    firsts = []
    _WatchedInfo.was_asked = False
    for worker in range(2):
        torch_worker._worker_info = _WatchedInfo(id=worker, num_workers=2, seed=0, dataset=dataset)  # noqa: SLF001 # type: ignore[attr-defined] # what get_worker_info() answers
        try:
            seed_all(0)
            firsts.append(next(iter(dataset), None))
        finally:
            torch_worker._worker_info = None  # noqa: SLF001 # type: ignore[attr-defined] # as above
    if _WatchedInfo.was_asked:
        return True
    ours, theirs = map(_comparable, firsts)
    return len(ours) != len(theirs) or not all(map(_is_equal, ours, theirs))


def _comparable(item: Any) -> list[Any]:
    """An item's tensors and arrays; where it has none, all that it holds."""
    leaves = list(leaves_of(item))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor | np.ndarray)] or leaves


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two parts of items are equal; what can't be compared counts as different, as two objects are."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    with suppress(TypeError, ValueError):  # arrays of objects that compare to arrays
        return bool(np.array_equal(a, b))
    return False


def warm_page_cache(
    feed: BatchFeed, first: Delivery | None = None, *, fewest: int = 1, longest_s: float = _WARMING_MAX_S
) -> list[_Shapes]:
    """Take batches for an epoch, until for a while nothing more comes from the disk, or for five seconds.

    Args:
        feed: Whose batches.
        first: The batch that it began with.
        fewest: Batches that are taken in any case, the first among them, as far as the epoch and five seconds go.
        longest_s: When to stop, with so many.

    Returns:
        The shapes of each batch of this epoch, the first among them; without its last one, where that is a short one.
    """
    begun = checked = perf_counter()
    read, seen = bytes_from_disk(), [] if first is None else [(first.samples, _shapes_of(first))]
    while not (delivery := feed.take()).is_restart:
        seen.append((delivery.samples, _shapes_of(delivery)))
        now = perf_counter()
        if now - begun >= (longest_s if len(seen) >= fewest else _WARMING_MAX_S):
            break
        if now - checked >= _WARMING_PAUSE_S:
            read, before, checked = bytes_from_disk(), read, now
            if read == before and len(seen) >= fewest:
                break
    if len(seen) > 1 and seen[-1][0] < seen[0][0]:
        seen.pop()
    return [shapes for _, shapes in seen]


def _shapes_of(delivery: Delivery) -> _Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_of(delivery.batch))
