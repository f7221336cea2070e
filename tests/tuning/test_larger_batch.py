"""A larger global batch is recommended where it beats the best at the baseline's own, beyond noise and by enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.models.evidence import evidence_of_runs
from autotune.records.result import Recommendation
from autotune.testing import FakeLauncher, FakeTrial
from autotune.tuning.loop import Search
from autotune.tuning.select import select
from tests.factories.searches import FIXED, GIB, confirmed, figures_of, make_search

BATCHES = [32, 64, 128]
SPACE: dict[str, Any] = {
    **FIXED,
    "micro_batch_size": BATCHES,
    "num_workers": [0, 2],
    "channels_last": False,
}


def search_of(
    folder: Path,
    rates: Mapping[tuple[int, int], float],
    *,
    startup_s: float = 2.0,
    infeasible: tuple[int, int] | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> Search:
    """A search where the rate is known by batch and loader workers, and all else costs nothing."""

    def cost(config: TrainingConfig) -> FakeTrial:
        place = (config.micro_batch_size, config.num_workers)
        peak = 100 * GIB if place == infeasible else 1 * GIB + config.micro_batch_size
        return FakeTrial(samples_per_s=rates[place], peak_memory_bytes=peak, startup_s=startup_s)

    launcher = FakeLauncher(cost, noise=noise, seed=seed)
    return make_search(folder, launcher, baseline=TrainingConfig(micro_batch_size=32), **SPACE)


def found_of(
    folder: Path, rates: Mapping[tuple[int, int], float], *, startup_s: float = 2.0
) -> Recommendation:
    """What such a search recommends."""
    search = search_of(folder, rates, startup_s=startup_s)
    search.run()
    _, chosen = confirmed(search)
    return chosen


def rates(
    of_32: float, of_64: float, of_128: float, *, by_workers: float = 1.2
) -> dict[tuple[int, int], float]:
    """Of the baseline's workers, by batch; two workers are so much faster."""
    known = dict(zip(BATCHES, (of_32, of_64, of_128), strict=True))
    return {
        (batch, workers): rate * (by_workers if workers else 1.0)
        for batch, rate in known.items()
        for workers in (0, 2)
    }


def test_larger_batch_gains_too_little(
    tmp_path: Path,
) -> None:
    chosen = found_of(tmp_path, rates(1000.0, 1010.0, 1040.0))
    assert (chosen.config.micro_batch_size, chosen.config.num_workers) == (32, 2)
    assert chosen.same_batch_number == chosen.number
    larger = chosen.larger_batch
    assert larger is not None
    assert larger.config.micro_batch_size == 128
    assert larger.over_same_batch is not None
    assert larger.over_same_batch.value == pytest.approx(1.04, abs=0.01)
    assert larger.break_even is not None
    assert larger.break_even.low <= larger.break_even.value <= larger.break_even.high
    assert larger.break_even.value == pytest.approx(
        (128 - larger.over_same_batch.value * 32) / (larger.over_same_batch.value - 1)
    )
    assert not larger.is_worth_it


def test_larger_batch_gains_enough(
    tmp_path: Path,
) -> None:
    chosen = found_of(tmp_path, rates(1000.0, 1500.0, 2000.0))
    assert (chosen.config.micro_batch_size, chosen.config.num_workers) == (128, 2)
    assert chosen.same_batch is not None
    assert (chosen.same_batch.micro_batch_size, chosen.same_batch.num_workers) == (32, 2)
    assert chosen.same_batch_speedup is not None
    larger = chosen.larger_batch
    assert larger is not None
    assert (larger.number, larger.config, larger.speedup) == (
        chosen.number,
        chosen.config,
        chosen.speedup,
    )
    assert larger.is_worth_it
    assert larger.break_even is not None
    assert larger.break_even.value == pytest.approx(128 - 2 * 32, rel=0.1)


