"""Weights are read as data, from wherever a framework keeps them, and what is no weights is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.worker.setup.build import WorkloadFault
from autotune.worker.setup.checkpoint import load_checkpoint


def trained() -> nn.Linear:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 7.0)
    return model


def weights() -> dict[str, Any]:
    return dict(trained().state_dict())


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return Path.touch, (Path("touched"),)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "saved",
    [
        weights(),
        {f"module.{name}": value for name, value in weights().items()},
        {f"_orig_mod.{name}": value for name, value in weights().items()},
        {f"_orig_mod.module.{name}": value for name, value in weights().items()},
        {"state_dict": weights(), "epoch": 3},
        {"model": weights(), "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}},
    ],
    ids=["state_dict", "ddp", "compiled", "compiled ddp", "state_dict below", "tutorial"],
)
def test_weights_are_found_where_frameworks_keep_them(tmp_path: Path, saved: Any) -> None:
    file = tmp_path / "at.pt"
    torch.save(saved, file)
    model = nn.Linear(2, 2)
    load_checkpoint(str(file), model)
    assert torch.equal(model.weight, trained().weight)


def test_safetensors_are_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    file = tmp_path / "at.safetensors"
    safetensors.save_file(weights(), str(file))
    model = nn.Linear(2, 2)
    load_checkpoint(str(file), model)
    assert torch.equal(model.weight, trained().weight)


def test_a_function_may_load_what_it_likes() -> None:
    model = nn.Linear(2, 2)
    load_checkpoint(lambda found: found.load_state_dict(weights()), model)
    assert torch.equal(model.weight, trained().weight)


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({"weight": torch.ones(3, 3), "bias": torch.ones(2)}, "weight"),
        ({"weight": torch.ones(2, 2)}, "bias"),
        ({"weight": torch.ones(2, 2), "bias": torch.ones(2), "more": torch.ones(1)}, "more"),
        ({"step": 3, "loss": 0.5}, "step, loss"),
        ([torch.ones(2)], "list"),
    ],
    ids=["other shapes", "some missing", "some more", "no weights", "a list"],
)
def test_what_the_model_can_not_take_is_refused(tmp_path: Path, saved: Any, told: str) -> None:
    file = tmp_path / "at.pt"
    torch.save(saved, file)
    with pytest.raises(WorkloadFault, match=r"workload\.checkpoint") as caught:
        load_checkpoint(str(file), nn.Linear(2, 2))
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_pickle_in_the_place_of_weights_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Evil()}, "at.pt")
    with pytest.raises(WorkloadFault, match=r"at\.pt"):
        load_checkpoint("at.pt", nn.Linear(2, 2))
    assert not Path("touched").exists()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadFault, match=r"none\.pt"):
        load_checkpoint(str(tmp_path / "none.pt"), nn.Linear(2, 2))


class Tied(nn.Module):
    """An embedding whose weight is the last layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_a_tied_weight_need_not_be_there_twice() -> None:
    model = Tied()
    load_checkpoint({"embedding.weight": torch.full((4, 2), 7.0)}, model)
    assert model.head.weight[0, 0].item() == 7.0


def test_a_function_that_makes_another_model_is_refused() -> None:
    with pytest.raises(WorkloadFault, match="returns another"):
        load_checkpoint(lambda _: nn.Linear(2, 2), nn.Linear(2, 2))


def test_weights_that_only_share_their_storage_with_others_must_be_there(tmp_path: Path) -> None:
    model = nn.Module()
    flat = torch.zeros(4)  # as an RNN's weights lie on CUDA
    model.first, model.second = nn.Parameter(flat[:2]), nn.Parameter(flat[2:])
    assert model.first.untyped_storage().data_ptr() == model.second.untyped_storage().data_ptr()
    with pytest.raises(WorkloadFault, match="lacks second"):
        load_checkpoint({"first": torch.ones(2)}, model)
