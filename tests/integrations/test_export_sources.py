"""Exports held against frameworks that can not stand beside our torch: the sources in their wheels, as syntax trees.

`make integrations` fetches the wheels into build/sources, at the releases that are named here.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from hypothesis import given

from autotune.config.training_config import TrainingConfig
from autotune.export.axolotl import AXOLOTL
from autotune.export.composer import COMPOSER
from tests.export.configs import EVERYTHING
from tests.factories.configs import any_configs

pytestmark = pytest.mark.integrations
SOURCES = Path(__file__).parents[2] / "build" / "sources"


def source(package: str, *files: str) -> str:
    """Files of a package's wheel, one behind the other."""
    found = sorted(SOURCES.glob(f"{package}-*.whl"))
    if not found:
        pytest.skip(f"the wheel of {package} is not in {SOURCES}: make integrations fetches it")
    with ZipFile(found[-1]) as wheel:
        return "\n".join(wheel.read(file).decode() for file in files)


def tree(package: str, *files: str) -> ast.Module:
    """The syntax tree of files; what must stand first in a file is taken out."""
    lines = source(package, *files).splitlines()
    return ast.parse("\n".join(line for line in lines if not line.startswith("from __future__")))


def fields(module: ast.Module) -> dict[str, Any]:
    """Annotated fields of all classes, each with its default where that is plain."""
    found: dict[str, Any] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = node.value
            if isinstance(value, ast.Call):
                value = next((each.value for each in value.keywords if each.arg == "default"), None)
            found[node.target.id] = (
                ast.literal_eval(value) if isinstance(value, ast.Constant) else None
            )
    return found


