"""Bounds of a search that no open setting moves: which of them ends it, and which figures bound nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.testing import CostModel, FakeLauncher, FakeTrial
from autotune.tuning.loop import Search
from tests.factories.machines import CPU
from tests.factories.searches import GIB, make_search
from tests.tuning.guided import SMALL, guided, slow_device, slow_loader

CORES = 2
DECODING_S = 2.4e-3
"""CPU seconds of an item: a JPEG that is decoded."""
PASSING_S = 2e-4
"""Of passing it on from a worker."""
COMPUTING_S = 3.9e-4
OPEN: dict[str, Any] = {
    "micro_batch_size": [32, 64, 128, 256],
    "num_workers": [0, 1, 2, 4, 8],
    "prefetch_factor": [2, 4, 8],
    "amp_dtype": ["float32", "bfloat16"],
    "intra_op_threads": [None, 1],
    "grad_accum_steps": 1,
    "persistent_workers": True,
    "pin_memory": False,
}


def jpegs(config: TrainingConfig) -> FakeTrial:
    """Two cores that decoding fills as soon as two workers do it, whatever else is set."""
    step_s = COMPUTING_S * (9.0 if config.amp_dtype == "bfloat16" else 1.0)
    device = CORES / step_s
    if config.num_workers == 0:
        rate = 1 / (DECODING_S + step_s / CORES)
        return cpu_trial(
            rate, loader=1 / DECODING_S, device=device, loader_cpu_s=DECODING_S, device_cpu_s=step_s
        )
    item_s = DECODING_S + PASSING_S
    loader = min(config.num_workers, CORES) / item_s
    most = 0.98 * CORES / (item_s + step_s)
    rate = min(loader, most)
    return cpu_trial(rate, loader=loader, device=device, loader_cpu_s=item_s, device_cpu_s=step_s)


def cpu_trial(
    rate: float, *, loader: float, device: float, loader_cpu_s: float, device_cpu_s: float
) -> FakeTrial:
    return FakeTrial(
        samples_per_s=rate,
        peak_memory_bytes=GIB,
        busy_fraction=rate / device,
        loader_ceiling=loader,
        device_ceiling=device,
        loader_cpu_s=loader_cpu_s,
        device_cpu_s=device_cpu_s,
        own_cores=rate * (loader_cpu_s + device_cpu_s),
    )


def on_two_cores(
    folder: Path, cost: CostModel, *, seed: int = 0, noise: float = 0.05, **arguments: Any
) -> Search:
    """A search by itself on a made-up CPU, whose runs differ as they do there."""
    environment = CPU.model_copy(update={"cores": CORES})
    launcher = FakeLauncher(cost, noise=noise, seed=seed, environment=environment)
    search = make_search(folder, launcher, **{"n_trials": None, **OPEN, **arguments})
    search.proposer.seed = seed
    search.run()
    return search


def bound_of(search: Search) -> float | None:
    return search.proposer.cores_bound()


@pytest.mark.parametrize("seed", range(3))
def test_cores_that_the_job_itself_fills_end_the_search_after_a_few_trials(
    tmp_path: Path, seed: int
) -> None:
    search = on_two_cores(tmp_path, jpegs, seed=seed)
    assert search.ended_because is not None
    assert (search.ended_because.code, search.ended_because.figures["bound"]) == (
        "near_ceiling",
        "cores",
    )
    assert len(search.study.records) <= 8


def spinning(config: TrainingConfig) -> FakeTrial:
    """As jpegs, but two threads of the step and workers wait for one another: all cores are busy, half of it vain."""
    trial = jpegs(config)
    if config.num_workers == 0 or config.intra_op_threads == 1:
        return trial
    return replace(trial, samples_per_s=0.5 * trial.samples_per_s, own_cores=0.98 * CORES)


@pytest.mark.parametrize("seed", range(2))
def test_cores_that_threads_waste_end_no_search(tmp_path: Path, seed: int) -> None:
    search = on_two_cores(tmp_path, spinning, seed=seed, noise=0.01)
    assert search.best is not None
    assert (
        spinning(search.best.config).samples_per_s >= 0.97 * jpegs(search.best.config).samples_per_s
    )
    assert search.best.config.intra_op_threads == 1


def test_wasted_cores_bound_nothing_that_both_sides_alone_could_do_in_less(tmp_path: Path) -> None:
    space: dict[str, Any] = {
        "num_workers": 2,
        "intra_op_threads": [None, 1],
        "baseline": TrainingConfig(num_workers=2),
    }
    search = on_two_cores(tmp_path, spinning, n_trials=1, noise=0.0, **space)
    search.proposer.prepare(search.runner, 60.0, search.ceilings)
    bound = bound_of(search)
    assert bound is not None
    assert bound >= 0.99 * CORES / (DECODING_S + PASSING_S + COMPUTING_S)


def heavy_step(config: TrainingConfig) -> FakeTrial:
    """All cores are busy with the step, which a larger batch makes cheaper."""
    step_s = 4e-3 * (32 / config.micro_batch_size) ** 0.3
    rate = 0.98 * CORES / (step_s + PASSING_S)
    return cpu_trial(
        rate, loader=1e4, device=CORES / step_s, loader_cpu_s=PASSING_S, device_cpu_s=step_s
    )


def test_full_cores_end_no_search_while_an_open_batch_lowers_the_work(tmp_path: Path) -> None:
    search = on_two_cores(
        tmp_path, heavy_step, noise=0.01, num_workers=[0, 2], intra_op_threads=None
    )
    assert search.best is not None
    assert search.best.config.micro_batch_size == 256


@pytest.mark.parametrize(
    ("given", "least_cpu_s"),
    [
        ({}, DECODING_S + PASSING_S + COMPUTING_S),
        ({"compile": [False, True]}, DECODING_S + PASSING_S),
    ],
    ids=["all was measured", "compiling was not"],
)
def test_a_setting_that_was_not_measured_may_spare_all_of_the_step(
    tmp_path: Path, given: dict[str, Any], least_cpu_s: float
) -> None:
    def cheap_step(config: TrainingConfig) -> FakeTrial:
        """In a loop a step takes more than alone."""
        trial = jpegs(config)
        return replace(trial, own_cores=CORES, samples_per_s=0.9 * trial.samples_per_s)

    space = {"amp_dtype": "float32", "num_workers": 2, "intra_op_threads": None, **given}
    search = on_two_cores(
        tmp_path, cheap_step, n_trials=1, noise=0.0, baseline=TrainingConfig(num_workers=2), **space
    )
    search.proposer.prepare(search.runner, 60.0, search.ceilings)
    assert bound_of(search) == pytest.approx(CORES / least_cpu_s, rel=0.02)


def test_cores_that_others_take_during_a_trial_show_no_bound(tmp_path: Path) -> None:
    def shared(config: TrainingConfig) -> FakeTrial:
        return replace(jpegs(config), own_cores=1.0, others_cores=1.0)

    assert bound_of(on_two_cores(tmp_path, shared, n_trials=3)) is None


def test_cores_are_no_bound_before_a_trial_with_workers(tmp_path: Path) -> None:
    assert bound_of(on_two_cores(tmp_path, jpegs, n_trials=1)) is None


@pytest.mark.parametrize(("cost", "side"), [(slow_loader, "loader"), (slow_device, "device")])
def test_the_side_whose_ceiling_ends_a_search_is_named(
    tmp_path: Path, cost: CostModel, side: str
) -> None:
    search = guided(tmp_path, cost, **SMALL)
    assert search.ended_because is not None
    assert (search.ended_because.code, search.ended_because.figures["bound"]) == (
        "near_ceiling",
        side,
    )
