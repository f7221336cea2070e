from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.config.plan import Plan, Ref, Workload
from autotune.records.study_identity import describe_part, identify, parts_of
from autotune.testing import fake_environment
from autotune.trainers.steps import ClippedOptimizer, TrainerStep
from tests.factories.machines import make_fake_space


def build(name: object) -> object:
    return name


def test_a_function_is_the_same_in_every_process() -> None:
    code = """
from autotune.records.study_identity import describe_part
def loss(x):
    return x in {"a", "b", "c", "d"}
print(describe_part(loss))
"""
    seen = {
        subprocess.check_output(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1


def program(code: str, name: str) -> Any:
    """Return an object of a program, which defines it again in each run."""
    scope: dict[str, object] = {"__name__": "program", "torch": torch}
    exec(code, scope)
    return scope[name]


def images(body: str = "index", size: int = 8) -> Any:
    code = f"class Images:\n size = {size}\n def __getitem__(self, index):\n  return {body}"
    return program(code, "Images")


def decoded(body: str) -> Any:
    """Return a dataset that calls a function."""
    code = (
        f"def decode(index):\n return {body}\n"
        "class Images:\n def __getitem__(self, index):\n  return torch.tensor(decode(index))"
    )
    return program(code, "Images")()


def images_with(**attributes: object) -> object:
    dataset = images()()
    vars(dataset).update(attributes)
    return dataset


def net(activation: str) -> nn.Module:
    code = f"class Block(torch.nn.Linear):\n def forward(self, x):\n  return torch.{activation}(x)"
    return nn.Sequential(program(code, "Block")(2, 3))


def scaled(scale: int) -> Callable[[int], int]:
    return lambda x: scale * x


def even() -> Any:
    """Return one of two functions that call each other."""
    code = "def even(n):\n return n == 0 or odd(n - 1)\ndef odd(n):\n return n > 0 and even(n - 1)"
    return program(code, "even")


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (images()(), images()(), True),  # dataset
        (images()(), images("index + 1")(), False),  # items made differently
        (images(), images("index + 1"), False),  # class
        (images()(), images(size=9)(), False),  # value of a class
        (images_with(side=32), images_with(side=64), False),  # attribute
        (images_with(items=[0.1]), images_with(items=[0.2]), True),  # data
        (decoded("index"), decoded("index"), True),  # called code
        (decoded("index"), decoded("index + 1"), False),  # other called code
        (net("relu"), net("relu"), True),  # model
        (net("relu"), net("tanh"), False),  # model of other code
        (nn.Linear(2, 3), nn.Linear(2, 3), True),  # random weights
        (nn.Linear(2, 3), nn.Linear(2, 4), False),  # shapes
        (nn.LazyLinear(3), nn.LazyLinear(3), True),  # lazy model
        (even(), even(), True),  # functions that call each other
        (partial(build, scaled(2)), partial(build, scaled(2)), True),  # closure
        (partial(build, scaled(2)), partial(build, scaled(3)), False),  # its value
        (
            partial(build, name=[scaled, images()()]),
            partial(build, name=[scaled, images()()]),
            True,
        ),  # objects without addresses
        (partial(build, "resnet"), partial(build, "gpt"), False),  # argument
    ],
)
def test_equal_parts_have_equal_texts(one: object, other: object, is_equal: bool) -> None:
    assert (describe_part(one) == describe_part(other)) is is_equal


def test_a_file_counts_by_its_content(tmp_path: Path) -> None:
    ref = Ref(target="net.py:a", folders=(str(tmp_path),))
    found = []
    for text in ("a = 1", "a = 2"):
        (tmp_path / "net.py").write_text(text)
        found.append(describe_part(ref))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (("python", "train.py"), "train.py"),
        (("bash", "run.sh"), "run.sh"),
        (("python", "-m", "pkg.train"), "pkg/train.py"),
        (("python", "-m", "pkg"), "pkg/__main__.py"),
        (("python", "train.py", "--config", "conf.yaml"), "conf.yaml"),
    ],
)
def test_a_command_counts_by_its_words_and_by_the_code_and_settings_that_it_names(
    command: tuple[str, ...], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).parent.mkdir(exist_ok=True)
    found = []
    for text in ("a = 1", "a = 2"):
        Path(file).write_text(text)
        found.append(parts_of(Workload(command=command))["command"])
    assert len({*found, parts_of(Workload(command=(*command, "--x")))["command"]}) == 3


def test_of_a_command_data_outputs_and_what_is_no_file_count_by_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("python", "train.py", "--data=x", "data.json", "log.txt", f"{'a' * 5000}.py", ".")
    found = []
    for text in ("1", "2"):
        Path("data.json").write_text(text * 2_000_000)
        Path("log.txt").write_text(text)
        found.append(parts_of(Workload(command=command))["command"])
    assert found[0] == found[1]


PLAN = Plan(name="x", workload=Workload(model=object, dataset=list))


@pytest.mark.parametrize(
    ("part", "value", "name"),
    [
        ("device_name", "NVIDIA H200", "device"),
        ("device_kind", "rocm", "kind of device"),
        ("device_count", 8, "devices"),
        ("driver", None, "driver"),
        ("cores", 16, "cores"),
        ("torch", "2.13", "torch"),
        ("cuda", "13.0", "CUDA"),
        ("device_names", ("Fake GPU", "Other GPU"), "unlike devices"),
        ("tf32_overrides", ("NVIDIA_TF32_OVERRIDE=0",), "TF32 switches"),
        ("malloc", ("MALLOC_TRIM_THRESHOLD_=0",), "malloc"),
        ("python", "3.14", None),
        ("hosts", 4, None),
        ("ram_bytes", 1, None),
        ("versions", {"numpy": "3"}, None),
    ],
)
def test_each_part_of_the_fingerprint_distinguishes_searches_by_its_own_name(
    part: str, value: Any, name: str | None
) -> None:
    before = fake_environment()
    after = before.model_copy(update={part: value})
    assert (after.fingerprint == before.fingerprint) is (name is None)
    here, there = (
        identify(PLAN, make_fake_space(environment, world_size=1))
        for environment in (after, before)
    )
    assert {key for key in here if here[key] != there[key]} == ({name} if name else set())
    if name:
        text = ", ".join(value) if isinstance(value, tuple) else str(value or "none")
        assert here[name] == text


def test_optimizers_of_other_settings_are_other_optimizers() -> None:
    model = nn.Linear(2, 2)
    groups: list[dict[str, object]] = [
        {"params": [model.weight], "weight_decay": 0.1},
        {"params": [model.bias]},
    ]
    kinds = [
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.SGD(groups, lr=0.1),
        ClippedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 1.0),
        ClippedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 2.0),
        ClippedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), 2.0),
    ]
    assert len({describe_part(optimizer) for optimizer in kinds}) == len(kinds)
    assert describe_part(kinds[0]) == describe_part(
        torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    )


def test_what_a_trainer_is_set_to_tells_its_models_from_another_trainers() -> None:
    model = nn.Linear(2, 2)
    texts = {
        describe_part(TrainerStep(model, None, identity))
        for identity in (("a", "{}"), ("a", "{1}"), ("b", "{}"))
    }
    assert len(texts) == 3
