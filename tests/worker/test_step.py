"""Turn a batch into a loss, and train in any precision, layout and accumulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.worker.build import WorkloadFault, build_model
from autotune.worker.device import Device, open_device
from autotune.worker.step import Trainer, infer_step, make_trainer
from tests.launch.user_batches import Encoding, Graph, Opaque

PLAIN = Workload(model=None, dataset=None)


class Constant(nn.Module):
    """Returns what it was given."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.value


@pytest.fixture
def cpu() -> Device:
    """The processor."""
    return open_device("cpu")


@pytest.fixture
def trainer(cpu: Device) -> Callable[..., Trainer]:
    """A trainer of a model by SGD; settings as keywords."""

    def make(
        model: nn.Module,
        batch: Any,
        lr: float = 0.1,
        workload: Workload | None = None,
        **settings: Any,
    ) -> Trainer:
        config = TrainingConfig(lr=lr, **settings)
        workload = workload or Workload(model=model, dataset=None)
        model = build_model(Workload(model=model, dataset=None), config, cpu)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return make_trainer(model, optimizer, infer_step(workload, batch), config, cpu)

    return make


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    """Return the loss that is inferred for some outputs of a model."""
    return stepped((torch.zeros(len(targets), 3), targets), outputs)


def stepped(batch: Any, outputs: Any = None, **parts: Any) -> Tensor:
    """Return the loss of a batch, by a model with these outputs."""
    return infer_step(replace(PLAIN, **parts), batch).function(Constant(outputs), batch)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integer_targets_are_classes(dtype: torch.dtype) -> None:
    outputs, targets = torch.randn(6, 2), torch.tensor([0, 1, 0, 1, 1, 0])
    wanted = functional.cross_entropy(outputs, targets)
    assert torch.equal(loss_of(outputs, targets.to(dtype)), wanted)


def test_classes_last_or_second() -> None:
    outputs, targets = torch.randn(2, 7, 5), torch.randint(0, 5, (2, 7))
    wanted = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    assert torch.allclose(loss_of(outputs, targets), wanted)
    assert torch.allclose(loss_of(outputs.transpose(1, 2), targets), wanted)
    outputs, targets = torch.randn(2, 5, 4, 3), torch.randint(0, 5, (2, 4, 3))
    assert torch.allclose(loss_of(outputs, targets), functional.cross_entropy(outputs, targets))


@pytest.mark.parametrize(("outputs", "targets"), [((6, 1), (6,)), ((6,), (6, 1)), ((2, 3), (2, 3))])
def test_floating_targets_get_squared_error(
    outputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    got, wanted = torch.randn(outputs), torch.randn(targets)
    assert torch.allclose(loss_of(got, wanted), (got.flatten() - wanted.flatten()).square().mean())


def test_double_targets_take_the_outputs_type() -> None:
    assert loss_of(torch.zeros(3), torch.ones(3, dtype=torch.float64)).dtype == torch.float32


def test_given_loss() -> None:
    batch = (torch.ones(2), torch.ones(2))
    assert (
        stepped(batch, torch.ones(2), loss=lambda outputs, targets: (outputs + targets).sum()) == 4
    )


@pytest.mark.parametrize(
    "batch",
    [torch.ones(3), ["a", "b"], Opaque(torch.ones(3)), Graph(x=torch.ones(3)), Encoding(x=1)],
)
def test_given_step_takes_any_batch(batch: Any) -> None:
    step = infer_step(replace(PLAIN, step=lambda model, batch: torch.tensor(1.0)), batch)
    assert step.function(Constant(None), batch) == 1
    assert "step" in step.source


@pytest.mark.parametrize("batch", [{"x": torch.zeros(2)}, Encoding(x=torch.zeros(2))])
@pytest.mark.parametrize(
    "outputs", [{"loss": torch.tensor(2.0)}, SimpleNamespace(loss=torch.tensor(2.0))]
)
def test_mapping_is_passed_as_keywords(batch: Any, outputs: Any) -> None:
    assert stepped(batch, outputs) == 2
    assert ".loss" in infer_step(PLAIN, batch).source


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        (["a", "b"], r"\blist\b"),
        ({"a": "b"}, r"\bdict\b"),
        (torch.zeros(3), r"\bTensor\b.*step="),
        ((torch.zeros(3),) * 3, r"\btuple of 3\b.*step="),
        ([torch.zeros(3), ["a"]], r"\blist of 2\b"),
        (Graph(x=torch.zeros(3)), r"\bGraph\b.*step="),
        (Opaque(torch.zeros(3)), r"\bOpaque\b.*step="),
    ],
)
def test_batch_of_unknown_form(batch: Any, named: str) -> None:
    with pytest.raises(WorkloadFault, match=named):
        infer_step(PLAIN, batch)


@pytest.mark.parametrize(
    ("outputs", "targets", "named"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=torch.int64), r"\(4,\).*\(4,\)"),
        (torch.zeros(4, 2), torch.zeros(4, 1, dtype=torch.int64), r"\(4, 1\).*\(4, 2\)"),
        ((torch.zeros(4, 2),), torch.zeros(4, dtype=torch.int64), r"\btuple\b"),
        (torch.zeros(4, 2), torch.zeros(4), r"\(4,\).*\(4, 2\)"),
        ("words", torch.zeros(4), r"\bstr\b"),
    ],
)
def test_outputs_must_fit_targets(outputs: Any, targets: Tensor, named: str) -> None:
    with pytest.raises(WorkloadFault, match=named):
        loss_of(outputs, targets)


def test_mapping_without_a_loss() -> None:
    with pytest.raises(WorkloadFault, match=r"Tensor.*step="):
        stepped({"x": torch.zeros(2)}, torch.zeros(2))


@pytest.mark.parametrize(("value", "got"), [(torch.zeros(3), r"shape \(3,\)"), (1.0, "float")])
def test_step_must_return_a_scalar(value: Any, got: str, trainer: Callable[..., Trainer]) -> None:
    batch = (torch.zeros(2, 3), torch.zeros(2))
    workload = replace(PLAIN, step=lambda *_: value)
    with pytest.raises(WorkloadFault, match=got):
        trainer(nn.Linear(3, 1), batch, workload=workload).train(batch)


def test_float16_overflow_is_skipped(
    trainer: Callable[..., Trainer],
) -> None:
    batch = (torch.ones(2, 3), torch.full((2, 1), 3e4))
    ours = trainer(nn.Linear(3, 1), batch, amp_dtype="float16")
    before = ours.model.get_parameter("weight").clone()
    ours.train(batch)
    assert torch.equal(ours.model.get_parameter("weight"), before)
    assert ours.scaler.get_scale() < 65536


def test_gathered_losses_are_averaged(cpu: Device) -> None:
    class Gathered(nn.Linear):  # as DataParallel returns the losses of its replicas
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean(1)

    model = Gathered(3, 2)
    workload = Workload(model=model, dataset=None, step=lambda model, batch: model(batch))
    config = TrainingConfig(strategy="dp", world_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(model, optimizer, infer_step(workload, torch.ones(2, 3)), config, cpu)
    assert trainer.train(torch.ones(2, 3)).ndim == 0
