"""Resolve references, call factories, and build model, dataset and optimizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.apply.prepare import is_fused
from autotune.config.plan import Ref, Workload
from autotune.config.training_config import TrainingConfig
from autotune.worker.build import (
    WorkloadFault,
    build_dataset,
    build_model,
    build_optimizer,
    optimizer_facts,
    resolved,
)
from autotune.worker.device import open_device

CODE = """
import torch
from neighbour import SIZE

class Nets:
    @staticmethod
    def small():
        return torch.nn.Linear(SIZE, 1)

def make_model():
    return Nets.small()
"""


@pytest.fixture(autouse=True)
def own_modules() -> Iterator[None]:
    """The user code that a test imports is forgotten after it."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith(("nets", "neighbour", "broken"))]:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with user code: nets.py, its neighbour, and one that imports what is not there."""
    (tmp_path / "nets.py").write_text(CODE)
    (tmp_path / "neighbour.py").write_text("SIZE = 3")
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_installed")
    return tmp_path


def model_of(target: str, *folders: Path) -> Any:
    """What a reference to a model leads to."""
    ref = Ref(target=target, folders=tuple(str(folder) for folder in folders))
    return resolved(Workload(model=ref, dataset=[1])).model


def test_reference_to_a_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    assert isinstance(model_of("nets:Nets.small")(), nn.Linear)


def test_reference_to_a_file(folder: Path) -> None:
    assert isinstance(model_of("nets.py:make_model", Path("/nowhere"), folder)(), nn.Linear)
    # it is loaded once
    assert model_of("nets.py:Nets", folder) is model_of(f"{folder}/nets.py:Nets")


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("no_such_module_anywhere:f", r"workload\.model.*'no_such_module_anywhere'"),
        ("json.no_such_part:f", r"'json\.no_such_part'"),
        ("absent.py:f", r"absent\.py.*/absent\.py"),
        ("nets.py:make_modle", "'make_modle'.*'make_model'"),
        ("nets.py:Nets.smal", "'smal'.*'small'"),
        ("nets.py:zzzzzz", "'zzzzzz'$"),
    ],
)
def test_reference_to_nothing(target: str, named: str, folder: Path) -> None:
    with pytest.raises(WorkloadFault, match=named):
        model_of(target, folder)


def test_import_error_of_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    for target in ("broken:f", "broken.py:f"):
        with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
            model_of(target, folder)


def test_model_is_set_to_train() -> None:
    model = build_model(
        Workload(model=lambda: nn.Linear(1, 1).eval(), dataset=None),
        TrainingConfig(),
        open_device("cpu"),
    )
    assert isinstance(model, nn.Linear)
    assert model.training


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (3, r"model.*\bbuiltins\.int\b"),
        (lambda: 3, r"model.*\bnn\.Module\b.*\bbuiltins\.int\b"),
        (lambda size: size, "model.*'size'"),
        (nn.Linear, "model.*'in_features'"),
    ],
)
def test_no_model(model: Any, named: str) -> None:
    with pytest.raises(WorkloadFault, match=named):
        build_model(Workload(model=model, dataset=None), TrainingConfig(), open_device("cpu"))


@pytest.mark.parametrize("dataset", [[1, 2], lambda: [1, 2], range(2), lambda: iter([1])])
def test_datasets(dataset: Any) -> None:
    assert next(iter(build_dataset(Workload(model=None, dataset=dataset)))) in {0, 1}


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        ([], r"dataset.*\b0\b"),
        (list, r"dataset.*\b0\b"),
        (3, "dataset"),
        (lambda: 3, "dataset.*__getitem__"),
    ],
)
def test_no_dataset(dataset: Any, named: str) -> None:
    with pytest.raises(WorkloadFault, match=named):
        build_dataset(Workload(model=None, dataset=dataset))


def test_default_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    optimizer = build_optimizer(Workload(model=None, dataset=None), model, 0.5)
    assert isinstance(optimizer, torch.optim.SGD)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_optimizer_facts() -> None:
    workload = Workload(
        model=None, dataset=None, optimizer=lambda p, lr: torch.optim.AdamW(p, lr, betas=(0.8, 0.9))
    )
    facts = optimizer_facts(build_optimizer(workload, nn.Linear(1, 1), 0.1))
    assert (facts.name, facts.betas, facts.eps) == ("AdamW", (0.8, 0.9), 1e-8)


@pytest.mark.parametrize(
    ("model", "optimizer", "named"),
    [
        (nn.ReLU(), None, "model.*parameters"),
        (nn.Linear(1, 1), lambda *_: 3, r"\btorch\.optim\.Optimizer\b.*\bbuiltins\.int\b"),
    ],
)
def test_no_optimizer(model: nn.Module, optimizer: Any, named: str) -> None:
    with pytest.raises(WorkloadFault, match=named):
        build_optimizer(Workload(model=None, dataset=None, optimizer=optimizer), model, 0.1)


def test_fused() -> None:
    model = nn.Linear(2, 2)
    own = torch.optim.AdamW(model.parameters(), fused=True)
    made_by: list[Any] = [
        None,
        own,
        lambda parameters, lr: torch.optim.Adam(parameters, lr, fused=True),
    ]
    for optimizer, is_own in zip(made_by, (False, True, True), strict=True):
        workload = Workload(model=None, dataset=None, optimizer=optimizer)
        chosen = {
            fused: build_optimizer(workload, model, 0.1, fused=fused)
            for fused in (None, True, False)
        }
        assert {fused: is_fused(one) for fused, one in chosen.items()} == {
            None: is_own,
            True: True,
            False: False,
        }
    assert is_fused(own)


def test_fused_in_its_own_way() -> None:
    class OwnFused(torch.optim.AdamW):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, lr, fused=True)

    workload = Workload(model=None, dataset=None, optimizer=OwnFused)
    assert is_fused(build_optimizer(workload, nn.Linear(2, 2), 0.1, fused=False))