def function(module: ast.Module, name: str) -> str:
    """The source of a function or a method, as Python writes it."""
    found = [
        node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert found, f"{name} is gone"
    return "\n".join(map(ast.unparse, found))


@pytest.fixture(scope="module")
def axolotl() -> dict[str, Any]:
    """The fields of axolotl's schema with their defaults."""
    names = ("config", "training")
    return fields(tree("axolotl", *(f"axolotl/utils/schemas/{name}.py" for name in names)))


@given(config=any_configs())
def test_each_name_of_an_export_is_one_of_axolotl(
    axolotl: dict[str, Any], config: TrainingConfig
) -> None:
    assert set(config.to("axolotl").settings) <= axolotl.keys()


def test_axolotl_does_by_itself_what_is_said_of_it(axolotl: dict[str, Any]) -> None:
    own = {name.name: name.own for name in AXOLOTL.names.values() if name.own is not None}
    assert {name: axolotl[name] for name in own} == own
    assert (axolotl["bf16"], axolotl["tf32"], axolotl["fp16"]) == ("auto", "auto", None)
    assert (axolotl["optimizer"], axolotl["lr_scheduler"], axolotl["max_grad_norm"]) == (
        "adamw_torch_fused",
        "cosine",
        None,
    )
    assert AXOLOTL.unread.keys() - axolotl.keys() <= {
        "load_in_8bit",
        "load_in_4bit",
        "deepspeed",
        "fsdp",
        "fsdp_config",
    }
    schema = source("axolotl", "axolotl/utils/schemas/config.py")
    modes = ", ".join(f'"{mode}"' for name in AXOLOTL.names.values() for mode in name.among)
    assert f"torch_compile_mode: Literal[{modes}] | None" in schema
    assert 'dataloader_params["worker_init_fn"] = partial(' in source(
        "axolotl", "axolotl/core/trainers/base.py"
    )
    without = function(
        tree("axolotl", "axolotl/utils/schemas/config.py"), "default_dataloader_opts"
    )
    assert "data['dataloader_prefetch_factor'] = 256" in without
    assert all(
        f"data.get('{name}') is None" in without
        for name in ("dataloader_num_workers", "dataloader_pin_memory")
    )


@pytest.fixture(scope="module")
def ultralytics() -> dict[str, Any]:
    """The arguments of Ultralytics with their defaults."""
    return dict(yaml.safe_load(source("ultralytics", "ultralytics/cfg/default.yaml")))


@given(config=any_configs())
def test_each_name_of_an_export_is_an_argument_of_ultralytics(
    ultralytics: dict[str, Any], config: TrainingConfig
) -> None:
    export = config.to("ultralytics", optimizer="SGD")
    assert set(export.settings) <= ultralytics.keys()
    assert dict(word.split("=", 1) for word in export.text.split()).keys() == export.settings.keys()


def test_ultralytics_does_by_itself_what_is_said_of_it(ultralytics: dict[str, Any]) -> None:
    names = ("optimizer", "batch", "nbs", "lrf", "warmup_epochs", "channels_last")
    assert tuple(ultralytics[name] for name in names) == ("auto", 16, 64, 0.01, 3.0, None)
    trainer = tree("ultralytics", "ultralytics/engine/trainer.py")
    steps = function(trainer, "_build_train_pipeline")
    accumulated, batch = (
        "max(round(self.args.nbs / self.batch_size), 1)",
        "self.batch_size // max(self.world_size, 1)",
    )
    assert accumulated in steps
    assert batch in steps
    optimizers = function(trainer, "build_optimizer")
    assert "ignoring 'lr0=" in optimizers
    fused = "{'fused': True} if name in {'Adam', 'AdamW'}"
    assert fused in optimizers
    assert "mode=self.args.compile" in ast.unparse(trainer)
    assert "torch.compile(model, mode=mode" in source(
        "ultralytics", "ultralytics/utils/torch_utils.py"
    )
    assert "cv2.setNumThreads(0)" in source("ultralytics", "ultralytics/utils/__init__.py")
    setup = ast.unparse(trainer)
    assert "self.args.amp == 'bf16'" in setup
    assert "find_unused_parameters=not bool(self.args.compile)" in setup
    buffers = "'forward_sync_buffers' if TORCH_2_13 else 'broadcast_buffers'"
    assert buffers in setup
    loader = function(tree("ultralytics", "ultralytics/data/build.py"), "build_dataloader")
    prefetching = "prefetch_factor=(4 if shuffle else 2) if nw > 0 else None"
    assert prefetching in loader
    assert "os.environ['OMP_NUM_THREADS'] = '1'" in ast.unparse(
        tree("ultralytics", "ultralytics/__init__.py")
    )


@pytest.fixture(scope="module")
def composer() -> dict[str, Any]:
    """The arguments of Composer's Trainer with their defaults."""
    module = tree("mosaicml", "composer/trainer/trainer.py")
    trainer = next(
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Trainer"
    )
    start = next(
        node
        for node in trainer.body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    pairs = zip(start.args.kwonlyargs, start.args.kw_defaults, strict=True)
    return {
        argument.arg: None if value is None else ast.unparse(value) for argument, value in pairs
    }


@given(config=any_configs())
def test_each_name_of_an_export_is_an_argument_of_composers_trainer(
    composer: dict[str, Any], config: TrainingConfig
) -> None:
    export = config.to("composer", device="cpu")
    assert set(export.settings) <= composer.keys()
    calls = [node for node in ast.walk(ast.parse(export.text)) if isinstance(node, ast.Call)]
    (call,) = [node for node in calls if ast.unparse(node.func) == "Trainer"]
    assert {keyword.arg for keyword in call.keywords} <= composer.keys()


def test_composer_does_by_itself_what_is_said_of_it() -> None:
    precision = tree("mosaicml", "composer/core/precision.py")
    kinds = {
        ast.literal_eval(node.value)
        for node in ast.walk(precision)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    assert {own["precision"] for own in COMPOSER.precisions.values()} <= kinds
    refused_on_a_cpu = "isinstance(device, DeviceCPU) and precision != Precision.FP32"
    assert refused_on_a_cpu in function(precision, "_validate_precision")
    assert "allow_tf32: bool=True" in ast.unparse(
        tree("mosaicml", "composer/devices/device_gpu.py")
    )
    algorithms = source("mosaicml", "composer/algorithms/__init__.py")
    assert "import ChannelsLast" in algorithms
    assert "torch.compile(self.state.model, **compile_config)" in ast.unparse(
        tree("mosaicml", "composer/trainer/trainer.py")
    )


def test_an_export_of_everything_drops_only_what_has_no_name(
    axolotl: dict[str, Any], ultralytics: dict[str, Any], composer: dict[str, Any]
) -> None:
    for target, names in (
        ("axolotl", axolotl),
        ("ultralytics", ultralytics),
        ("composer", composer),
    ):
        for setting in dict(EVERYTHING.to(target).dropped).keys() - {
            "world_size"
        }:  # a field that axolotl fills itself
            bare = setting.removeprefix("ddp.")
            assert not {bare, f"dataloader_{bare}", f"ddp_{bare}"} & names.keys(), (target, setting)
