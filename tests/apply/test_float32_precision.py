"""Set the precision of float32 products within a context, and restore everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.apply.precision import allows_tf32, exact_matmuls, tf32_products

STATES = Path(__file__).with_name("float32_states.py")
OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"

_PRECISIONS = st.sampled_from(["none", "ieee", "tf32"])
_NODES = st.one_of(
    st.tuples(st.sampled_from(["cuda/all", "cuda/matmul", "cuda/conv", "cuda/rnn"]), _PRECISIONS),
    st.tuples(
        st.sampled_from(
            ["generic/all", "mkldnn/all", "mkldnn/matmul", "mkldnn/conv", "mkldnn/rnn"]
        ),
        _PRECISIONS | st.just("bf16"),
    ),
)
_OLDER = st.one_of(
    st.tuples(
        st.just("set_float32_matmul_precision"), st.sampled_from(["highest", "high", "medium"])
    ),
    st.tuples(st.sampled_from(["cuda.matmul.allow_tf32", "cudnn.allow_tf32"]), st.booleans()),
)
_SETS = st.lists(_NODES | _OLDER, max_size=6)
_CONTEXTS = st.lists(st.sampled_from(["tf32", "exact"]), min_size=1, max_size=3)

Answer = dict[str, Any]


class Torch:
    """An interpreter that sets, looks and tells."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, sets: list[tuple[str, Any]], *enter: str) -> Answer:
        """What torch tells within the contexts and after them, once a user has set this."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"sets": sets, "enter": enter}) + "\n")
        self._process.stdin.flush()
        answer: Answer = json.loads(self._process.stdout.readline())
        # an exception: see what was captured
        assert "status" not in answer
        return answer


@contextmanager
def interpreter(**environment: str) -> Iterator[Torch]:
    """An interpreter whose torch nobody has set but the environment."""
    inherited = {name: value for name, value in os.environ.items() if name != OVERRIDE}
    with subprocess.Popen(
        [sys.executable, str(STATES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=inherited | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
    ) as process:
        yield Torch(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Torch]:
    """As torch begins."""
    with interpreter() as one:
        yield one


@pytest.fixture(scope="module")
def overridden() -> Iterator[Torch]:
    """As torch begins in NVIDIA's containers."""
    with interpreter(**{OVERRIDE: "1"}) as one:
        yield one


@pytest.fixture(scope="module", params=["plain", "overridden"])
def fresh(request: pytest.FixtureRequest) -> Torch:
    """Either."""
    one: Torch = request.getfixturevalue(request.param)
    return one


@pytest.mark.slow
@given(sets=_SETS, contexts=_CONTEXTS)
def test_everything_is_restored(
    fresh: Torch, sets: list[tuple[str, Any]], contexts: list[str]
) -> None:
    assert fresh.ask(sets, *contexts)["after"] == fresh.ask(sets)["after"]


@given(sets=_SETS, contexts=_CONTEXTS)
def test_both_interfaces_show_tf32(
    fresh: Torch, sets: list[tuple[str, Any]], contexts: list[str]
) -> None:
    inside = fresh.ask(sets, *contexts, "tf32")["inside"]
    assert {name: inside[f"cuda/{name}"] for name in ("matmul", "conv", "rnn")} == dict.fromkeys(
        ("matmul", "conv", "rnn"), "tf32"
    )
    assert (inside["get_float32_matmul_precision"], inside["cuda.matmul.allow_tf32"]) == (
        "high",
        True,
    )
    assert inside["cudnn.allow_tf32"] is True


@given(sets=_SETS)
def test_exact_matmuls(fresh: Torch, sets: list[tuple[str, Any]]) -> None:
    before, inside = fresh.ask(sets)["inside"], fresh.ask(sets, "exact")["inside"]
    assert (inside["cuda/matmul"], inside["mkldnn/matmul"]) == ("ieee", "ieee")
    assert (inside["get_float32_matmul_precision"], inside["cuda.matmul.allow_tf32"]) == (
        "highest",
        False,
    )
    for name in ("cuda/conv", "cuda/rnn", "cudnn.allow_tf32"):
        assert inside[name] == before[name]


def test_variable_of_nvidias_containers(overridden: Torch) -> None:
    assert overridden.ask([])["inside"]["cuda/matmul"] == "tf32"
    assert overridden.ask([], "exact")["inside"]["cuda/matmul"] == "ieee"


def test_initial_state_still_inherits(plain: Torch) -> None:
    """Convolutions run in TF32 until someone says otherwise: an exit that wrote "tf32" down would outlive that."""
    before, after = plain.ask([])["after"], plain.ask([], "tf32")["after"]
    assert [seen["cuda/conv"] for seen in after] == [seen["cuda/conv"] for seen in before]


def test_allows_tf32() -> None:
    assert not allows_tf32()
    with tf32_products():
        assert allows_tf32()
        with exact_matmuls():
            assert not allows_tf32()


def test_exception_inside() -> None:
    backends: Any = torch.backends
    before = backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision()
    context = tf32_products()
    with pytest.raises(ArithmeticError), context, exact_matmuls(), context:
        raise ArithmeticError
    assert (backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision()) == before


@pytest.mark.slow
def test_compile_after_the_newer_interface() -> None:
    """torch.compile asks the older interface, which raises where the two differ."""
    backends: Any = torch.backends
    before = backends.cuda.matmul.fp32_precision
    try:
        backends.cuda.matmul.fp32_precision = "ieee"
        with tf32_products():
            compiled = torch.compile(lambda x: x @ x, backend="aot_eager")
            assert torch.equal(compiled(torch.eye(2)), torch.eye(2))
        assert backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        backends.cuda.matmul.fp32_precision = before
        torch.compiler.reset()
