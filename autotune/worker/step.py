"""One training step: how a batch becomes a loss, in the configuration's precision, layout and accumulation.

`infer_step` decides from a first batch what to call; `Trainer.train` is what the measuring loop
runs for each batch.
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
    """How a batch becomes a loss, and in words where that comes from."""

    function: Callable[[nn.Module, Any], Tensor]
    source: str


def infer_step(workload: Workload, batch: Any) -> Step:
    """What computes the loss: the user's step, or what the batch's form says.

    Raises:
        WorkloadFault: no step is given, and the batch holds no tensor, or its form says nothing.
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
            f"loss(outputs, targets) needs a batch (inputs, targets), but got {_form(batch)}; "
            f"leave loss out where the "
            f"model returns it, or {_ADVICE}"
        )
    raise WorkloadFault(
        "without step, a batch must be a mapping (passed to the model as keywords) or a pair "
        "(inputs, target tensor), "
        f"but got {_form(batch)}; {_ADVICE}"
    )


class StepTrainer(Protocol):
    """Trains on one batch after another: a workload's step (Trainer), none at all, or somebody else's script."""

    config: TrainingConfig
    device: Device

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The GradScaler, a pass-through but for float16."""
        ...

    @property
    def accumulated(self) -> int:
        """Batches since the optimizer's last step."""
        ...

    def train(self, batch: Any) -> Any:
        """Train on a batch; hands on the loss without waiting for it."""
        ...

    def to_device(self, batch: Any) -> Any:
        """The batch on the device, in the configuration's layout."""
        ...

    def without_exchange(self) -> AbstractContextManager[None]:
        """Train without exchanging gradients, where that can be done."""
        ...


@dataclass(slots=True)
class Trainer:
    """The state of training: trains on one batch after another, and steps the optimizer after each accumulation."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    config: TrainingConfig
    device: Device
    accumulator: Accumulator

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The GradScaler, a pass-through but for float16."""
        return self.accumulator.scaler

    @property
    def accumulated(self) -> int:
        """Batches since the optimizer's last step."""
        return self.accumulator.accumulated

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Train without exchanging gradients: each rank may take as many steps as its own time allows.

        Raises:
            RuntimeError: DDP can't do without the exchange.
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
        """Forward, backward, and the optimizer's step where one is due; hands on the loss without waiting for it."""
        batch = self.to_device(batch)
        with self.accumulator:
            loss = self.step.function(self.model, batch)
            if not self._is_loss(loss):
                wrong = f"the step must return a scalar loss tensor, but returned {_shape(loss)}"
                raise WorkloadFault(f"{wrong}; {_ADVICE}")
            self.accumulator.backward(loss)
        return loss.detach().mean() if loss.ndim else loss.detach()

    def to_device(self, batch: Any) -> Any:
        """The batch on the device, in the configuration's layout; copies from pinned memory don't block."""
        return self.config.to_device(batch, self.device.torch_device)

    def _is_loss(self, loss: Any) -> bool:
        """One value, or under dp one for each device where the model computes its own."""
        return isinstance(loss, Tensor) and (
            loss.numel() == 1 or (self.accumulator.gathers and loss.ndim == 1)
        )


@dataclass(slots=True)
class NoTrainer:
    """Learns nothing: where the loader is measured alone, batches are taken and dropped."""

    config: TrainingConfig
    device: Device = field(default_factory=lambda: Device(torch.device("cpu"), "cpu"))
    scaler: torch.amp.GradScaler = field(
        default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False)
    )
    accumulated: int = 0

    def train(self, batch: Any) -> float:  # noqa: ARG002 - as a Trainer has it
        """Do nothing with a batch."""
        return 0.0

    def to_device(self, batch: Any) -> Any:
        """The batch stays where it is."""
        return batch

    def without_exchange(self) -> AbstractContextManager[None]:
        """There is nothing to exchange."""
        return nullcontext()


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """So many threads for each of torch's operations, and as many as before afterwards; None: as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def open_trainer(
    workload: Workload, model: nn.Module, batch: Any, config: TrainingConfig, device: Device
) -> Trainer:
    """A trainer of a built model, by the workload's own optimizer and step; the step is inferred from a first batch."""
    optimizer = build_optimizer(workload, model, config.lr, fused=config.fused)
    return make_trainer(model, optimizer, infer_step(workload, batch), config, device)


def make_trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Step,
    config: TrainingConfig,
    device: Device,
) -> Trainer:
    """A trainer in the configuration's precision; sets TF32 and cuDNN's benchmark for this process."""
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
    """Classes in the last dimension, (batch, length, classes), or in torch's place, (batch, classes, ...)."""
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
            f"values, "
            f"but returned {_shape(outputs)}; pass loss= or step="
        )
    return functional.mse_loss(outputs, targets.reshape(outputs.shape).to(outputs.dtype))


def _shape(value: Any) -> str:
    """What an error shows of a value: its shape, or its type where it has none."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _form(batch: Any) -> str:
    name = type(batch).__name__
    return f"a {name} of {len(batch)}" if isinstance(batch, tuple | list) else name
