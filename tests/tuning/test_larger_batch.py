"""A larger global batch is recommended where it beats the best at the baseline's own, beyond noise and by enough."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import pytest

from autotune.records.recommendation import Confirmation, Recommendation
from autotune.settings.training_config import TrainingConfig
from autotune.testing import FakeLauncher, FakeTrial
from autotune.tuning.loop import Search
from autotune.tuning.outcomes import ConfirmationOutcome
from autotune.tuning.selection import select
from tests.factories.searches import GIB, confirmed, figures_of, make_search

BATCHES = [32, 64, 128]
SPACE: dict[str, Any] = {
    "micro_batch_size": BATCHES,
    "num_workers": [0, 2],
    "amp_dtype": "float32",
    "grad_accum_steps": 1,
    "pin_memory": False,
    "channels_last": False,
    "prefetch_factor": 2,
    "persistent_workers": False,
}


def search_of(
    folder: Path,
    rates: Mapping[tuple[int, int], float],
    *,
    startup_s: float = 2.0,
    infeasible: tuple[int, int] | None = None,
) -> Search:
    """A search where the rate is known by batch and loader workers, and all else costs nothing."""

    def cost(config: TrainingConfig) -> FakeTrial:
        place = (config.micro_batch_size, config.num_workers)
        peak = 100 * GIB if place == infeasible else 1 * GIB + config.micro_batch_size
        return FakeTrial(samples_per_s=rates[place], peak_memory_bytes=peak, startup_s=startup_s)

    return make_search(folder, FakeLauncher(cost), baseline=TrainingConfig(micro_batch_size=32), **SPACE)


def found_of(folder: Path, rates: Mapping[tuple[int, int], float], *, startup_s: float = 2.0) -> Recommendation:
    """What such a search recommends."""
    search = search_of(folder, rates, startup_s=startup_s)
    search.run()
    _, chosen = confirmed(search)
    return chosen


def rates(of_32: float, of_64: float, of_128: float, *, by_workers: float = 1.2) -> dict[tuple[int, int], float]:
    """Of the baseline's workers, by batch; two workers are so much faster."""
    known = dict(zip(BATCHES, (of_32, of_64, of_128), strict=True))
    return {
        (batch, workers): rate * (by_workers if workers else 1.0) for batch, rate in known.items() for workers in (0, 2)
    }


def test_a_batch_that_wins_less_than_is_asked_for_is_shown_and_not_recommended(tmp_path: Path) -> None:
    chosen = found_of(tmp_path, rates(1000.0, 1010.0, 1040.0))
    assert (chosen.config.micro_batch_size, chosen.config.num_workers) == (32, 2)
    assert chosen.same_batch_number == chosen.number
    larger = chosen.larger_batch
    assert larger is not None
    assert larger.config.micro_batch_size == 128
    assert larger.over_same_batch is not None
    assert larger.over_same_batch.value == pytest.approx(1.04, abs=0.01)
    assert larger.break_even is not None
    assert larger.break_even.low <= larger.break_even.samples <= larger.break_even.high
    assert larger.break_even.samples == pytest.approx(
        (128 - larger.over_same_batch.value * 32) / (larger.over_same_batch.value - 1)
    )
    assert not larger.is_worth_it
    assert {larger.number, chosen.number} <= {entrant.number for entrant in chosen.confirmations}


def test_a_batch_that_wins_enough_is_recommended_beside_the_best_of_the_users_own(tmp_path: Path) -> None:
    chosen = found_of(tmp_path, rates(1000.0, 1500.0, 2000.0))
    assert (chosen.config.micro_batch_size, chosen.config.num_workers) == (128, 2)
    assert chosen.same_batch is not None
    assert (chosen.same_batch.micro_batch_size, chosen.same_batch.num_workers) == (32, 2)
    assert chosen.same_batch_speedup is not None
    larger = chosen.larger_batch
    assert larger is not None
    assert (larger.number, larger.config, larger.speedup) == (chosen.number, chosen.config, chosen.speedup)
    assert larger.is_worth_it
    assert larger.break_even is not None
    assert larger.break_even.samples == pytest.approx(128 - 2 * 32, rel=0.1)


