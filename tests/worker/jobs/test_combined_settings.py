"""Settings that a look measures together: those that belong together, and those that helped by themselves."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from torch import Tensor, nn

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.protocol.messages import CurvesJob
from autotune.records.ceilings import Ceiling
from autotune.records.result import CurvePoint, Curves
from autotune.worker.device import open_device
from autotune.worker.extras import roofline
from autotune.worker.jobs.bench import WorkloadBench
from autotune.worker.jobs.curves import combined_config, loader_share, trace_curves
from tests.factories import make_process
from tests.factories.lengths import ByBudget, Sequences, Tagger, padded_rows, tagging_step


@pytest.fixture(autouse=True)
def _short_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_PEAK_S", 0.001)
    monkeypatch.setattr(roofline, "_COPY_BYTES", 2**16)
    monkeypatch.setattr(roofline, "_MATRIX", {"cpu": 64})


def point(rate: float | None, **changes: object) -> CurvePoint:
    ceiling = (
        None
        if rate is None
        else Ceiling(samples_per_s=rate, samples=10, seconds=10 / rate, batches=2)
    )
    return CurvePoint(changes=changes, ceiling=ceiling)


@pytest.mark.parametrize(
    ("loader", "device", "share"),
    [(100.0, 200.0, 0.75), (200.0, 100.0, 0.25), (None, 100.0, 0.5), (100.0, None, 0.5)],
)
def test_the_slower_side_gets_most_of_the_time(
    loader: float | None, device: float | None, share: float
) -> None:
    assert loader_share(Curves(loader=(point(loader),), device=(point(device),))) == share
    assert loader_share(Curves()) == 0.5


def test_the_best_value_of_each_setting_that_helps_is_combined() -> None:
    points = (
        point(100.0),
        point(120.0, micro_batch_size=8),
        point(150.0, micro_batch_size=16),
        point(90.0, micro_batch_size=32),
        point(110.0, intra_op_threads=1),
    )
    together = combined_config(TrainingConfig(micro_batch_size=4), points)
    assert together == TrainingConfig(micro_batch_size=16, intra_op_threads=1)


def test_a_token_budget_and_its_samples_are_combined_as_one_setting() -> None:
    own = TrainingConfig(micro_batch_size=4, max_tokens=16)
    larger = point(150.0, micro_batch_size=8, max_tokens=32)
    assert combined_config(own, (point(100.0), larger)) is None
    together = combined_config(own, (point(100.0), larger, point(110.0, intra_op_threads=1)))
    assert together == TrainingConfig(micro_batch_size=8, max_tokens=32, intra_op_threads=1)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(
            (point(None), point(150.0, micro_batch_size=8), point(150.0, intra_op_threads=1)),
            id="no level",
        ),
        pytest.param(
            (point(100.0), point(150.0, micro_batch_size=8), point(102.0, intra_op_threads=1)),
            id="one helps",
        ),
        pytest.param(
            (point(100.0), point(None, micro_batch_size=8), point(150.0, intra_op_threads=1)),
            id="one failed",
        ),
    ],
)
def test_fewer_than_two_settings_that_help_are_not_combined(points: tuple[CurvePoint, ...]) -> None:
    assert combined_config(TrainingConfig(micro_batch_size=4), points) is None


def test_another_token_budget_is_measured_with_so_many_times_the_samples_of_each_batch(
    tmp_path: Path,
) -> None:
    cpu, seen = open_device("cpu"), list[tuple[int, ...]]()

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(tuple(batch["input_ids"].shape))
        return tagging_step(model, batch)

    task = CurvesJob(
        process=make_process(tmp_path),
        payload=tmp_path,
        config=TrainingConfig(micro_batch_size=3, max_tokens=16),
        stretch_s=0.005,
        variations=(TrainingConfig(micro_batch_size=6, max_tokens=32),),
    )
    parts: dict[str, Any] = {
        "dataset": Sequences([4] * 8 + [16] * 2),
        "collate_fn": padded_rows,
        "batch_sampler": ByBudget,
    }
    workload = Workload(model=Tagger(), step=step, **parts)
    bench = WorkloadBench(workload, task, cpu, tmp_path)
    curves = trace_curves(bench, task, cpu, perf_counter() + 600, keep=lambda known: None)
    assert [point.changes for point in curves.device] == [
        {},
        {"micro_batch_size": 6, "max_tokens": 32},
    ]
    assert {(4, 4), (1, 16)} <= set(seen), "the baseline's own batches"
    assert set(seen) - {(4, 4), (1, 16)} == {(8, 4), (2, 16)}
