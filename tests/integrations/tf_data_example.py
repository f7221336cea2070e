"""The example of docs/slow-loader.md, word for word, behind what it takes for granted."""

from __future__ import annotations

from typing import Any

import autotune
from tests.integrations.tf_pipelines import FEATURES


def parse(record: Any) -> Any:
    import tensorflow as tf

    features = {
        "x": tf.io.FixedLenFeature([FEATURES], tf.float32),
        "y": tf.io.FixedLenFeature([], tf.int64),
    }
    return tf.io.parse_single_example(record, features)


def build(batch_size, num_parallel_calls):
    import tensorflow as tf

    files = tf.data.Dataset.list_files("data/*.tfrecord")
    calls = {"num_parallel_calls": num_parallel_calls}
    records = files.interleave(
        tf.data.TFRecordDataset, cycle_length=num_parallel_calls or 1, **calls
    )
    samples = records.shuffle(1000).map(parse, **calls)
    return samples.batch(batch_size, drop_remainder=True)


data = autotune.TfData(build)  # in a dataset's place: result = autotune.search(model, data)
config = autotune.TrainingConfig(micro_batch_size=16, num_workers=4)  # or result.best
loader = data.loader(config)  # for your own loop: batches of torch tensors, as trials have them
