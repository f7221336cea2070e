"""Train on one batch, in the configuration's precision, layout and accumulation.

Comes in: a built model, an optimizer and a first batch, from which `infer_step` decides how the
loss is computed. Goes out: a `Trainer`, whose `train` the measuring loop calls for each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.apply.cores import set_cudnn_benchmark
from autotune.apply.prepare import Accumulator
from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.worker.batch import tensors_of
from autotune.worker.build import WorkloadFault, build_optimizer
from autotune.worker.device import Device

_ADVICE = "pass step=lambda model, batch: ... that returns the loss"


@dataclass(frozen=True, slots=True)
class Step:
    """The function that computes the loss of a batch, and a description of where it comes from."""

    function: Callable[[nn.Module, Any], Tensor]
    source: str


def infer_step(workload: Workload, batch: Any) -> Step:
    """Return the user's step, or the one that the form of a batch implies.

    Args:
        workload: The user's workload, with or without step and loss.
        batch: A batch as the loader delivers it.

    Raises:
        WorkloadFault: No step is given, and the batch holds no tensor or has no known form.
    """
    if workload.step is not None:
        return Step(workload.step, "the step that was given")
    if not tensors_of(batch):
        raise WorkloadFault(
            f"a batch must hold at least one tensor, but the loader yields {type(batch).__name__} "
            f"without any; "
            f"return tensors or numbers from the dataset, pass collate_fn, or {_ADVICE}"
        )
    if isinstance(batch, Mapping) and workload.loss is None:
        return Step(_keyword_step, "model(**batch), its .loss or ['loss']")
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    if is_pair and workload.loss is not None:
        return Step(
            partial(_pair_step, workload.loss), "loss(model(x), y) with the loss that was given"
        )
    if is_pair and isinstance(batch[1], Tensor):
        if batch[1].is_floating_point():
            return Step(
                partial(_pair_step, _mse), "mean squared error, inferred from floating targets"
            )
        return Step(
            partial(_pair_step, _cross_entropy), "cross-entropy, inferred from integer targets"
        )
    if isinstance(batch, Mapping):
        raise WorkloadFault(
            f"loss(outputs, targets) needs a batch (inputs, targets), but got {_form(batch)}; leave "
            f"loss out where the model returns it, or {_ADVICE}"
        )
    raise WorkloadFault(
        "without step, a batch must be a mapping (passed to the model as keywords) or a pair "
        f"(inputs, target tensor), but got {_form(batch)}; {_ADVICE}"
    )


class StepTrainer(Protocol):
    """Trains batch after batch: a workload's step (`Trainer`), none (`NoTrainer`), or a user's script."""

    config: TrainingConfig
    device: Device

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The GradScaler; disabled unless the precision is float16."""

    @property
    def accumulated(self) -> int:
        """Batches since the optimizer's last step."""

    def train(self, batch: Any) -> Any:
        """Train on a batch; return the loss without synchronizing."""

    def to_device(self, batch: Any) -> Any:
        """Return the batch on the device, in the configuration's layout."""

    def without_exchange(self) -> AbstractContextManager[None]:
        """Train without exchanging gradients within this context, if that is possible."""

    def in_loop(self, action: Callable[[], object]) -> None:
        """Run an action in the loop's own context: at once, or before a script's next batch.

        A greenlet has its own floating-point modes.
        """


@dataclass(slots=True)
class Trainer:
    """The state of training: trains batch after batch, with an optimizer step after each accumulation."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    config: TrainingConfig
    device: Device
    accumulator: Accumulator

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The GradScaler; disabled unless the precision is float16."""
        return self.accumulator.scaler

    @property
    def accumulated(self) -> int:
        """Batches since the optimizer's last step."""
        return self.accumulator.accumulated

    def in_loop(self, action: Callable[[], object]) -> None:
        """Run an action at once."""
        action()

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Train without exchanging gradients: each rank may take as many steps as its own time allows.

        Raises:
            RuntimeError: DDP needs the exchange.
        """
        has_ranks = self.config.process_count > 1
        if has_ranks and self.accumulator.no_sync is None:
            raise RuntimeError("with ddp.static_graph no rank can train by itself")
        self.accumulator.exchanges_nothing = has_ranks
        try:
            yield
        finally:
            self.accumulator.exchanges_nothing = False

    def train(self, batch: Any) -> Tensor:
        """Run forward, backward, and the optimizer's step if one is due; return the loss without synchronizing.

        Raises:
            WorkloadFault: The step does not return a scalar loss.
        """
        batch = self.to_device(batch)
        with self.accumulator:
            loss = self.step.function(self.model, batch)
            if not self._is_loss(loss):
                wrong = f"the step must return a scalar loss tensor, but returned {_shape(loss)}"
                raise WorkloadFault(f"{wrong}; {_ADVICE}")
            self.accumulator.backward(loss)
        if loss.ndim:
            return loss.detach().mean()
        return loss.detach()

    def to_device(self, batch: Any) -> Any:
        """Return the batch on the device, in the configuration's layout; pinned memory is copied asynchronously."""
        return self.config.to_device(batch, self.device.torch_device)

    def _is_loss(self, loss: Any) -> bool:
        """Return whether this is one value, or under dp one per device if the model computes its own loss."""
        if not isinstance(loss, Tensor):
            return False
        return loss.numel() == 1 or (self.accumulator.gathers and loss.ndim == 1)


