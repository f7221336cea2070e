"""Machines, datasets, search spaces, and what a job's process needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.config.environment import Environment
from autotune.config.plan import Objective, OptimizerFacts, SearchSpace, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.policy import POLICY, Policy
from autotune.protocol.messages import ProcessSetup
from autotune.space.ranges import Basis
from autotune.space.space import ResolvedSpace, resolve
from autotune.testing import fake_environment, fake_facts


def make_environment(**changes: Any) -> Environment:
    """Return a machine with one CUDA device and two cores; keywords change fields."""
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


GPU = make_environment(cores=8, ram_bytes=2**36)
"""A machine with one CUDA device and eight cores."""
FOUR_DEVICES = make_environment(device_count=4, cores=16)
"""A machine with four CUDA devices and sixteen cores."""
CPU = make_environment(
    device="cpu",
    device_kind="cpu",
    device_name="x86",
    native_amp_dtypes=("float32", "bfloat16"),
    cores=4,
    ram_bytes=2**36,
)
"""A machine with four cores and no accelerator."""
SERVER = make_environment(
    device_memory_bytes=139 * 2**30,
    driver="570.86.15",
    cores=16,
    ram_bytes=128 * 2**30,
    platform="Linux-6.8.0-x86_64-with-glibc2.39",
    versions={"optuna": "5.0.0", "numpy": "2.3.1"},
)
"""An H200 as it describes itself, for what is shown to a user."""


def make_facts(**changes: Any) -> WorkloadFacts:
    """Return a map-style image dataset of 10,000; keywords change fields."""
    values = {
        "dataset_length": 10_000,
        "is_iterable": False,
        "has_4d_input": True,
        "parameter_count": 1_000,
        "optimizer": OptimizerFacts(name="SGD"),
        "step_source": "cross-entropy, inferred from integer targets",
    }
    return WorkloadFacts.model_validate(values | changes)


RESNET = make_facts(dataset_length=50_000, parameter_count=11_173_962)
"""A ResNet-18 on CIFAR-10, for what is shown to a user."""


def make_space(
    given_space: Mapping[str, Any] | None = None,
    *,
    baseline: TrainingConfig | None = None,
    environment: Environment | None = None,
    drop_last: bool = True,
    global_batch: str = "scale",
    max_batch_scale: float = 8,
    **facts: Any,
) -> ResolvedSpace:
    """Resolve the user's space; further keywords are fields of the dataset's facts."""
    return resolve(
        Basis(
            given=SearchSpace.model_validate(given_space or {}).given(),
            baseline=baseline or TrainingConfig(),
            objective=Objective.model_validate(
                {"global_batch": global_batch, "max_batch_scale": max_batch_scale}
            ),
            facts=make_facts(**facts),
            environment=environment or make_environment(),
            drop_last=drop_last,
        )
    )


def make_fake_space(
    environment: Environment | None = None,
    *,
    baseline: TrainingConfig | None = None,
    objective: Mapping[str, Any] | None = None,
    policy: Policy = POLICY,
    **space: Any,
) -> ResolvedSpace:
    """Resolve a space for the fake launcher's workload; keywords are the space's settings."""
    return resolve(
        Basis(
            given=SearchSpace.model_validate(space).given(),
            baseline=baseline or TrainingConfig(),
            objective=Objective.model_validate(objective or {}),
            facts=fake_facts(),
            environment=environment or fake_environment(),
            policy=policy,
        )
    )


def make_process(folder: Path, **changes: Any) -> ProcessSetup:
    """Return what a job's process needs, on the CPU and in a folder; keywords change fields."""
    values = {
        "device": "cpu",
        "seed": 0,
        "deadline_s": 60.0,
        "sys_path": (),
        "working_directory": folder,
        "python_path": None,
    }
    return ProcessSetup.model_validate(values | changes)
