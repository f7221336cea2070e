"""Load a tf.data pipeline as a dataset, with batches as torch tensors.

Comes in: the user's function that builds the pipeline, and a configuration. Goes out: a loader, for
trials and for the user's own loop. TensorFlow and torch are imported when a loader is made.

tf.data uses threads in place of worker processes: `num_workers` is the pipeline's
num_parallel_calls, with as many threads of its own (the shared pool has one per core, too few for
calls that wait); `prefetch_factor` is its prefetch buffer, in batches. A counter in front of that
buffer knows how many are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from math import ceil
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError

if TYPE_CHECKING:
    from autotune.config.training_config import TrainingConfig


@dataclass(frozen=True, slots=True)
class TfData:
    """A tf.data pipeline, also one of TFDS, as the dataset of a torch model.

    It draws and batches by itself: settings such as collate_fn, sampler and multiprocessing_context
    can't be combined with it. Each rank of a group builds it, so shard the data by
    `dataset.shard(WORLD_SIZE, RANK)`, from the environment variables of these names.

    Args:
        build: build(batch_size, num_parallel_calls) -> tf.data.Dataset of batches. Pass
            `num_parallel_calls` to `map` and `interleave`; None means sequential, as in tf.data.
            (`interleave` uses at most cycle_length.) Do not prefetch: that is added at the end.

    Raises:
        ConfigError: build does not take these two arguments, or tensorflow is not installed.
    """

    build: Callable[[int, int | None], Any]

    def __post_init__(self) -> None:
        try:
            signature(self.build).bind(1, None)
        except TypeError as error:
            raise ConfigError(
                "TfData's build must be a function of (batch_size, num_parallel_calls) that returns "
                f"a tf.data.Dataset, but got {type(self.build).__qualname__} ({error})"
            ) from error
        _require_tensorflow()

    def loader(self, config: TrainingConfig) -> TfLoader:
        """Return the loader that trials use, for your own loop: batches of torch tensors per epoch.

        Args:
            config: A TrainingConfig, such as `result.best` or one from `autotune.load`.

        Raises:
            ConfigError: tensorflow is not installed or holds the GPU, or what build returns can't
                be used.
        """
        return TfLoader(self, config)

    def length(self, batch_size: int) -> int | None:
        """Return the samples per epoch; None if unknown, infinite, or counted in batches.

        Args:
            batch_size: Second batch size to build the pipeline for, besides 1; both must agree on
                the length.
        """
        _import_tensorflow()
        size = max(2, batch_size)
        samples, batches = (int(self.build(of, None).cardinality()) for of in (1, size))
        # The last batch may be dropped.
        is_of_samples = samples // size <= batches <= ceil(samples / size)
        return samples if samples >= 0 and is_of_samples else None


class TfLoader:
    """Batches of a pipeline as torch tensors, which share memory with TensorFlow's.

    Strings become lists of bytes. Each iteration is an epoch. Training must not change a batch in
    place if the pipeline caches whole batches.

    Args:
        data: The pipeline's builder.
        config: The settings.
        threads: Threads of the pipeline; None: num_workers, or TensorFlow's shared pool without
            workers.
    """

    sampler = batch_sampler = collate_fn = None  # as of a DataLoader: the pipeline's own business

    def __init__(self, data: TfData, config: TrainingConfig, threads: int | None = None) -> None:
        self._tf = tf = _import_tensorflow()
        self.dataset = data
        self.batch_size = config.loader_batch_size
        self.num_workers = config.num_workers
        self.prefetch_factor = config.batches_per_worker or None
        self.in_order = config.in_order
        self.pin_memory = config.pin_memory
        pipeline = data.build(self.batch_size, self.num_workers or None)
        _check(tf, pipeline, self.batch_size)
        count = int(pipeline.cardinality())
        self._batches = count if count >= 0 else None
        self.samples = 0
        """Samples in the batch returned last."""
        self._counted_by = _batch_tensor(tf, pipeline, self.batch_size)
        self._made = tf.Variable(0, dtype=tf.int64, trainable=False)
        """Batches that have reached the prefetch buffer, in all epochs."""
        self._is_tuple = type(pipeline.element_spec) is tuple
        threads = threads or self.num_workers or None
        options = _options(tf, pipeline, threads, in_order=self.in_order)
        if self.prefetch_factor is not None:
            pipeline = pipeline.map(self._counted).prefetch(self.prefetch_factor)
        self._pipeline = pipeline.with_options(options)

    def __iter__(self) -> TfBatches:
        return TfBatches(self, self._tf, self._pipeline, self._made)

    def note_samples(self, element: Any) -> None:
        """Record the number of samples in an element."""
        shape = self._tf.nest.flatten(element)[self._counted_by].shape
        self.samples = int(shape[0]) if shape.rank else 1

    def __len__(self) -> int:
        if self._batches is None:
            raise TypeError("the pipeline does not know how many batches an epoch has")
        return self._batches

    @property
    def queue_capacity(self) -> int:
        """Most batches that can be ready: those of the prefetch buffer, and one per parallel call."""
        return 0 if self.prefetch_factor is None else self.prefetch_factor + self.num_workers

    def _counted(self, *element: Any) -> Any:
        # map takes a tuple apart, also one of one part.
        whole = element if self._is_tuple else element[0]
        with self._tf.control_dependencies([self._made.assign_add(1)]):
            return self._tf.nest.map_structure(self._tf.identity, whole)


class TfBatches:
    """The batches of one epoch, with the number that are ready."""

    def __init__(self, loader: TfLoader, tf: Any, pipeline: Any, made: Any) -> None:
        self._loader = loader
        self._tf = tf
        self._made, self._taken = made, int(made.numpy())
        self._elements: Any = iter(pipeline)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        element = next(self._elements)
        self._taken += 1
        self._loader.note_samples(element)
        return self._tf.nest.map_structure(self._as_torch, element)

    def ready(self) -> int:
        """Batches in the prefetch buffer; 0 without one."""
        return max(0, int(self._made.numpy()) - self._taken)

    def close(self) -> None:
        """Stop the pipeline's threads after waiting for running calls."""
        self._elements = iter(())

    def _as_torch(self, tensor: Any) -> Any:
        import torch.utils.dlpack

        # DLPack has no texts, and TensorFlow would abort the process.
        if tensor.dtype == self._tf.string:
            return tensor.numpy().tolist()
        shared = torch.utils.dlpack.from_dlpack(self._tf.experimental.dlpack.to_dlpack(tensor))
        if self._loader.pin_memory and torch.accelerator.is_available():
            return shared.pin_memory()
        return shared


