from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from autotune.core.identity import describe_part
from autotune.core.workload import Ref


def build(name: str) -> str:
    return name


def test_a_function_is_the_same_in_every_process() -> None:
    code = """
from autotune.core.identity import describe_part
def loss(x):
    return x in {"a", "b", "c", "d"}
print(describe_part(loss))
"""
    seen = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        seen.add(done.stdout)
    assert len(seen) == 1


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