def test_a_larger_batch_that_is_slower_pays_at_no_noise_scale(tmp_path: Path) -> None:
    chosen = found_of(tmp_path, rates(1000.0, 995.0, 990.0))
    assert chosen.config.micro_batch_size == 32
    larger = chosen.larger_batch
    assert larger is not None
    assert not larger.is_worth_it
    assert not larger.is_faster
    assert larger.over_same_batch is not None
    assert larger.break_even is None or larger.break_even.high == inf


def test_what_is_recommended_at_the_users_batch_says_that_larger_ones_were_left_out(tmp_path: Path) -> None:
    chosen = found_of(tmp_path, rates(1000.0, 1010.0, 1040.0, by_workers=0.9))
    assert (chosen.number, chosen.verdict) == (0, "already_best")
    (why,) = figures_of(chosen.reasons, "nothing_beats_baseline")
    assert why["leaves_out_larger"]


def test_what_the_rounds_allow_at_the_users_batch_is_told(tmp_path: Path) -> None:
    chosen = found_of(tmp_path, rates(1000.0, 900.0, 800.0, by_workers=1.004))
    assert (chosen.number, chosen.verdict) == (0, "already_best")
    (why,) = figures_of(chosen.reasons, "nothing_beats_baseline")
    assert 0 < why["most_fraction"] < 0.1


def test_the_best_at_a_larger_batch_is_a_finalist_behind_others_of_the_users_own(tmp_path: Path) -> None:
    speeds = {(32, 0): 1000.0, (32, 2): 1500.0, (64, 0): 1400.0, (64, 2): 1405.0, (128, 0): 900.0, (128, 2): 910.0}
    chosen = found_of(tmp_path, speeds)
    assert chosen.config.micro_batch_size == 32
    assert chosen.larger_batch is not None
    assert chosen.larger_batch.config.micro_batch_size == 64
    assert {chosen.number, chosen.larger_batch.number} <= {entrant.number for entrant in chosen.confirmations}


def test_where_rounds_lack_the_trials_decide_and_the_break_even_is_told_all_the_same(tmp_path: Path) -> None:
    search = search_of(tmp_path, rates(1000.0, 1500.0, 2000.0))
    search.run()
    chosen = select(search.outcome(), ConfirmationOutcome())
    assert chosen is not None
    assert chosen.config.micro_batch_size == 128
    larger = chosen.larger_batch
    assert larger is not None
    assert larger.is_worth_it
    assert larger.break_even is not None
    assert larger.break_even.low < larger.break_even.samples < larger.break_even.high


def test_where_two_alone_may_run_a_larger_batch_has_its_place_only_where_its_trial_is_worth_it(tmp_path: Path) -> None:
    for of_128, expected in ((1450.0, 32), (2500.0, 128)):
        speeds = {**rates(1000.0, 900.0, of_128, by_workers=1.0), (32, 2): 1420.0}
        chosen = found_of(tmp_path / str(of_128), speeds, startup_s=14.0)
        assert len(chosen.confirmations) == 2, "starts are too slow for three"
        assert {0, chosen.number} == {entrant.number for entrant in chosen.confirmations}
        assert (chosen.config.micro_batch_size, chosen.verdict) == (expected, "faster")
        larger = chosen.larger_batch
        assert larger is not None
        assert larger.over_same_batch is not None
        assert larger.over_same_batch.value == pytest.approx(of_128 / 1420.0, rel=0.05), "not over the baseline"


def test_without_a_baseline_a_larger_batch_that_alone_has_run_is_recommended(tmp_path: Path) -> None:
    speeds = {**rates(1000.0, 900.0, 1450.0, by_workers=1.0), (32, 2): 1420.0}
    search = search_of(tmp_path, speeds, infeasible=(32, 0))
    search.run()
    found = search.outcome()
    larger = next(one for one in found.challengers if one.config.micro_batch_size == 128)
    rounds = (larger.measurement,) * 3
    chosen = select(
        found,
        ConfirmationOutcome(
            confirmations=(Confirmation(number=larger.number, config=larger.config, rounds=rounds),), is_confirmed=True
        ),
    )
    assert chosen is not None
    assert (chosen.number, chosen.verdict) == (larger.number, "baseline_infeasible")
    assert chosen.larger_batch is not None
    assert chosen.larger_batch.is_worth_it, "nothing at the baseline's batch was measured in turns"
    assert chosen.larger_batch.over_same_batch is not None
    assert chosen.larger_batch.over_same_batch.value == pytest.approx(1450.0 / 1420.0, rel=0.02), "by trials"
