"""Check the fake launcher and its cost model, also with several ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.config.training_config import TrainingConfig
from autotune.launch.launcher import slots_of
from autotune.policy import WindowRules
from autotune.records.measurement import MemoryLimits
from autotune.records.result import CurvePoint, Curves
from autotune.records.trial import TrialRecord
from autotune.testing import CostModel, FakeLauncher, FakeTrial, analytic_cost, fake_environment
from tests.factories.searches import make_search

BUSY = TrainingConfig(micro_batch_size=256, num_workers=8)


def group(world_size: int, strategy: str = "ddp", **settings: Any) -> TrainingConfig:
    values = {**BUSY.model_dump(), "strategy": strategy, "world_size": world_size, **settings}
    return TrainingConfig.model_validate(values)


def device_rate(config: TrainingConfig) -> float:
    """Return the devices' throughput together, with the exchange of gradients, without a loader."""
    talk = analytic_cost(config).communication
    assert talk is not None
    return config.global_batch_size / talk.step_s


@pytest.mark.parametrize(
    ("config", "rate", "loader", "device"),
    [
        (TrainingConfig(), 1 / (1 / 1000 + 0.00264 / 32), 1000.0, 32 / 0.00264),
        (TrainingConfig(num_workers=4), 4000.0, 4000.0, 32 / 0.00264),
        (BUSY, 8000.0, 8000.0, 256 / 0.00712),
    ],
)
def test_one_rank_has_the_documented_rates(
    config: TrainingConfig, rate: float, loader: float, device: float
) -> None:
    trial = analytic_cost(config)
    assert trial.samples_per_s == pytest.approx(rate)
    assert trial.loader_ceiling == pytest.approx(loader)
    assert trial.device_ceiling == pytest.approx(device)
    assert trial.peak_memory_bytes == (512 + 4 * config.micro_batch_size) * 2**20
    assert trial.communication is None


def test_ranks_come_to_less_than_as_many_times_one() -> None:
    one = analytic_cost(BUSY).device_ceiling
    assert one is not None
    for ranks in (2, 4, 8):
        assert one < device_rate(group(ranks)) < ranks * one
        assert analytic_cost(group(ranks)).device_ceiling == pytest.approx(ranks * one)


def test_exchange_time() -> None:
    def exposed(**changes: Any) -> float:
        talk = analytic_cost(group(2, **changes)).communication
        assert talk is not None
        return talk.exposed_fraction

    assert exposed(ddp={"bucket_cap_mb": 100}) > exposed(ddp={"bucket_cap_mb": 50}) > exposed()
    assert exposed(ddp={"comm_hook": "fp16"}) < exposed()
    assert exposed(grad_accum_steps=4) < exposed()


def test_the_ranks_loaders_share_the_machine() -> None:
    ceilings = [analytic_cost(group(ranks)).loader_ceiling for ranks in (1, 2, 4, 8)]
    assert ceilings == [8000.0, 16000.0, 16000.0, 16000.0]
    assert analytic_cost(group(4, "dp")).loader_ceiling == 8000.0


def test_buckets_take_memory_that_views_save() -> None:
    alone, copied = analytic_cost(BUSY), analytic_cost(group(2))
    viewed = analytic_cost(group(2, ddp={"gradient_as_bucket_view": True}))
    assert copied.peak_memory_bytes > viewed.peak_memory_bytes == alone.peak_memory_bytes


def test_data_parallel_gains_less_than_ddp() -> None:
    parallel = analytic_cost(group(2, "dp"))
    assert parallel.device_ceiling is not None
    assert parallel.device_ceiling < device_rate(group(2))
    assert parallel.communication is None
    assert analytic_cost(group(1)) == analytic_cost(BUSY)


@pytest.mark.slow
def test_search_over_two_devices(
    tmp_path: Path,
) -> None:
    launcher = FakeLauncher(environment=fake_environment(device_count=2, cores=16))
    result = autotune.search(
        object,
        list,
        space={"micro_batch_size": [256], "grad_accum_steps": 1, "num_workers": [0, 8]},
        baseline=BUSY,
        launcher=launcher,
        n_trials=16,
        run_dir=tmp_path / "run",
        progress=False,
    )
    runs = {
        trial.config: trial.measurement for trial in result.trials if trial.measurement is not None
    }
    assert {config.strategy for config in runs} >= {"single", "ddp"}
    for config, run in runs.items():
        assert [one.rank for one in run.ranks] == list(
            range(config.process_count if config.strategy == "ddp" else 0)
        )
        if run.ranks:
            assert sum(one.samples_per_s for one in run.ranks) == pytest.approx(run.samples_per_s)
            assert [one.device for one in run.ranks] == ["cuda:0", "cuda:1"]
    assert (result.best.strategy, result.best.world_size) == ("ddp", 2)
    assert result.best.lr == pytest.approx(2 * BUSY.lr)
    assert autotune.load(result.run_dir / "recommended.yaml") == result.best
    assert result.best_same_batch is not None
    assert result.best_same_batch.global_batch_size == BUSY.global_batch_size