@dataclass(slots=True)
class NoTrainer:
    """Discard batches; used to time the loader alone."""

    config: TrainingConfig
    device: Device = field(default_factory=lambda: Device(torch.device("cpu"), "cpu"))
    scaler: torch.amp.GradScaler = field(
        default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False)
    )
    accumulated: int = 0

    def train(self, batch: Any) -> float:  # noqa: ARG002 - the signature of StepTrainer
        """Discard a batch."""
        return 0.0

    def to_device(self, batch: Any) -> Any:
        """Return the batch as it is."""
        return batch

    def in_loop(self, action: Callable[[], object]) -> None:
        """Run an action at once."""
        action()

    def without_exchange(self) -> AbstractContextManager[None]:
        """Return an empty context: there is nothing to exchange."""
        return nullcontext()


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set the threads of each torch operation within this context; None: leave them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def open_trainer(
    workload: Workload, model: nn.Module, batch: Any, config: TrainingConfig, device: Device
) -> Trainer:
    """Return a trainer of a built model, with the workload's optimizer and step.

    Args:
        workload: The user's workload.
        model: The model, built for this configuration.
        batch: A first batch, from which the step is inferred if none is given.
        config: Precision, layout and accumulation.
        device: The device that the model is on.

    Raises:
        WorkloadFault: No step can be inferred, or the optimizer can't be used.
    """
    optimizer = build_optimizer(workload, model, config.lr, fused=config.fused)
    return make_trainer(model, optimizer, infer_step(workload, batch), config, device)


def make_trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Step,
    config: TrainingConfig,
    device: Device,
) -> Trainer:
    """Return a trainer in the configuration's precision; set TF32 and cuDNN's benchmark for this process.

    Args:
        model: The model, built for this configuration.
        optimizer: Optimizer of its parameters.
        step: Computes the loss of a batch.
        config: Precision, layout and accumulation.
        device: The device that the model is on.
    """
    set_cudnn_benchmark(config.cudnn_benchmark)
    if config.amp_dtype == "tf32":
        config.autocast(device.torch_device).__enter__()  # for the whole life of this process
    accumulator = config.accumulator(model, optimizer, device=device.torch_device)
    return Trainer(model, optimizer, step, config, device, accumulator)


def _keyword_step(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise WorkloadFault(
            "model(**batch) must return an object with .loss or a mapping with 'loss', "
            f"but returned {type(outputs).__name__}; {_ADVICE}"
        )
    return loss  # type: ignore[no-any-return] # checked where it is used


def _pair_step(loss: Callable[[Any, Any], Tensor], model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return loss(model(inputs), targets)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss for classes in the last dimension, (batch, length, classes), or in torch's place.

    Torch's place is (batch, classes, ...).
    """
    if not isinstance(outputs, Tensor) or outputs.ndim != targets.ndim + 1:
        raise WorkloadFault(
            "for integer targets the model must return one score a class, one dimension more than "
            "the targets' "
            f"{tuple(targets.shape)}, but returned {_shape(outputs)}; pass loss= or step="
        )
    labels = targets if targets.dtype == torch.int64 else targets.long()
    if targets.ndim > 1 and outputs.shape[:-1] == targets.shape:
        return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())
    return functional.cross_entropy(outputs, labels)


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    if not isinstance(outputs, Tensor) or outputs.numel() != targets.numel():
        raise WorkloadFault(
            f"for floating targets of shape {tuple(targets.shape)} the model must return as many "
            f"values, but returned {_shape(outputs)}; pass loss= or step="
        )
    return functional.mse_loss(outputs, targets.reshape(outputs.shape).to(outputs.dtype))


def _shape(value: Any) -> str:
    """Return the shape of a value for an error message, or the name of its type."""
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    return type(value).__name__


def _form(batch: Any) -> str:
    """Return the type and length of a batch for an error message."""
    name = type(batch).__name__
    if isinstance(batch, tuple | list):
        return f"a {name} of {len(batch)}"
    return name
