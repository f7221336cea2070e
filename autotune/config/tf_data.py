"""A tf.data pipeline as a dataset: built for a configuration's settings, its elements handed to torch.

Comes in: a function of the user's that builds the pipeline, and a configuration. Goes out: a
loader, the same for trials and for the user's own loop. TensorFlow and torch are imported when a
loader is made.

What a DataLoader does by worker processes, tf.data does by threads: `num_workers` is the pipeline's
num_parallel_calls, and as many threads of its own (the pool that pipelines share has one a core,
too few for what waits); `prefetch_factor` is its prefetch buffer, in batches. A counter in front of
that buffer says how many lie ready in it.
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
    """A tf.data pipeline (and so one of TFDS) to train a torch model on, in place of a dataset.

    The settings of a DataLoader that have no meaning for it (collate_fn, sampler,
    multiprocessing_context, ...) can't stand beside it: shuffling, batching, and what an element
    is, are the pipeline's own. A group's ranks each build it: share the data out by
    `dataset.shard(WORLD_SIZE, RANK)`, by the environment's variables of these names.

    Args:
        build: build(batch_size, num_parallel_calls) -> tf.data.Dataset of batches.
            `num_parallel_calls` goes to `map`
            and `interleave` as it is: None is sequential, in tf.data's own words. (`interleave`
                takes no more of them
            than its cycle_length.) It prefetches no batches: that is put at its end.

    Raises:
        ConfigError: build is no function of these two, or tensorflow is not installed.
    """

    build: Callable[[int, int | None], Any]

    def __post_init__(self) -> None:
        if not callable(self.build):
            raise ConfigError(
                "TfData takes a function build(batch_size, num_parallel_calls) that returns a "
                "tf.data.Dataset, but got "
                f"{type(self.build).__module__}.{type(self.build).__qualname__}; pass the function "
                f"that makes it"
            )
        try:
            signature(self.build).bind(1, None)
        except TypeError as error:
            raise ConfigError(
                "TfData's build must take (batch_size, num_parallel_calls), but "
                f"{getattr(self.build, '__qualname__', self.build)} does not ({error})"
            ) from error
        if find_spec("tensorflow") is None:
            raise _not_installed()

    def loader(self, config: TrainingConfig) -> TfLoader:
        """What trials train on in a configuration, for your own loop: batches of torch tensors, epoch after epoch.

        Args:
            config: A TrainingConfig, such as a search's `best` or what `autotune.load` reads.

        Raises:
            ConfigError: tensorflow is not installed or holds the GPU, or what build returns can't
                be used.
        """
        return TfLoader(self, config)

    def length(self, batch_size: int) -> int | None:
        """Samples of an epoch; None where the pipeline does not know, does not end, or counts batches, not samples.

        Args:
            batch_size: What the pipeline is built for beside batches of one sample: both must agree
                on the length.
        """
        _import_tensorflow()
        size = max(2, batch_size)
        samples, batches = (int(self.build(of, None).cardinality()) for of in (1, size))
        is_of_samples = (
            samples // size <= batches <= ceil(samples / size)
        )  # the last batch may be dropped
        return samples if samples >= 0 and is_of_samples else None


class TfLoader:
    """Batches of a pipeline as torch tensors, which share their memory with TensorFlow's.

    Texts become lists of bytes. Each iteration is an epoch. What training writes into a batch in
    place is written into TensorFlow's tensor: it would show in a pipeline that caches whole
    batches.

    Args:
        data: What builds the pipeline.
        config: The settings.
        threads: Threads of the pipeline; None: as many as workers, and without workers those that
            TensorFlow shares.
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
        """Of the batch that was handed out last."""
        self._counted_by = _batch_tensor(tf, pipeline, self.batch_size)
        self._made = tf.Variable(0, dtype=tf.int64, trainable=False)
        """Batches that have come to the prefetch buffer, of all epochs."""
        self._is_tuple = type(pipeline.element_spec) is tuple
        threads = threads or self.num_workers or None
        options = _options(tf, pipeline, threads, in_order=self.in_order)
        if self.prefetch_factor is not None:
            pipeline = pipeline.map(self._counted).prefetch(self.prefetch_factor)
        self._pipeline = pipeline.with_options(options)

    def __iter__(self) -> TfBatches:
        return TfBatches(self, self._tf, self._pipeline, self._made)

    def note_samples(self, element: Any) -> None:
        """Note how many samples an element of TensorFlow's has."""
        shape = self._tf.nest.flatten(element)[self._counted_by].shape
        self.samples = int(shape[0]) if shape.rank else 1

    def __len__(self) -> int:
        if self._batches is None:
            raise TypeError("the pipeline does not know how many batches an epoch has")
        return self._batches

    @property
    def queue_capacity(self) -> int:
        """Batches that may lie ready at most: those of the prefetch buffer, and one of each parallel call."""
        return 0 if self.prefetch_factor is None else self.prefetch_factor + self.num_workers

    def _counted(self, *element: Any) -> Any:
        whole = (
            element if self._is_tuple else element[0]
        )  # map takes a tuple apart, also one of one part
        with self._tf.control_dependencies([self._made.assign_add(1)]):
            return self._tf.nest.map_structure(self._tf.identity, whole)


