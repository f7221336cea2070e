"""Probe a workload: train one small step and time its first items, for the facts of the search space.

In: a workload, built once. Out: WorkloadFacts. Anything wrong with the workload shows here. The
probe also reads batches until the page cache is warm: otherwise the first trial, the baseline,
would pay for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data._utils import worker as torch_worker

from autotune.apply.cores import usable_cores
from autotune.apply.loader import IMAGE_DIMS, drops_last, fixed_batches, observed_settings
from autotune.apply.prepare import base_lr, can_fuse, is_fused
from autotune.config.environment import GRAPH_KINDS
from autotune.config.plan import WITH_A_LOADER, ObjectFacts, Workload, WorkloadFacts
from autotune.config.tf_data import TfData, TfLoader
from autotune.config.training_config import TrainingConfig
from autotune.worker.batch import leaves_of, tensors_of
from autotune.worker.build import (
    build_dataset,
    build_model,
    build_optimizer,
    dataset_of,
    is_stream,
    length_of,
    optimizer_facts,
    seed_all,
)
from autotune.worker.device import Device, bytes_from_disk, has_convolutions, is_deterministic
from autotune.worker.extras.item_costs import TimedItems, item_fetchers, slow_tail, time_items
from autotune.worker.failures import shortage_of
from autotune.worker.feed import BatchFeed, Delivery, Feed
from autotune.worker.loader import (
    build_loader,
    is_factory,
    made_batches,
    mean_samples,
    takes_batch_size,
    takes_budget,
)
from autotune.worker.step import Trainer, infer_step, make_trainer, torch_threads

# The first items: their slow tail, and the cores that an item keeps busy
#
# The random states of Python, NumPy and torch are restored afterwards; those of the user's own
# objects are not: the items come from their sampler, and a stream is begun again.


_PROBE_S = 0.75
"""Seconds to time items, without the last one; a cold page cache takes 5 s. Source: our
convention."""
_FEWEST_ITEMS = 5
"""Number of items below which a median means nothing. Source: our convention."""
_REBUILD_S = 2.0
"""Seconds of the first batch from which a stream, or a sampler of the user's, is not begun again.
Source: our convention."""
_LEAST_WARM_S = 0.1
"""Seconds of reading without a byte from the disk after which the page cache counts as warm.
Source: our convention."""
_OTHERS_FRACTION = 0.05
"""Share of an item's time below which the CPU time of other threads is ignored. Source: our
convention."""


def probe_items(
    loader: DataLoader[Any], first_batch_s: float, warm: Callable[[], None]
) -> TimedItems | None:
    """Time items for under a second; a second time if the page cache was not warm.

    Args:
        loader: A loader of this process, without workers; it is not iterated.
        first_batch_s: Seconds from its start to its first batch. A stream, and a sampler that is
            not torch's, would be begun again, which is not done if that takes long.
        warm: Function that reads until the page cache is warm; not called if it proves to be.

    Returns:
        The items; None if they are too slow, or the user's code raises: a step has worked, so
        trials report errors in other items.
    """
    if first_batch_s > _REBUILD_S and _must_begin_again(loader):
        warm()
        return None
    begun = perf_counter()
    timed = _timed(loader)
    if timed is None or timed.disk_bytes > 0 or perf_counter() - begun < _LEAST_WARM_S:
        warm()
        timed = timed and _timed(loader)
    if timed is None or len(timed.seconds) < _FEWEST_ITEMS or sum(timed.seconds) <= 0:
        return None
    return timed


def cores_per_item(timed: TimedItems) -> float:
    """Return the number of cores that an item keeps busy while it is computed.

    Waits for files are left out, so that they hide no threads. If the item's own thread does too
    little to show how many others there are, return the cores busy over all of its time. If only
    that thread works, return at most one: reading the clocks adds to items of some microseconds.
    """
    seconds = sum(timed.seconds)
    own_s = timed.own_cpu_s
    least_s = _OTHERS_FRACTION * seconds
    computed_s = own_s + timed.others_cpu_s
    busy = timed.cpu_s / seconds
    if timed.cpu_s - own_s < least_s:
        return min(1.0, busy)
    if timed.others_cpu_s < least_s or computed_s > usable_cores() * own_s:
        return busy
    return computed_s / own_s


def _must_begin_again(loader: DataLoader[Any]) -> bool:
    """Return whether more items need a new start of a stream, or of a sampler of the user's."""
    if is_stream(loader.dataset) or loader.batch_size is None:
        return True
    return type(loader.sampler) not in {RandomSampler, SequentialSampler}


