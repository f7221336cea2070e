"""A search on a simulated machine finds what holds loader workers up, and leaves alone what does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import autotune
from autotune.config.training_config import TrainingConfig
from autotune.testing import FakeLauncher, FakeTrial, fake_environment, fake_facts

SEEN = {"slow_tail_fraction": 0.6, "cores_per_item": 3.0}
FEW = 12
"""Trials within which it must be found."""


def machine(setting: str) -> Any:
    """Loading limits; another value of one setting doubles its rate from two workers on."""

    def cost(config: TrainingConfig) -> FakeTrial:
        gain = 1.0
        if setting == "in_order" and config.num_workers > 1 and not config.in_order:
            gain = 2.0
        if setting == "worker_threads" and config.num_workers > 1 and config.worker_threads == 1:
            gain = 2.0
        loader = 200.0 * min(max(1, config.num_workers), 4) * gain
        device = config.micro_batch_size / (0.002 + 20e-6 * config.micro_batch_size)
        rate = min(loader, device)
        return FakeTrial(
            samples_per_s=rate,
            peak_memory_bytes=2**29,
            busy_fraction=rate / device,
            loader_ceiling=loader,
            device_ceiling=device,
        )

    return cost


def searched(setting: str, folder: Path) -> autotune.SearchResult:
    facts = fake_facts().model_copy(update=SEEN)
    launcher = FakeLauncher(machine(setting), facts=facts, environment=fake_environment(cores=4))
    return autotune.search(
        nn.Linear(4, 2),
        [(0, 0)],
        baseline={"num_workers": 2, "prefetch_factor": 2},
        n_trials=FEW,
        launcher=launcher,
        run_dir=folder,
        progress=False,
    )


@pytest.mark.slow
def test_what_the_look_has_shown_to_do_nothing_is_not_recommended(tmp_path: Path) -> None:
    found = searched("nothing", tmp_path)
    assert (found.best.in_order, found.best.worker_threads) == (True, None)
    assert all(
        trial.config.in_order and trial.config.worker_threads is None for trial in found.trials[:4]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "value"), [("in_order", False), ("worker_threads", 1)])
def test_setting_that_doubles_the_loader_is_found(
    setting: str, value: object, tmp_path: Path
) -> None:
    found = searched(setting, tmp_path)
    assert getattr(found.best, setting) == value
    assert found.speedup is not None
    assert found.speedup > 3.0, "twice the workers and twice their rate"
