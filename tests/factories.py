"""Factories for the core's models: every argument has a plain value, a test names what it is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from autotune.records.measurement import Block, Measurement, MemorySample, Window
from autotune.records.recommendation import Confirmation
from autotune.records.trial import Score, TrialRecord, TrialResult
from autotune.settings.environment import Environment
from autotune.settings.objective import Objective
from autotune.settings.search_space import SearchSpace
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import OptimizerFacts, WorkloadFacts
from autotune.space.resolved_space import ResolvedSpace, resolve


def _environment(**changes: Any) -> Environment:
    values = {
        "device": "cuda:0",
        "device_kind": "cuda",
        "device_name": "NVIDIA H200",
        "device_memory_bytes": 2**37,
        "device_count": 1,
        "native_amp_dtypes": ("float32", "tf32", "bfloat16", "float16"),
        "driver": "570.1",
        "cores": 2,
        "ram_bytes": 2**34,
        "platform": "Linux-x86_64",
        "python": "3.11.9",
        "torch": "2.13.0",
        "cuda": "13.0",
        "versions": {"optuna": "5.0.0"},
    }
    return Environment.model_validate(values | changes)


def _facts(**changes: Any) -> WorkloadFacts:
    values = {
        "dataset_length": 10_000,
        "is_iterable": False,
        "has_4d_input": True,
        "parameter_count": 1_000,
        "optimizer": OptimizerFacts(name="SGD"),
        "step_source": "cross-entropy, inferred",
    }
    return WorkloadFacts.model_validate(values | changes)


def _window(**changes: Any) -> Window:
    values = {
        "blocks": tuple(Block(samples=100, batches=10, seconds=1.0, data_wait_s=0.1) for _ in range(10)),
        "whole_epochs": False,
        "epoch_samples": None,
        "queue_capacity": 0,
        "queue_at_start": 0,
        "queue_at_end": 0,
        "warm_up_batches": 5,
        "warm_up_s": 0.5,
        "is_drained": True,
        "is_steady": True,
        "stopped_by": "precision",
    }
    return Window.model_validate(values | changes)


def _measurement(rate: float = 100.0, noise: float = 0.01, **changes: Any) -> Measurement:
    values = {
        "samples_per_s": rate,
        "samples_per_s_ci": (rate * (1 - noise), rate * (1 + noise)),
        "busy_fraction": 0.5,
        "busy_source": "nvml",
        "data_wait_fraction": 0.1,
        "peak_memory_bytes": 2**30,
        "startup_s": 1.0,
        "build_s": 0.2,
        "memory": MemorySample(peak_bytes=2**30, source="max reserved + outside torch"),
        "window": _window(),
        "loss": 0.7,
    }
    return Measurement.model_validate(values | changes)


def _confirmation(number: int, *rates: float | None, noise: float = 0.01, **settings: Any) -> Confirmation:
    rounds = tuple(None if rate is None else _measurement(rate, noise) for rate in rates)
    return Confirmation(number=number, config=TrainingConfig(**settings), rounds=rounds)


def _record(number: int = 1, **changes: Any) -> TrialRecord:
    values = {
        "number": number,
        "config": TrainingConfig(),
        "result": TrialResult(outcome="ok", measurement=_measurement()),
        "score": Score(value=1.0, feasible=True, violation=-0.5),
    }
    return TrialRecord.model_validate(values | changes)


@pytest.fixture(scope="session")
def make_environment() -> Callable[..., Environment]:
    """A CUDA machine with two cores; keywords change fields."""
    return _environment


@pytest.fixture(scope="session")
def make_facts() -> Callable[..., WorkloadFacts]:
    """A map-style image dataset of 10,000; keywords change fields."""
    return _facts


@pytest.fixture(scope="session")
def make_window() -> Callable[..., Window]:
    """Ten blocks of 100 samples and 1 s; keywords change fields."""
    return _window


@pytest.fixture(scope="session")
def make_measurement() -> Callable[..., Measurement]:
    """(rate, relative half width of its interval); keywords change fields."""
    return _measurement


@pytest.fixture(scope="session")
def make_confirmation() -> Callable[..., Confirmation]:
    """(number, a rate for each round); keywords are settings, `noise` the windows' relative half width."""
    return _confirmation


@pytest.fixture(scope="session")
def make_record() -> Callable[..., TrialRecord]:
    """A trial that went well; keywords change fields."""
    return _record


@pytest.fixture(scope="session")
def cpu(make_environment: Callable[..., Environment]) -> Environment:
    """A machine with four cores and no accelerator."""
    return make_environment(
        device="cpu", device_kind="cpu", device_name="x86", native_amp_dtypes=("float32", "bfloat16"), cores=4
    )


@pytest.fixture(scope="session")
def four_devices(make_environment: Callable[..., Environment]) -> Environment:
    """A machine with four CUDA devices and sixteen cores."""
    return make_environment(device_count=4, cores=16)


@pytest.fixture(scope="session")
def make_space(
    make_facts: Callable[..., WorkloadFacts], make_environment: Callable[..., Environment]
) -> Callable[..., ResolvedSpace]:
    """(the user's space as a mapping); keywords for resolve, `global_batch`, `max_batch_scale`, facts' fields."""

    def make(
        given_space: Mapping[str, Any] | None = None,
        *,
        baseline: TrainingConfig | None = None,
        environment: Environment | None = None,
        drop_last: bool = True,
        global_batch: str = "scale",
        max_batch_scale: float = 8,
        **facts: Any,
    ) -> ResolvedSpace:
        return resolve(
            SearchSpace.model_validate(given_space or {}),
            baseline=baseline or TrainingConfig(),
            objective=Objective.model_validate({"global_batch": global_batch, "max_batch_scale": max_batch_scale}),
            facts=make_facts(**facts),
            environment=environment or make_environment(),
            drop_last=drop_last,
        )

    return make
