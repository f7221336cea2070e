"""What is set for float32 products while a context is entered, and that all is as it was, to the last bit."""

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
        assert "status" not in answer, "an exception: see what was captured"
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
def test_all_is_as_before_whichever_interface_has_set_it(
    fresh: Torch, sets: list[tuple[str, Any]], contexts: list[str]
) -> None:
    assert fresh.ask(sets, *contexts)["after"] == fresh.ask(sets)["after"]


@given(sets=_SETS, contexts=_CONTEXTS)
def test_both_interfaces_tell_what_is_computed_in(
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
def test_exact_matmuls_are_exact_and_leave_convolutions_alone(
    fresh: Torch, sets: list[tuple[str, Any]]
) -> None:
    before, inside = fresh.ask(sets)["inside"], fresh.ask(sets, "exact")["inside"]
    assert (inside["cuda/matmul"], inside["mkldnn/matmul"]) == ("ieee", "ieee")
    assert (inside["get_float32_matmul_precision"], inside["cuda.matmul.allow_tf32"]) == (
        "highest",
        False,
    )
    for name in ("cuda/conv", "cuda/rnn", "cudnn.allow_tf32"):
        assert inside[name] == before[name]


def test_the_containers_variable_lets_matmuls_run_in_tf32_but_not_exact_ones(
    overridden: Torch,
) -> None:
    assert overridden.ask([])["inside"]["cuda/matmul"] == "tf32"
    assert overridden.ask([], "exact")["inside"]["cuda/matmul"] == "ieee"


def test_what_torch_begins_with_still_follows_all_backends_afterwards(plain: Torch) -> None:
    """Convolutions run in TF32 until someone says otherwise: an exit that wrote "tf32" down would outlive that."""
    before, after = plain.ask([])["after"], plain.ask([], "tf32")["after"]
    assert [seen["cuda/conv"] for seen in after] == [seen["cuda/conv"] for seen in before]


def test_it_is_told_whether_products_are_allowed_in_tf32() -> None:
    assert not allows_tf32()
    with tf32_products():
        assert allows_tf32()
        with exact_matmuls():
            assert not allows_tf32()


def test_an_exception_inside_leaves_no_trace() -> None:
    backends: Any = torch.backends
    before = backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision()
    context = tf32_products()
    with pytest.raises(ArithmeticError), context, exact_matmuls(), context:
        raise ArithmeticError
    assert (backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision()) == before


def test_a_torch_without_the_tree_has_the_older_settings_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are restored by name alone: the tree's values that they imply are torch's own affair."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    own = torch._C._get_fp32_precision_getter("cuda", "matmul")
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_get_fp32_precision_getter")
        with tf32_products():
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (
                "high",
                True,
            )
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
    for backend in ("cuda", "mkldnn"):
        torch._C._set_fp32_precision_setter(backend, "matmul", own)


@pytest.mark.slow
def test_a_model_is_compiled_inside_after_the_newer_interface_alone_was_used() -> None:
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