def test_several_threads_at_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)

    def cost(config: TrainingConfig) -> FakeTrial:
        barrier.wait(60.0)  # no test takes as long: four are to come
        return FakeTrial(samples_per_s=1000.0)

    launcher = FakeLauncher(cost, slots=4)
    assert slots_of(launcher) == 4
    runner = make_search(tmp_path, launcher).runner

    def rate(workers: int) -> float:
        config, name = TrainingConfig(num_workers=workers), f"trial-{workers}"
        result = runner.run(config, name=name, deadline_s=10.0, window=WindowRules())
        assert result.measurement is not None
        return result.measurement.samples_per_s

    with ThreadPoolExecutor(4) as pool:
        rates = list(pool.map(rate, range(4)))
    assert sorted(config.num_workers for config in launcher.launched) == [0, 1, 2, 3]
    assert len(set(rates)) == 4, "each has a noise of its own"


@pytest.mark.slow
def test_a_search_over_several_machines_is_a_search(tmp_path: Path) -> None:
    launcher = FakeLauncher(slots=3)
    result = autotune.search(
        object,
        list,
        launcher=launcher,
        n_trials=10,
        run_dir=tmp_path / "run",
        progress=False,
        baseline=BUSY,
    )
    assert len(result.trials) == 10
    assert autotune.load(tmp_path / "run" / "recommended.yaml") == result.best
    lines = (tmp_path / "run" / "trials.jsonl").read_text().splitlines()
    numbers = [TrialRecord.model_validate_json(line).number for line in lines]
    assert numbers == sorted(set(numbers)) == [trial.number for trial in result.trials]


def rates_of(points: Iterable[CurvePoint]) -> list[float | None]:
    return [None if one.ceiling is None else one.ceiling.samples_per_s for one in points]


def curves_of(
    tmp_path: Path, cost: CostModel, *variations: TrainingConfig, limit_bytes: int | None = None
) -> Curves:
    """Return made-up curves of the default configuration and its variations."""
    runner = replace(
        make_search(tmp_path, FakeLauncher(cost)).runner,
        limits=MemoryLimits(limit_bytes=limit_bytes),
    )
    report = runner.curves(TrainingConfig(), variations, deadline_s=60.0, stretch_s=0.5)
    assert report.curves is not None
    return report.curves


def test_curves_of_changed_sides(
    tmp_path: Path,
) -> None:
    found = curves_of(
        tmp_path, analytic_cost, TrainingConfig(num_workers=4), TrainingConfig(micro_batch_size=64)
    )
    assert [point.changes for point in found.loader] == [{}, {"num_workers": 4}]
    assert [point.changes for point in found.device] == [{}, {"micro_batch_size": 64}]
    assert rates_of(found.loader) == [1000.0, 4000.0]
    assert found.device[1].peak_memory_bytes == (512 + 4 * 64) * 2**20
    assert found.loader[1].peak_memory_bytes is None


def test_curves_of_copies(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return replace(analytic_cost(config), copy_ceiling=6000.0 if config.pin_memory else 2000.0)

    (tmp_path / "unknown").mkdir()
    assert curves_of(tmp_path / "unknown", analytic_cost).copy == ()
    own, pinned = curves_of(tmp_path, cost).copy
    assert (own.changes, pinned.changes) == ({}, {"pin_memory": True})
    assert rates_of((own, pinned)) == [2000.0, 6000.0]


def test_curves_of_failures(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return (
            FakeTrial(outcome="crashed", reason="no")
            if config.num_workers == 4
            else analytic_cost(config)
        )

    variations = [TrainingConfig(num_workers=4), TrainingConfig(micro_batch_size=64)]
    found = curves_of(tmp_path, cost, *variations, limit_bytes=700 * 2**20)
    (_, broken), (own, large) = found.loader, found.device
    assert (broken.ceiling, broken.reason) == (None, "no")
    assert own.ceiling is not None
    assert (large.ceiling, large.peak_memory_bytes) == (None, None)
    assert "memory" in large.reason