def _options(tf: Any, pipeline: Any, threads: int | None, *, in_order: bool) -> Any:
    """Return options that keep TensorFlow from adding buffers; the user's own options stay.

    Source: tf.data.experimental.OptimizationOptions.inject_prefetch, on by default.
    """
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    if threads is not None and pipeline.options().threading.private_threadpool_size is None:
        options.threading.private_threadpool_size = threads
    if not in_order:
        options.deterministic = False
    return options


def _check(tf: Any, pipeline: Any, batch_size: int) -> None:
    """Check that a pipeline can be trained on.

    Raises:
        ConfigError: It is not a pipeline of batches of tensors, or prefetches batches itself.
    """
    rule = "TfData's build must return a tf.data.Dataset of batches of tensors"
    if not isinstance(pipeline, tf.data.Dataset):
        kind = f"{type(pipeline).__module__}.{type(pipeline).__qualname__}"
        raise ConfigError(f"{rule}, but returned {kind}; return the pipeline")
    if any("PrefetchDataset" in type(part).__name__ for part in _behind_batches(pipeline)):
        raise ConfigError(
            "TfData puts the prefetch of batches itself, as large as prefetch_factor, but build "
            "returned a pipeline "
            "that has one behind its batches; leave it out"
        )
    specs = tf.nest.flatten(pipeline.element_spec)
    for spec in specs:
        if not isinstance(spec, tf.TensorSpec):
            raise ConfigError(
                f"{rule}, but its elements hold a {type(spec).__name__}; make tensors of it "
                f"(to_tensor())"
            )
    if not {None, batch_size} & {*_first_sizes(specs)}:
        raise ConfigError(
            f"{rule}, but got elements of {specs} for batch_size={batch_size}; batch it by "
            f"batch_size"
        )


def _first_sizes(specs: list[Any]) -> list[int | None]:
    """Return the first dimension of each tensor; None if it varies, 0 if there is none."""
    sizes: list[int | None] = []
    for spec in specs:
        if spec.shape.rank is None:
            sizes.append(None)
        else:
            sizes.append(spec.shape[0] if spec.shape.rank else 0)
    return sizes


def _batch_tensor(tf: Any, pipeline: Any, batch_size: int) -> int:
    """Return the index of the tensor whose first dimension is the number of samples.

    A tensor that always has the batch size is preferred to those that vary.
    """
    sizes = _first_sizes(tf.nest.flatten(pipeline.element_spec))
    return sizes.index(batch_size if batch_size in sizes else None)


def _behind_batches(pipeline: Any) -> Iterator[Any]:
    """Yield the operations of a pipeline that pass on whole batches, the last one first."""
    yield pipeline
    if not any(maker in type(pipeline).__name__.replace("Unbatch", "") for maker in _BATCH_MAKERS):
        for part in pipeline._inputs():  # noqa: SLF001 - no public way to them
            yield from _behind_batches(part)


_BATCH_MAKERS = ("Batch", "batch", "FlatMap", "Interleave", "GroupByWindow")
"""Parts of class names of operations before which elements may not be batches."""


def _import_tensorflow() -> Any:
    """Import TensorFlow without access to the GPU, whose memory it would take.

    Raises:
        ConfigError: It is not installed, or uses the GPU already.
    """
    _require_tensorflow()
    import tensorflow as tf

    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError as error:
        if tf.config.get_visible_devices("GPU"):
            raise ConfigError(
                "TensorFlow must leave the GPU to torch, but had started on it before a loader was "
                "made; call "
                "tf.config.set_visible_devices([], 'GPU') right after import tensorflow"
            ) from error
    return tf


def _require_tensorflow() -> None:
    if find_spec("tensorflow") is None:
        raise ConfigError(
            "TfData needs the package tensorflow, which is not installed here; pip install tensorflow-cpu"
        )
