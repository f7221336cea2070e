"""Build the feeds and trainers on which loader and device are measured alone.

In: a workload and a curves job. Out: feeds and trainers in any configuration. A script has a bench
of its own, `worker.script.bench`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.protocol.messages import CurvesJob
from autotune.worker.build import (
    build_dataset,
    build_model,
    build_optimizer,
    kept_weights,
    put_back,
)
from autotune.worker.device import Device
from autotune.worker.feed import Feed
from autotune.worker.loader import build_loader
from autotune.worker.step import Step, StepTrainer, Trainer, infer_step, make_trainer


class Bench(Protocol):
    """Source of the parts to measure: a workload's, or a script's."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the weights that are kept aside."""
        ...

    def feed(self, config: TrainingConfig) -> Feed:
        """Return a feed of a configuration's loader, not started."""
        ...

    def prepare(self, batch: Any) -> None:
        """Prepare a model for the device's points, given a batch of the job's own configuration."""
        ...

    def trainer(self, config: TrainingConfig) -> StepTrainer:
        """Return a trainer of that model, in a configuration's layout and precision."""
        ...

    def after_point(self, *, is_failed: bool) -> None:
        """Free the gradients; if the point failed, put the initial weights back."""
        ...


@dataclass(slots=True)
class WorkloadBench:
    """Build loaders and a model from a workload; implements Bench."""

    workload: Workload
    job: CurvesJob
    device: Device
    scratch: Path
    dataset: Any = field(init=False)
    _model: nn.Module | None = None
    _step: Step | None = None
    _initial: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights and buffers before the first point, on the CPU."""
    _is_channels_last: bool = False

    def __post_init__(self) -> None:
        self.dataset = build_dataset(self.workload)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the weights that are kept aside."""
        return sum(tensor.nbytes for tensor in self._initial.values())

    def feed(self, config: TrainingConfig) -> Feed:
        """Return a feed of a configuration's loader, not started."""
        return Feed(build_loader(self.workload, self.dataset, config, self.scratch))

    def prepare(self, batch: Any) -> None:
        """Build the model, and keep its weights."""
        self._model = build_model(self.workload, self.job.config, self.device)
        self._step = infer_step(self.workload, batch)
        self._is_channels_last = self.job.config.channels_last
        self._initial = kept_weights(self._model)

    def trainer(self, config: TrainingConfig) -> Trainer:
        """Return a trainer in a configuration's layout and precision, with its own optimizer."""
        model = self._model
        step = self._step
        assert model is not None and step is not None, "prepare() comes first"  # noqa: S101, PT018 - our own bug
        if config.channels_last != self._is_channels_last:
            layout = torch.channels_last if config.channels_last else torch.contiguous_format
            model.to(memory_format=layout)  # type: ignore[call-overload] # torch's stubs lack the keyword alone
            self._is_channels_last = config.channels_last
        optimizer = build_optimizer(self.workload, model, config.lr, fused=config.fused)
        return make_trainer(model, optimizer, step, config, self.device)

    def after_point(self, *, is_failed: bool) -> None:
        """Free the gradients; if the point failed, put the initial weights back.

        Weights may have diverged, and products of zeros would take less power.
        """
        if self._model is None:
            return
        self._model.zero_grad(set_to_none=True)
        if is_failed:
            put_back(self._model, self._initial)