def test_a_larger_batch_that_is_slower_pays_at_no_noise_scale(tmp_path: Path) -> None:
    chosen = found_of(tmp_path, rates(1000.0, 995.0, 990.0))
    assert chosen.config.micro_batch_size == 32
    larger = chosen.larger_batch
    assert larger is not None
    assert not larger.is_worth_it
    assert not larger.is_faster
    assert larger.over_same_batch is not None
    assert larger.break_even is None or larger.break_even.high == inf


def test_larger_batches_left_out_are_noted(
    tmp_path: Path,
) -> None:
    chosen = found_of(tmp_path, rates(1000.0, 1010.0, 1040.0, by_workers=0.9))
    assert (chosen.number, chosen.verdict) == (0, "already_best")
    (why,) = figures_of(chosen.reasons, "nothing_beats_baseline")
    assert why["leaves_out_larger"]


def test_what_runs_allow_at_the_users_batch_is_said(tmp_path: Path) -> None:
    chosen = found_of(tmp_path, rates(1000.0, 900.0, 800.0, by_workers=1.004))
    assert (chosen.number, chosen.verdict) == (0, "already_best")
    (why,) = figures_of(chosen.reasons, "nothing_beats_baseline")
    assert 0 < why["most_fraction"] < 0.1


def test_the_best_at_a_larger_batch_is_shown_behind_others_of_the_users_own(tmp_path: Path) -> None:
    speeds = {
        (32, 0): 1000.0,
        (32, 2): 1500.0,
        (64, 0): 1400.0,
        (64, 2): 1405.0,
        (128, 0): 900.0,
        (128, 2): 910.0,
    }
    chosen = found_of(tmp_path, speeds)
    assert chosen.config.micro_batch_size == 32
    assert chosen.larger_batch is not None
    assert chosen.larger_batch.config.micro_batch_size == 64


def test_an_interrupted_search_judges_a_larger_batch_by_the_runs_that_it_has(
    tmp_path: Path,
) -> None:
    search = search_of(tmp_path, rates(1000.0, 1500.0, 3000.0))
    search.run()
    alone = [
        record.model_copy(update={"results": record.results[:1]}) for record in search.study.records
    ]
    found = replace(
        search.outcome(),
        records=tuple(alone),
        evidence=evidence_of_runs(alone, search.study.prior_variation),
        proven={},
    )
    chosen = select(found)
    assert chosen is not None
    assert (chosen.config.micro_batch_size, chosen.verdict) == (128, "unconfirmed")
    larger = chosen.larger_batch
    assert larger is not None
    assert larger.is_worth_it
    assert larger.break_even is not None
    assert larger.break_even.low < larger.break_even.value < larger.break_even.high


def test_undecided_larger_batch_runs_again(
    tmp_path: Path,
) -> None:
    """In one of a few noisy searches at the least: at first glance others see that it is worth it."""
    most = []
    for seed in range(6):
        search = search_of(
            tmp_path / str(seed), rates(1000.0, 900.0, 1120.0, by_workers=1.0), noise=0.1, seed=seed
        )
        search.run()
        leading = search.race.leader
        runs = {record.number: len(record.runs) for record in search.study.records}
        larger = [
            record.number
            for record in search.study.records
            if record.config.micro_batch_size == 128
        ]
        most.append(max(runs[number] for number in larger if number != leading or leading is None))
    assert max(most) >= 2


def test_larger_batch_without_feasible_baseline(
    tmp_path: Path,
) -> None:
    speeds = {**rates(1000.0, 900.0, 2400.0, by_workers=1.0), (32, 2): 1420.0}
    search = search_of(tmp_path, speeds, infeasible=(32, 0))
    search.run()
    chosen = select(search.outcome())
    assert chosen is not None
    assert (chosen.config.micro_batch_size, chosen.verdict) == (128, "baseline_infeasible")
    assert chosen.larger_batch is not None
    assert chosen.larger_batch.is_worth_it
    assert chosen.larger_batch.over_same_batch is not None
    assert chosen.larger_batch.over_same_batch.value == pytest.approx(2400.0 / 1420.0, rel=0.02)
