"""The examples in configs/: every file is a configuration, and every workload trains in plain PyTorch."""

from __future__ import annotations

import importlib.util
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from autotune.config.plan import PARTS, Ref, SearchSpace
from autotune.files.plan_file import read_plan

CONFIGS = Path(__file__).parents[2] / "configs"
PLANS = sorted(CONFIGS.glob("*.yaml"))
WORKLOADS = ("digits", "photos", "sleeping_vectors", "tiny_gpt")
BATCH_SIZE = 4


@pytest.fixture(scope="session")
def photos_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "photos"
    module = load("photos")
    module.COUNT = 16  # type: ignore[attr-defined] # a module of our own, loaded anew
    module.dataset(folder)
    return folder


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_references_exist(path: Path) -> None:
    plan = read_plan(path)
    for part in PARTS:
        ref = getattr(plan.workload, part)
        if isinstance(ref, Ref):
            file, _, name = ref.target.partition(":")
            assert callable(getattr(load(Path(file).stem), name))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_example_is_short_with_baseline_in_space(path: Path) -> None:
    plan = read_plan(path)
    assert plan.budget.n_trials is not None
    assert plan.budget.n_trials <= 16
    assert plan.budget.timeout_s is not None
    assert plan.budget.timeout_s <= 100
    assert plan.space != SearchSpace()
    for name, domain in plan.space.given().items():
        value = getattr(plan.baseline, name)
        assert value in domain or (name == "prefetch_factor" and plan.baseline.num_workers == 0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_trains(name: str, photos_folder: Path) -> None:
    module = load(name)
    dataset = module.dataset(photos_folder) if name == "photos" else module.dataset()
    model = module.model()
    batch = next(iter(DataLoader(dataset, batch_size=BATCH_SIZE)))
    loss = loss_of(module, model, batch)
    assert math.isfinite(loss.item())
    assert len(torch.autograd.grad(loss, list(model.parameters()))) > 0


def test_photos_are_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("photos")
    monkeypatch.setattr(module, "COUNT", 8)
    folder = tmp_path / "data" / "photos"
    with ThreadPoolExecutor() as pool:
        datasets = list(pool.map(module.dataset, [folder] * 3))
    assert [len(dataset) for dataset in datasets] == [8 * module.CROPS] * 3
    assert [path.name for path in folder.parent.iterdir()] == ["photos"]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.jpg")}
    module.dataset(folder)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.jpg")}


def test_failed_photos_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("photos")
    photo, *_ = module._sample_photographs()
    monkeypatch.setattr(module, "COUNT", 8)
    monkeypatch.setattr(module, "_sample_photographs", lambda: [photo, None])
    with pytest.raises(AttributeError):
        module.dataset(tmp_path / "photos")
    assert not list(tmp_path.iterdir())


def test_photos_are_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("photos")
    monkeypatch.setattr(module, "COUNT", 4)
    for name in ("one", "other"):
        module.dataset(tmp_path / name)
    one, other = (
        [path.read_bytes() for path in sorted((tmp_path / name).rglob("*.jpg"))]
        for name in ("one", "other")
    )
    assert one == other


def test_photo(photos_folder: Path) -> None:
    dataset = load("photos").dataset(photos_folder)
    images, labels = default_collate([dataset[0], dataset[len(dataset) - 1]])
    assert images.shape == (2, 3, 96, 96)
    assert images.dtype == torch.float32
    assert labels.tolist() == [0, 1]
    assert images.abs().max() < 4


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"workload_{name}", CONFIGS / "workloads" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loss_of(module: ModuleType, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor
    if isinstance(batch, dict):
        loss = model(**batch)["loss"]
    else:
        inputs, targets = batch
        loss = getattr(module, "loss", torch.nn.functional.cross_entropy)(model(inputs), targets)
    return loss
