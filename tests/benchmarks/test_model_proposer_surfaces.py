"""Guided searches on recorded surfaces and landscapes: neither chance nor other trials mislead them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune import TrainingConfig
from autotune.testing import FakeLauncher, FakeTrial
from benchmarks.replay.landscapes import LANDSCAPES
from benchmarks.replay.methods import METHODS
from benchmarks.replay.replay import SURFACES, read_surface
from tests.factories.searches import make_search


def regrets(name: str, seed: int) -> list[float]:
    """How far what a search would recommend after each trial lies under the best of the surface."""
    path = min(SURFACES.glob(f"{name}-*.jsonl"))
    surface = read_surface(path)
    return [
        surface.truth.regret(step.recommended) for step in METHODS["autotune"](surface, seed).steps
    ]


@pytest.mark.parametrize("seed", range(2))
def test_a_lucky_window_of_a_bursty_reader_is_not_taken_for_the_best_there_is(seed: int) -> None:
    """Its windows tell little, for all that the model knows: held against the luckiest, nothing would seem worth it."""
    assert regrets("bursty", seed)[-1] < 0.05, "its best is known to 4 %"


@pytest.mark.parametrize("name", ["bursty", "sleeping_vectors"])
@pytest.mark.parametrize("seed", [0, 5])
def test_what_promises_most_is_tried_although_others_brought_nothing(name: str, seed: int) -> None:
    """Trials of the sampler and at the user's own batch said that it was time to end, a fifth under the best."""
    assert min(regrets(name, seed)) < 0.15


@pytest.mark.parametrize("name", ["shared_cores, 3 %", "cliff_and_limit, 3 %"])
def test_eight_proposals_at_once_are_not_eight_times_the_same_guess(
    tmp_path: Path, name: str
) -> None:
    ground = LANDSCAPES[name]

    def cost(config: TrainingConfig) -> FakeTrial:
        sides = ground.alone(config)
        return FakeTrial(
            samples_per_s=ground.together(config),
            peak_memory_bytes=sides.peak_bytes,
            loader_ceiling=sides.loader,
            device_ceiling=sides.device,
        )

    launcher = FakeLauncher(cost, environment=ground.launcher(0).environment)
    settings: dict[str, Any] = {
        "baseline": ground.baseline,
        "limit_bytes": ground.limit_bytes,
        **ground.domains,
    }
    search = make_search(tmp_path, launcher, n_trials=1, **settings)
    search.run()
    search.proposer.prepare(search.runner, 60.0, search.ceilings)
    for _ in range(8):
        search.proposer.propose(search.best)
        assert search.study.ask() is not None
    configs = [trial.config for trial in search.study.running]
    fitting = [config for config in configs if config in ground.truth.rates]
    assert min(map(ground.truth.regret, fitting)) < 0.05
    varied = [
        setting
        for setting in ground.domains
        if len({getattr(config, setting) for config in configs}) > 1
    ]
    assert {"num_workers", "micro_batch_size", "amp_dtype"} <= set(varied)