def _timed(loader: DataLoader[Any]) -> TimedItems | None:
    """Time some items as a loader worker makes them; return None if they are too slow, or fail."""
    begun = perf_counter()
    try:
        with _random_states_kept(), torch_threads(1):  # as torch sets it in loader workers
            fetchers = item_fetchers(loader)
            next(fetchers)()
            if perf_counter() - begun > _PROBE_S:
                return None
            return time_items(fetchers, 0, begun + _PROBE_S)
    except Exception:  # noqa: BLE001 - user code may raise anything at an item that no step has needed
        return None


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the global random states of Python, NumPy and torch (on the CPU) afterwards."""
    python = random.getstate()
    numpy = np.random.get_state()
    own = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(own)


# The probe


_WARMING_MAX_S = 5.0
"""Seconds to warm the page cache; a larger data set is read from the disk in trials too. Source:
our convention."""
_WARMING_PAUSE_S = 0.3
"""Seconds between two readings of the disk's counter. Source: our convention."""
_LEAST_BATCHES = 3
"""Number of batches below which their shapes mean nothing. Source: our convention."""
_Shapes = tuple[tuple[int, ...], ...]
"""Shapes of a batch's tensors, in order."""


def probe(
    workload: Workload, config: TrainingConfig, device: Device, scratch: Path
) -> WorkloadFacts:
    """Return the facts of a workload, found by running one small step of it.

    Args:
        workload: The workload.
        config: The baseline that the user gave.
        device: The device to train on.
        scratch: A folder for temporary files.

    Raises:
        WorkloadFault: Something about the workload can't be used.
    """
    # Read what the user's objects are set to.
    data = build_dataset(workload)
    dataset = dataset_of(data)
    own_settings = _observed(workload, data)
    observed = config.model_copy(update=own_settings)
    size = observed.micro_batch_size
    lr = observed.lr
    is_tf_data = isinstance(dataset, TfData)
    length = dataset.length(size) if isinstance(dataset, TfData) else length_of(dataset)
    small = TrainingConfig(
        micro_batch_size=size if length is None else min(size, length),
        max_tokens=config.max_tokens,
        lr=lr,
    )
    # Count the samples of a token budget first: later random draws depend on the time taken.
    own = workload.batch_sampler
    budget_samples = None
    if takes_budget(own) and not takes_batch_size(own):
        budget_samples = mean_samples(made_batches(own, dataset, small), length)

    # Train one step, then time items and warm the page cache.
    feed = Feed(build_loader(workload, data, small, scratch))
    first = feed.start()
    model = build_model(workload, small, device)
    optimizer = build_optimizer(workload, model, small.lr)
    switched_on = _switched_on(optimizer, device)
    trainer = make_trainer(model, optimizer, infer_step(workload, first.batch), small, device)
    has_unused, has_sparse = _train_once(trainer, first.batch)
    fewest = _LEAST_BATCHES if device.kind in GRAPH_KINDS else 1  # else shapes do not matter
    items, shapes = _first_items(feed, first, fewest)

    # Gather the facts.
    is_iterable = is_stream(dataset)
    inputs = tensors_of(first.batch)
    fixed = _fixed_size(workload, data, feed.loader, first.samples)
    is_loader = isinstance(data, DataLoader)
    found = own_settings | switched_on
    if fixed is not None and is_loader:
        found["micro_batch_size"] = fixed
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    has_images = any(tensor.ndim == IMAGE_DIMS and tensor.is_floating_point() for tensor in inputs)
    return WorkloadFacts(
        dataset_length=length,
        is_iterable=is_iterable,
        is_sharded=not is_iterable
        or is_tf_data
        or workload.worker_init_fn is not None
        or is_sharded(dataset),
        is_tf_data=is_tf_data,
        fixed_batch_size=fixed,
        has_token_budget=takes_budget(own),
        budget_samples=budget_samples,
        has_4d_input=has_images,
        parameter_count=sum(parameter.numel() for parameter in parameters),
        trainable_parameter_count=sum(parameter.numel() for parameter in trained),
        gradient_bytes=sum(parameter.nbytes for parameter in trained),
        has_buffers=any(True for _ in model.buffers()),
        has_unused_parameters=has_unused,
        has_convolutions=has_convolutions([model]),
        has_fixed_shapes=len({*shapes}) == 1 if len(shapes) >= _LEAST_BATCHES else None,
        is_deterministic=is_deterministic(),
        slow_tail_fraction=None if items is None else slow_tail(items.seconds),
        cores_per_item=None if items is None else cores_per_item(items),
        optimizer=optimizer_facts(optimizer, can_fuse=not has_sparse and can_fuse(optimizer)),
        step_source=trainer.step.source,
        objects=ObjectFacts(
            observed=TrainingConfig.model_validate({"micro_batch_size": size, "lr": lr} | found),
            names=tuple(found),
            has_loader=is_loader,
            drop_last=drops_last(data) if is_loader else None,
            replaced_arguments=tuple(
                name for name in WITH_A_LOADER if is_loader and getattr(workload, name) is not None
            ),
        ),
    )


