"""A real tf.data pipeline as a dataset: its batches, its length, its options, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.config.plan import Workload
from autotune.config.tf_data import TfData
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError
from autotune.worker.build import WorkloadFault, build_dataset
from autotune.worker.feed import Feed
from autotune.worker.loader import build_loader
from tests.integrations.tf_pipelines import FEATURES, loader_of, numbers, waiting, write_records

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("default"),  # TensorFlow's own
    pytest.mark.timeout(400),
]


@pytest.fixture(autouse=True)
def tf() -> Any:
    return pytest.importorskip("tensorflow")


SETTINGS = (
    {"micro_batch_size": 32},
    {"micro_batch_size": 32, "num_workers": 1},
    {"micro_batch_size": 32, "num_workers": 3, "prefetch_factor": 4},
    {"micro_batch_size": 32, "num_workers": 3, "pin_memory": True, "in_order": False},
)


@pytest.mark.parametrize("settings", SETTINGS)
def test_each_epoch_holds_each_sample_once(settings: dict[str, Any]) -> None:
    feed = Feed(loader_of(numbers, **settings))
    for epoch in range(2):
        came = [feed.start() if epoch == 0 else feed.take()] + [feed.take() for _ in range(3)]
        assert [delivery.samples for delivery in came] == [
            32,
            32,
            32,
            4,
        ] or not feed.loader.in_order
        assert sum(delivery.samples for delivery in came) == 100
        assert [delivery.is_restart for delivery in came] == [epoch == 1, False, False, False]
        drawn = torch.cat([delivery.batch[0][:, 0] for delivery in came]).int().tolist()
        assert sorted(drawn) == list(range(100))
        assert drawn == list(range(100)) or not feed.loader.in_order
    feed.stop()


def test_an_epochs_length_is_the_pipelines_own(tf: Any) -> None:
    assert len(loader_of(numbers, micro_batch_size=32)) == 4
    assert TfData(numbers).length(32) == 100
    assert (
        TfData(lambda size, calls: tf.data.Dataset.range(100).batch(size, True)).length(32) == 100
    )
    endless = TfData(lambda size, calls: numbers(size, calls).repeat())
    assert endless.length(32) is None
    with pytest.raises(TypeError):
        len(endless.loader(TrainingConfig()))


def test_a_length_in_batches_is_no_length_in_samples() -> None:
    assert TfData(lambda size, calls: numbers(size, calls).repeat(9).take(100)).length(8) is None


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("element", ["x", "(x,)", "(x, x)", "{'x': x}"])
def test_an_element_has_the_same_form_with_and_without_workers(
    tf: Any, element: str, workers: int
) -> None:
    def build(batch_size: int, num_parallel_calls: int | None) -> Any:
        return tf.data.Dataset.from_tensor_slices(eval(element, {"x": tf.zeros((8, 3))})).batch(
            batch_size
        )

    (batch,) = loader_of(build, micro_batch_size=8, num_workers=workers)
    expected = eval(element, {"x": torch.zeros(8, 3)})
    assert type(batch) is type(expected)
    assert repr(batch) == repr(expected)


def test_tensors_share_their_memory_with_tensorflow_and_keep_their_types(tf: Any) -> None:
    def build(batch_size: int, num_parallel_calls: int | None) -> Any:
        def sample(number: Any) -> Any:
            return {
                "half": tf.cast(number, tf.bfloat16),
                "flag": number > 1,
                "name": tf.strings.as_string(number),
                "pair": (tf.cast(number, tf.uint8), tf.zeros((2, 3))),
            }

        return (
            tf.data.Dataset.range(4)
            .map(sample, num_parallel_calls=num_parallel_calls)
            .batch(batch_size)
        )

    (batch,) = loader_of(build, micro_batch_size=4, num_workers=1)
    assert (batch["half"].dtype, batch["flag"].dtype, batch["pair"][0].dtype) == (
        torch.bfloat16,
        torch.bool,
        torch.uint8,
    )
    assert batch["name"] == [b"0", b"1", b"2", b"3"]
    assert batch["pair"][1].shape == (4, 2, 3)
    element = tf.constant([1.0, 2.0])
    shared = TfData(lambda size, calls: tf.data.Dataset.from_tensors(element)).loader(
        TrainingConfig(micro_batch_size=2)
    )
    assert isinstance(next(iter(shared)), Tensor)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda size, calls: [1, 2], "builtins.list"),
        (lambda size, calls: numbers(size, calls).prefetch(2), "prefetch"),
        (lambda size, calls: numbers(size, calls).prefetch(2).take(5), "prefetch"),
        (lambda size, calls: numbers(size, calls).prefetch(2).map(lambda *one: one), "prefetch"),
        (lambda size, calls: waiting(3, calls), "batch_size=32"),
        (lambda size, calls: numbers(1, calls).unbatch(), "batch_size"),
    ],
)
def test_a_pipeline_that_cannot_be_tuned_is_refused_with_the_remedy(
    build: Any, said: str, tmp_path: Path
) -> None:
    data = TfData(build)
    with pytest.raises(ConfigError, match=said):
        data.loader(TrainingConfig())
    with pytest.raises(WorkloadFault, match=said):
        build_loader(Workload(model=None, dataset=data), data, TrainingConfig(), tmp_path)


def test_samples_may_be_prefetched(tf: Any) -> None:
    loader = loader_of(
        lambda size, calls: numbers(1, calls).unbatch().prefetch(9).batch(size), micro_batch_size=50
    )
    assert [len(batch[0]) for batch in loader] == [50, 50]


def test_ragged_elements_are_refused_with_the_remedy(tf: Any) -> None:
    def ragged(batch_size: int, num_parallel_calls: int | None) -> Any:
        return (
            tf.data.Dataset.range(9)
            .map(tf.range)
            .apply(tf.data.experimental.dense_to_ragged_batch(batch_size))
        )

    with pytest.raises(ConfigError, match=r"RaggedTensorSpec.*to_tensor\(\)"):
        TfData(ragged).loader(TrainingConfig())


def test_a_bare_pipeline_is_told_to_come_as_tf_data(tf: Any) -> None:
    with pytest.raises(WorkloadFault, match=r"autotune\.TfData\(build\)"):
        build_dataset(Workload(model=None, dataset=lambda: tf.data.Dataset.range(3)))


def test_a_loaders_arguments_are_refused_with_a_function_too(tmp_path: Path) -> None:
    workload = Workload(model=None, dataset=lambda: TfData(numbers), collate_fn=list)
    with pytest.raises(WorkloadFault, match="collate_fn"):
        build_loader(workload, build_dataset(workload), TrainingConfig(), tmp_path)


def test_an_epoch_without_a_batch_is_a_fault_with_the_remedy(tf: Any) -> None:
    feed = Feed(loader_of(lambda size, calls: waiting(size, calls).take(0), micro_batch_size=8))
    with pytest.raises(WorkloadFault, match="batch"):
        feed.start()


def test_options_of_the_users_own_stay(tf: Any) -> None:
    def build(batch_size: int, num_parallel_calls: int | None) -> Any:
        options = tf.data.Options()
        options.threading.private_threadpool_size = 11
        options.deterministic = False
        return numbers(batch_size, num_parallel_calls).with_options(options)

    options = loader_of(build, num_workers=2)._pipeline.options()
    assert (options.threading.private_threadpool_size, options.deterministic) == (11, False)
    ours = loader_of(numbers, num_workers=2, in_order=False)._pipeline.options()
    assert (ours.threading.private_threadpool_size, ours.deterministic) == (2, False)
    assert ours.experimental_optimization.inject_prefetch is False


def test_records_as_tfds_writes_them_are_read_side_by_side(tf: Any, tmp_path: Path) -> None:
    for shard in range(3):
        write_records(tmp_path / f"{shard}.tfrecord", 20)
    files = sorted(map(str, tmp_path.glob("*.tfrecord")))

    def build(batch_size: int, num_parallel_calls: int | None) -> Any:
        features = {
            "x": tf.io.FixedLenFeature([FEATURES], tf.float32),
            "y": tf.io.FixedLenFeature([], tf.int64),
            "name": tf.io.FixedLenFeature([], tf.string),
        }
        records = tf.data.Dataset.from_tensor_slices(files).interleave(
            tf.data.TFRecordDataset, num_parallel_calls=num_parallel_calls
        )
        parsed = records.map(
            lambda one: tf.io.parse_single_example(one, features),
            num_parallel_calls=num_parallel_calls,
        )
        return parsed.shuffle(10).batch(batch_size)

    batches = list(loader_of(build, micro_batch_size=16, num_workers=2))
    assert sum(len(batch["x"]) for batch in batches) == 60
    assert sorted(name for batch in batches for name in batch["name"])[:2] == [
        b"sample 0",
        b"sample 0",
    ]


def test_the_example_of_the_pages_loads_what_lies_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    write_records(tmp_path / "data" / "one.tfrecord", 40)
    monkeypatch.chdir(tmp_path)
    from tests.integrations.tf_data_example import loader

    assert sum(len(batch["y"]) for batch in loader) == 32
