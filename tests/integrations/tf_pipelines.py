"""tf.data pipelines of tests, and a model for them; tensorflow is imported where it is called."""

from __future__ import annotations

from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
from torch import nn

from autotune.config.tf_data import TfData, TfLoader
from autotune.config.training_config import TrainingConfig

FEATURES = 8
WAIT_S = 0.004


def loader_of(build: Any, **settings: Any) -> TfLoader:
    """The loader of a pipeline under some settings."""
    return TfData(build).loader(TrainingConfig(**settings))


def numbers(batch_size: int, num_parallel_calls: int | None) -> Any:
    """100 samples; the first feature of each is its number."""
    import tensorflow as tf

    def sample(number: Any) -> Any:
        return tf.fill([FEATURES], tf.cast(number, tf.float32)), number % 2

    return (
        tf.data.Dataset.range(100)
        .map(sample, num_parallel_calls=num_parallel_calls)
        .batch(batch_size)
    )


def _waited(number: Any) -> Any:
    sleep(WAIT_S)
    return np.full(FEATURES, number, dtype=np.float32)


def waiting(batch_size: int, num_parallel_calls: int | None) -> Any:
    """Endless samples, each of which waits as for a disk."""
    import tensorflow as tf

    def sample(number: Any) -> Any:
        return tf.ensure_shape(
            tf.numpy_function(_waited, [number], tf.float32), [FEATURES]
        ), number % 2

    return (
        tf.data.Dataset.range(4096)
        .map(sample, num_parallel_calls=num_parallel_calls)
        .batch(batch_size, True)
    )


def write_records(path: Path, count: int) -> None:
    """A TFRecord file of examples, as TFDS writes them."""
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(count):
            features = {
                "x": tf.train.Feature(
                    float_list=tf.train.FloatList(value=[float(number)] * FEATURES)
                ),
                "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[number % 2])),
                "name": tf.train.Feature(
                    bytes_list=tf.train.BytesList(value=[f"sample {number}".encode()])
                ),
            }
            writer.write(
                tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
            )


def net() -> nn.Module:
    """Two classes of eight features."""
    return nn.Linear(FEATURES, 2)
