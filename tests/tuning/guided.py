"""Made-up machines, and searches of them that a model guides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.config.training_config import TrainingConfig
from autotune.protocol.messages import CurvesJob
from autotune.space.space import compose
from autotune.testing import CostModel, FakeLauncher, FakeTrial, analytic_cost
from autotune.tuning.loop import Search
from tests.factories.searches import GIB, make_search

LIMIT = 14 * GIB
NEAR = 0.97
SMALL: dict[str, Any] = {
    "micro_batch_size": [16, 32, 64, 128],
    "num_workers": [0, 2, 4, 8],
    "amp_dtype": ["float32", "bfloat16"],
    "grad_accum_steps": 1,
    "prefetch_factor": 2,
    "persistent_workers": True,
    "pin_memory": False,
}
LOADERS: dict[str, Any] = {**SMALL, "amp_dtype": "float32", "micro_batch_size": 32}
"""A space whose configurations differ in their workers alone."""

PINNING: dict[str, Any] = {**SMALL, "pin_memory": [False, True]}
_COMPOSED = dict[str, list[TrainingConfig]]()


def joined(config: TrainingConfig, *, loader: float, device: float, peak_bytes: int) -> FakeTrial:
    """What a loader and a device reach together."""
    rate = min(loader, device) if config.num_workers else 1 / (1 / loader + 1 / device)
    return FakeTrial(
        samples_per_s=rate,
        peak_memory_bytes=peak_bytes,
        busy_fraction=rate / device,
        loader_ceiling=loader,
        device_ceiling=device,
    )


def sides(config: TrainingConfig) -> tuple[float, float]:
    trial = analytic_cost(config)
    assert trial.loader_ceiling is not None
    assert trial.device_ceiling is not None
    return trial.loader_ceiling, trial.device_ceiling


def slow_loader(config: TrainingConfig) -> FakeTrial:
    """The device is at least ten times as fast as the loader, however many workers it has."""
    loader, device = sides(config)
    return joined(config, loader=loader / 10, device=device, peak_bytes=GIB)


def slow_device(config: TrainingConfig) -> FakeTrial:
    """Two workers are four times as fast as the device ever gets."""
    loader, device = sides(config)
    return joined(config, loader=loader, device=device / 100, peak_bytes=GIB)


def memory_cliff(config: TrainingConfig) -> FakeTrial:
    """The larger the batch, the faster, up to where the memory ends: at 176 samples, in half precision at 240."""
    loader, device = sides(config)
    sample_mib = 48 if config.amp_dtype in {"bfloat16", "float16"} else 64
    peak = 3 * GIB + config.micro_batch_size * sample_mib * 2**20
    return joined(
        config, loader=loader, device=device / 10 * config.micro_batch_size**0.2, peak_bytes=peak
    )


def fastest_of(search: Search, cost: CostModel) -> float:
    """The best rate of the whole space within the limit."""
    trials = [cost(config) for config in composed(search)]
    return max(
        one.samples_per_s for one in trials if one.peak_memory_bytes <= search.space.limit_bytes
    )


def composed(search: Search) -> list[TrainingConfig]:
    """All configurations of a space, which a large one takes seconds to compose: kept for searches of the same."""
    space = search.space
    key = repr((space.parameters, space.baseline))
    if key not in _COMPOSED:
        found = dict.fromkeys(compose(params, space) for params in space.combinations())
        _COMPOSED[key] = [one for one in found if isinstance(one, TrainingConfig)]
    return _COMPOSED[key]


def guided(folder: Path, cost: CostModel, *, seed: int = 0, **arguments: Any) -> Search:
    """A guided search that has ended, by itself unless a number of trials is given."""
    search = make_search(
        folder,
        FakeLauncher(cost, seed=seed),
        **{"n_trials": None, "limit_bytes": LIMIT, **arguments},
    )
    search.proposer.seed = seed
    search.run()
    return search


def until_near(search: Search, cost: CostModel) -> int:
    """How many trials it took to come within 3 % of the best of the space."""
    best = fastest_of(search, cost)
    rates = [
        cost(one.config).samples_per_s if one.is_feasible else 0.0 for one in search.study.records
    ]
    assert max(rates) >= NEAR * best
    return 1 + next(place for place, rate in enumerate(rates) if rate >= NEAR * best)


def curves_of(search: Search) -> list[CurvesJob]:
    launcher = search.runner.launcher
    assert isinstance(launcher, FakeLauncher)
    return [job for job in launcher.jobs if job.kind == "curves"]
