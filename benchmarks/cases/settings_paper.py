"""Simulated machines for the settings that need what the usual machine lacks: a GPU, or several NUMA nodes.

Comes in: a SettingCase on paper. Goes out: a FakeLauncher whose device is so many times as fast with the setting, and
what the search is given. The factors are made up: they show what a search does, not what a GPU gains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.config.training_config import TrainingConfig
from autotune.testing import FakeLauncher, FakeTrial, fake_environment, fake_facts
from benchmarks.cases.settings import Effect, SettingCase

__all__ = ["Simulated", "simulated"]

_FACTORS: Mapping[str, Mapping[Effect, float]] = {
    "fused": {"wins": 1.05, "nothing": 1.0, "loses": 0.97},
    "cudnn_benchmark": {"wins": 1.15, "nothing": 1.0, "loses": 0.95},
    "compile_mode": {"wins": 1.5, "nothing": 1.0, "loses": 0.9},
    "numa_binding": {"wins": 1.08, "nothing": 1.0, "loses": 0.95},
}
"""The device's rate with the setting over that without: of the order that reviews of these settings tell."""
_ITEM_S = 100e-6
_FIXED_S = 2e-3
_SAMPLE_S = 50e-6
_SAMPLE_BYTES = 8 * 2**20
_MODEL_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A made-up machine, and what a search on it is given."""

    launcher: FakeLauncher
    space: Mapping[str, Any]


def simulated(case: SettingCase, seed: int) -> Simulated:
    """A machine with a GPU and two NUMA nodes, on which the setting does what the case says."""
    factor = _FACTORS[case.setting][case.expects]

    def cost(config: TrainingConfig) -> FakeTrial:
        speed = factor if getattr(config, case.setting) == case.value else 1.0
        speed *= 2.0 if config.amp_dtype in {"bfloat16", "float16"} else 1.0
        loader = max(1, min(config.num_workers, 8)) / _ITEM_S
        batch_s = (_FIXED_S + _SAMPLE_S * config.micro_batch_size) / speed
        device = config.micro_batch_size / batch_s
        rate = min(loader, device) if config.num_workers else 1 / (1 / loader + 1 / device)
        return FakeTrial(
            samples_per_s=rate,
            peak_memory_bytes=_MODEL_BYTES + config.micro_batch_size * _SAMPLE_BYTES,
            busy_fraction=rate / device,
            loader_ceiling=loader,
            device_ceiling=device,
        )

    found = fake_facts()
    facts = found.model_copy(
        update={
            "has_convolutions": True,
            "has_fixed_shapes": True,
            "optimizer": found.optimizer.model_copy(update={"can_fuse": True}),
        }
    )
    environment = fake_environment(cores=16).model_copy(update={"numa_nodes": 2})
    launcher = FakeLauncher(cost=cost, noise=0.01, seed=seed, environment=environment, facts=facts)
    return Simulated(
        launcher=launcher, space={"compile": True} if case.setting == "compile_mode" else {}
    )