class TfBatches:
    """The batches of one epoch, and how many lie ready."""

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
        """Batches in the prefetch buffer; 0 where there is none."""
        return max(0, int(self._made.numpy()) - self._taken)

    def close(self) -> None:
        """End the pipeline's threads; waits for the calls that run in them."""
        self._elements = iter(())

    def _as_torch(self, tensor: Any) -> Any:
        import torch.utils.dlpack

        if (
            tensor.dtype == self._tf.string
        ):  # DLPack has no texts, and TensorFlow would abort the process
            return tensor.numpy().tolist()
        shared = torch.utils.dlpack.from_dlpack(self._tf.experimental.dlpack.to_dlpack(tensor))
        return (
            shared.pin_memory()
            if self._loader.pin_memory and torch.accelerator.is_available()
            else shared
        )


def _options(tf: Any, pipeline: Any, threads: int | None, *, in_order: bool) -> Any:
    """The options of a pipeline whose buffers are those that are set, and no others; the user's own stay as they are.

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
    """Refuse what can't be trained on.

    Raises:
        ConfigError: it is no pipeline of batches of tensors, or prefetches batches itself.
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
    """The first dimension of each tensor; None where it varies, 0 where there is none."""
    return [
        None if spec.shape.rank is None else spec.shape[0] if spec.shape.rank else 0
        for spec in specs
    ]


def _batch_tensor(tf: Any, pipeline: Any, batch_size: int) -> int:
    """Which of an element's tensors, in order, tells its samples.

    One that always has the batch size, if there is one: what varies beside it is of another kind.
    """
    sizes = _first_sizes(tf.nest.flatten(pipeline.element_spec))
    return sizes.index(batch_size if batch_size in sizes else None)


def _behind_batches(pipeline: Any) -> Iterator[Any]:
    """The parts of a pipeline that hand on whole batches, the last one first."""
    yield pipeline
    if not any(maker in type(pipeline).__name__.replace("Unbatch", "") for maker in _BATCH_MAKERS):
        for part in pipeline._inputs():  # noqa: SLF001 - no public way to them
            yield from _behind_batches(part)


_BATCH_MAKERS = ("Batch", "batch", "FlatMap", "Interleave", "GroupByWindow")
"""Of class names: what comes before such a part may be no batches yet."""


def _import_tensorflow() -> Any:
    """TensorFlow, which leaves the GPU to torch: it would take nearly all of its memory.

    Raises:
        ConfigError: it is not installed, or has the GPU already.
    """
    if find_spec("tensorflow") is None:
        raise _not_installed()
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


def _not_installed() -> ConfigError:
    return ConfigError(
        "TfData needs the package tensorflow, which is not installed in this environment; pip "
        "install tensorflow-cpu"
    )