def _switched_on(optimizer: torch.optim.Optimizer, device: Device) -> dict[str, bool]:
    """Return the settings that the user's own code has switched on."""
    found: dict[str, bool] = {}
    if is_fused(optimizer) and can_fuse(optimizer):  # otherwise trials leave it unchanged
        found["fused"] = True
    if device.kind in GRAPH_KINDS and torch.backends.cudnn.benchmark:
        found["cudnn_benchmark"] = True
    return found


def _first_items(
    feed: Feed, first: Delivery, fewest: int
) -> tuple[TimedItems | None, list[_Shapes]]:
    """Time the first items and warm the page cache.

    Args:
        feed: The workload's feed.
        first: Its first batch.
        fewest: Number of batches to read at least.

    Returns:
        The items (a tf.data pipeline has none), and the shapes of the batches read.
    """
    shapes: list[_Shapes] = []
    items = None

    def warm() -> None:
        shapes[:] = warm_page_cache(feed, first, fewest=fewest)

    if isinstance(feed.loader, TfLoader):
        warm()
    else:
        items = probe_items(feed.loader, feed.start_s + feed.first_wait_s, warm)
    if not shapes:  # the page cache was warm
        shapes = warm_page_cache(feed, first, fewest=fewest, longest_s=0.0)
    return items, shapes


def _observed(workload: Workload, data: Any) -> dict[str, Any]:
    """Return the settings of the user's own loader and optimizer."""
    found: dict[str, Any] = {}
    if isinstance(data, DataLoader):
        found = observed_settings(data)
        if workload.batch_sampler is not None:  # it makes the batches, of the baseline's size
            found.pop("micro_batch_size", None)
    if isinstance(workload.optimizer, torch.optim.Optimizer):
        lr = base_lr(workload.optimizer)
        found |= {} if lr is None else {"lr": lr}
    return found


def _fixed_size(
    workload: Workload, data: Any, loader: DataLoader[Any] | TfLoader, first: int
) -> int | None:
    """Return the batch size if only the user's sampler, or a dataset of batches, sets it; else None."""
    is_own = workload.batch_sampler is None and isinstance(data, DataLoader) and fixed_batches(data)
    if not is_own and (workload.batch_sampler is None or is_factory(workload.batch_sampler)):
        return None
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) and size > 0 else max(1, first)


def _train_once(trainer: Trainer, batch: Any) -> tuple[bool, bool]:
    """Train one step, to check that it works.

    A lack of memory is no error here: the baseline's trial reports it.

    Returns:
        True if some parameters get no gradient, which DDP must know; and True if some get a sparse
        one.
    """
    wanted = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    reached = set[Tensor]()
    sparse = set[Tensor]()

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
    """A worker's info that records if the dataset asks for the worker's number."""

    was_asked = False

    def __getattribute__(self, name: str) -> Any:
        if name in {"id", "num_workers"}:
            type(self).was_asked = True
        return object.__getattribute__(self, name)


def is_sharded(dataset: Any) -> bool:
    """Return whether an iterable dataset splits its items between workers.

    It does if it asks for its worker, or if two workers get different first items. This process
    plays each worker for one item. Source: torch.utils.data.get_worker_info.
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
    """Return an item's tensors and arrays; if it has none, all of its parts."""
    leaves = list(leaves_of(item))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor | np.ndarray)] or leaves


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two parts of items are equal; False if they can't be compared."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    with suppress(TypeError, ValueError):  # arrays of objects that compare to arrays
        return bool(np.array_equal(a, b))
    return False


def warm_page_cache(
    feed: BatchFeed,
    first: Delivery | None = None,
    *,
    fewest: int = 1,
    longest_s: float = _WARMING_MAX_S,
) -> list[_Shapes]:
    """Take batches until nothing more comes from the disk; at most an epoch, or five seconds.

    Args:
        feed: The feed to take batches from.
        first: The batch that it began with.
        fewest: Number of batches to take at least, `first` included, within the epoch and five
            seconds.
        longest_s: Seconds after which to stop once there are that many.

    Returns:
        The shapes of each batch of this epoch, `first` included; without a last, smaller one.
    """
    begun = checked = perf_counter()
    read = bytes_from_disk()
    seen = [] if first is None else [(first.samples, _shapes_of(first))]
    while not (delivery := feed.take()).is_restart:
        seen.append((delivery.samples, _shapes_of(delivery)))
        now = perf_counter()
        has_enough = len(seen) >= fewest
        if now - begun >= (longest_s if has_enough else _WARMING_MAX_S):
            break
        if now - checked >= _WARMING_PAUSE_S:
            before = read
            read = bytes_from_disk()
            checked = now
            if read == before and has_enough:
                break
    if len(seen) > 1 and seen[-1][0] < seen[0][0]:
        seen.pop()
    return [shapes for _, shapes in seen]


def _shapes_of(delivery: Delivery) -> _Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_of(delivery.batch))
