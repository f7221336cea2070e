"""What is measured of a real tf.data pipeline, and a search that finds parallelism."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

import autotune
from autotune.config.plan import Workload
from autotune.config.tf_data import TfData
from autotune.config.training_config import TrainingConfig
from autotune.worker.extras.item_costs import measure_pipeline
from autotune.worker.feed import Feed
from autotune.worker.jobs.stress import largest_batch
from tests.integrations.tf_pipelines import FEATURES, WAIT_S, loader_of, net, numbers, waiting

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("default"),  # TensorFlow's own
    pytest.mark.timeout(400),
]


@pytest.fixture(autouse=True)
def tf() -> Any:
    return pytest.importorskip("tensorflow")


def with_weights(tf: Any, batch_size: int, *, drops: bool) -> Any:
    data = tf.data.Dataset.from_tensor_slices(tf.zeros((20, 3))).batch(batch_size, drops)
    return data.map(lambda x: (tf.zeros(4), x))


@pytest.mark.parametrize(
    ("build", "sizes"),
    [
        (
            lambda tf, size: tf.data.Dataset.from_tensor_slices({"text": ["a"] * 20}).batch(size),
            [8, 8, 4],
        ),
        (lambda tf, size: with_weights(tf, size, drops=False), [8, 8, 4]),
        (lambda tf, size: with_weights(tf, size, drops=True), [8, 8]),
    ],
    ids=["texts alone", "weights first", "weights first, dropping"],
)
def test_samples_are_counted_by_the_tensor_that_has_the_batch_in_front(
    tf: Any, build: Any, sizes: list[int]
) -> None:
    config = TrainingConfig(micro_batch_size=8)
    data = TfData(lambda size, calls: build(tf, size))
    feed = Feed(data.loader(config))
    assert [(feed.take() if at else feed.start()).samples for at in range(len(sizes))] == sizes
    feed.stop()
    assert measure_pipeline(data.loader(config), config).item_s > 0
    found = largest_batch(Workload(model=None, dataset=data), data.loader(config), 8, float("inf"))
    assert (len(found.sizes), found.note) == (sum(sizes), None)


def test_a_pipeline_whose_calls_hang_is_left_behind_when_its_feed_is_stopped(tf: Any) -> None:
    may_end, is_hanging = Event(), Event()

    def hang(number: Any) -> Any:
        if number > 3:
            is_hanging.set()
            may_end.wait()
        return np.float32(number)

    def build(batch_size: int, num_parallel_calls: int | None) -> Any:
        data = tf.data.Dataset.range(100).map(
            lambda number: tf.numpy_function(hang, [number], tf.float32)
        )
        return data.map(lambda x: tf.ensure_shape(x, [])).batch(batch_size)

    feed = Feed(loader_of(build, micro_batch_size=2, num_workers=1))
    feed.start()
    assert is_hanging.wait(60)
    feed.stop(within_s=0.1)  # the test's time limit ends it where that waits for the call
    assert not may_end.is_set()
    may_end.set()


def test_the_buffer_is_as_large_as_it_is_set_and_what_lies_ready_in_it_is_known(tf: Any) -> None:
    loader = loader_of(
        lambda size, calls: numbers(size, calls).repeat(), num_workers=2, prefetch_factor=5
    )
    feed = Feed(loader)
    feed.start()
    while feed.ready() < 5:  # type: ignore[operator] # a pipeline's is known; the test's time limit ends it
        pass
    assert feed.queue_capacity == 7
    assert 5 <= (feed.ready() or 0) <= 6  # one more is held while it waits for a place
    for _ in range(50):
        feed.take()
    assert 0 <= (feed.ready() or 0) <= 6
    feed.stop()


def test_without_parallel_calls_nothing_runs_ahead(tf: Any) -> None:
    made = tf.Variable(0, dtype=tf.int64)

    def counted(batch_size: int, num_parallel_calls: int | None) -> Any:
        assert num_parallel_calls is None
        return numbers(batch_size, None).map(
            lambda x, y: (tf.nest.map_structure(tf.identity, x), made.assign_add(1))
        )

    feed = Feed(loader_of(counted, micro_batch_size=10))
    feed.start()
    feed.take()
    assert int(made.numpy()) == 2
    assert (feed.ready(), feed.queue_capacity) == (0, 0)


def test_a_samples_cost_is_its_part_of_a_batch_and_waiting_is_told_from_working() -> None:
    config = TrainingConfig(micro_batch_size=8, num_workers=4)
    costs = measure_pipeline(TfData(waiting).loader(config), config)
    assert costs.item_s >= WAIT_S  # one after the other, whatever the configuration
    assert costs.cpu_fraction < 0.5
    assert costs.item_bytes == 4 * FEATURES + 8
    assert (costs.collate_s, costs.transfer_s) == (0.0, None)


def test_the_largest_of_its_batches_is_trained_on_under_stress(tf: Any) -> None:
    def growing(batch_size: int, num_parallel_calls: int | None) -> Any:
        data = tf.data.Dataset.range(1, 13).map(lambda number: tf.zeros([number]))
        return data.padded_batch(batch_size)

    config = TrainingConfig(micro_batch_size=4)
    data = TfData(growing)
    found = largest_batch(Workload(model=None, dataset=data), data.loader(config), 4, float("inf"))
    assert found.batch.shape == (4, 12)
    assert len(found.sizes) == 12
    assert found.note is None


def test_a_search_finds_parallel_calls(tmp_path: Path) -> None:
    result = autotune.search(
        net,
        TfData(waiting),
        baseline={"micro_batch_size": 16, "intra_op_threads": 1},
        space={
            "num_workers": [0, 8],
            "prefetch_factor": 2,
            "micro_batch_size": 16,
            "amp_dtype": "float32",
            "intra_op_threads": 1,
        },
        objective={"max_batch_scale": 1},
        n_trials=2,
        timeout_s=90,
        device="cpu",
        run_dir=tmp_path / "run",
        progress=False,
    )
    assert result.best.num_workers == 8
    assert result.speedup is not None
    assert result.speedup > 3
    assert all(trial.result.outcome == "ok" for trial in result.trials)
    assert "TfData(build).loader(config)" in result.report()
    assert "TfData(build).loader(config)" in (tmp_path / "run" / "recommended.yaml").read_text()


def test_a_diagnosis_says_that_a_pipeline_waits() -> None:
    today = {"micro_batch_size": 16, "intra_op_threads": 1}
    found = autotune.diagnose(
        net, lambda: TfData(waiting), baseline=today, device="cpu", progress=False
    )
    assert found.verdict == "data_io"
    assert found.diagnosis.evidence.facts.is_tf_data
