from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

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
    seen = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        seen.add(done.stdout)
    assert len(seen) == 1


def images(body: str, size: int = 8) -> type:
    """A dataset's class, as a program defines it anew in each run."""
    scope: dict[str, object] = {"__name__": "program"}
    exec(
        f"class Images:\n    size = {size}\n    def __getitem__(self, index):\n        return {body}",
        scope,
    )
    return cast("type", scope["Images"])


def test_a_dataset_whose_items_are_made_in_another_way_is_another_one() -> None:
    assert describe_part(images("index")()) == describe_part(images("index")())
    assert describe_part(images("index")()) != describe_part(images("index + 1")())
    assert describe_part(images("index")) != describe_part(images("index + 1"))
    assert describe_part(images("index")()) != describe_part(images("index", size=9)())


def test_the_plain_attributes_of_a_dataset_count_and_its_data_does_not() -> None:
    kind = images("index")
    small, large, other_data = kind(), kind(), kind()
    small.side, large.side, other_data.side = 32, 64, 32
    small.items, other_data.items = [0.1], [0.2]
    assert describe_part(small) == describe_part(other_data)
    assert describe_part(small) != describe_part(large)


def test_a_model_of_other_code_is_another_one() -> None:
    def net(activation: str) -> torch.nn.Module:
        scope: dict[str, object] = {"__name__": "program", "torch": torch}
        exec(
            f"class Block(torch.nn.Linear):\n    def forward(self, x):\n        return torch.{activation}(x)",
            scope,
        )
        return torch.nn.Sequential(cast("type", scope["Block"])(2, 3))

    assert describe_part(net("relu")) == describe_part(net("relu"))
    assert describe_part(net("relu")) != describe_part(net("tanh"))


def test_what_the_users_code_calls_counts_and_what_is_installed_does_not() -> None:
    def dataset(helper: str) -> object:
        scope: dict[str, object] = {"__name__": "program"}
        code = f"import torch\ndef decode(index):\n    return {helper}\n"
        exec(
            f"{code}class Images:\n    def __getitem__(self, index):\n        return torch.tensor(decode(index))",
            scope,
        )
        return cast("type", scope["Images"])()

    assert describe_part(dataset("index")) == describe_part(dataset("index"))
    assert describe_part(dataset("index")) != describe_part(dataset("index + 1"))


def test_functions_that_call_each_other_are_described() -> None:
    scope: dict[str, object] = {"__name__": "program"}
    exec(
        "def even(n):\n    return n == 0 or odd(n - 1)\ndef odd(n):\n    return n > 0 and even(n - 1)",
        scope,
    )
    assert describe_part(scope["even"]).startswith("even#")


def test_a_partial_of_objects_is_described_without_their_addresses() -> None:
    def loss(scale: int) -> Callable[[int], int]:
        return lambda x: scale * x

    assert describe_part(partial(build, loss(2))) == describe_part(partial(build, loss(2)))
    assert describe_part(partial(build, loss(2))) != describe_part(partial(build, loss(3)))
    assert describe_part(partial(build, name=[loss, images("1")()])) == describe_part(
        partial(build, name=[loss, images("1")()])
    )


def test_partials_of_different_arguments_differ() -> None:
    assert describe_part(partial(build, "resnet")) != describe_part(partial(build, "gpt"))
    assert describe_part(partial(build, "gpt")) == describe_part(partial(build, "gpt"))


def test_a_models_random_weights_do_not_count_but_its_shapes_do() -> None:
    assert describe_part(torch.nn.Linear(2, 3)) == describe_part(torch.nn.Linear(2, 3))
    assert describe_part(torch.nn.Linear(2, 3)) != describe_part(torch.nn.Linear(2, 4))


def test_a_lazy_model_can_be_described() -> None:
    assert "LazyLinear" in describe_part(torch.nn.LazyLinear(3))


def test_a_file_counts_by_its_content(tmp_path: Path) -> None:
    folder = tmp_path
    (folder / "net.py").write_text("a = 1")
    ref = Ref(target="net.py:a", folders=(str(folder),))
    before = describe_part(ref)
    (folder / "net.py").write_text("a = 2")
    assert describe_part(ref) != before


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
    command, found = (
        ("python", "train.py", "--data=x", "data.json", "log.txt", f"{'a' * 5000}.py", "."),
        [],
    )
    for text in ("1", "2"):
        Path("data.json").write_text(text * 2_000_000)
        Path("log.txt").write_text(text)
        found.append(parts_of(Workload(command=command))["command"])
    assert found[0] == found[1]


PLAN = Plan(name="x", workload=Workload(model=object, dataset=list))


@pytest.mark.parametrize(
    ("part", "value", "name", "told"),
    [
        ("device_name", "NVIDIA H200", "device", "NVIDIA H200"),
        ("device_kind", "rocm", "kind of device", "rocm"),
        ("device_count", 8, "devices", "8"),
        ("driver", None, "driver", "none"),
        ("cores", 16, "cores", "16"),
        ("torch", "2.13", "torch", "2.13"),
        ("cuda", "13.0", "CUDA", "13.0"),
        ("device_names", ("Fake GPU", "Other GPU"), "unlike devices", "Fake GPU, Other GPU"),
        ("tf32_overrides", ("NVIDIA_TF32_OVERRIDE=0",), "TF32 switches", "NVIDIA_TF32_OVERRIDE=0"),
        ("malloc", ("MALLOC_TRIM_THRESHOLD_=0",), "malloc", "MALLOC_TRIM_THRESHOLD_=0"),
    ],
)
def test_each_part_of_the_fingerprint_tells_searches_apart_by_its_own_name(
    part: str, value: object, name: str, told: str
) -> None:
    before = fake_environment()
    after = before.model_copy(update={part: value})
    assert after.fingerprint != before.fingerprint
    here, there = (
        identify(PLAN, make_fake_space(environment, world_size=1))
        for environment in (after, before)
    )
    assert {key for key in here if here[key] != there[key]} == {name}
    assert here[name] == told


def test_what_the_fingerprint_leaves_out_tells_no_searches_apart() -> None:
    before = fake_environment()
    after = before.model_copy(
        update={"python": "3.14", "hosts": 4, "ram_bytes": 1, "versions": {"numpy": "3"}}
    )
    assert after.fingerprint == before.fingerprint
    here, there = (
        identify(PLAN, make_fake_space(environment, world_size=1))
        for environment in (after, before)
    )
    assert here == there


def test_optimizers_of_other_settings_are_other_optimizers() -> None:
    model = torch.nn.Linear(2, 2)
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
        torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    )


def test_what_a_trainer_is_set_to_tells_its_models_from_another_trainers() -> None:
    model = torch.nn.Linear(2, 2)
    texts = {
        describe_part(TrainerStep(model, None, identity))
        for identity in (("a", "{}"), ("a", "{1}"), ("b", "{}"))
    }
    assert len(texts) == 3
