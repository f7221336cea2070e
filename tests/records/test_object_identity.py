"""What counts for the identity of a user's object, what does not, and that nothing of it runs."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.records.object_identity import identify_object


def text(value: object) -> str:
    return identify_object(value, "part").text


def left_out(value: object) -> tuple[str, ...]:
    return identify_object(value, "part").not_compared


def defined(code: str, name: str, **globals_: object) -> Any:
    """A function or class, as a program defines it anew in each run."""
    scope: dict[str, object] = {"__name__": "program", **globals_}
    exec(code, scope)
    return scope[name]


def images(body: str, size: int = 8) -> Any:
    return defined(
        f"class Images:\n    size = {size}\n    def __getitem__(self, index):\n        return {body}", "Images"
    )


# Code


def test_a_dataset_whose_items_are_made_in_another_way_is_another_one() -> None:
    assert text(images("index")()) == text(images("index")())
    assert text(images("index")()) != text(images("index + 1")())
    assert text(images("index")) != text(images("index + 1"))
    assert text(images("index")()) != text(images("index", size=9)())


def test_where_code_stands_does_not_count() -> None:
    one = compile("def f(x):\n    return [x for x in range(3)]", "a.py", "exec")
    other = compile("\n\n\n\ndef f(x):\n\n    return [x for x in range(3)]", "b.py", "exec")
    scopes: list[dict[str, Any]] = [{"__name__": "a"}, {"__name__": "b"}]
    for code, scope in zip((one, other), scopes, strict=True):
        exec(code, scope)
    assert text(scopes[0]["f"]) == text(scopes[1]["f"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f(x): return x + 1", "def f(x): return x + 2"),
        ("def f(x): return x.real", "def f(x): return x.imag"),
        ("def f(x, y=1): return y", "def f(x, y=2): return y"),
        ("def f(x, *, y=1): return y", "def f(x, *, y=2): return y"),
        ("def f(x): return (lambda y: y + 1)(x)", "def f(x): return (lambda y: y + 2)(x)"),
        ("WAIT = 1\ndef f(x): return WAIT", "WAIT = 2\ndef f(x): return WAIT"),
        ("def g(x): return 1\ndef f(x): return g(x)", "def g(x): return 2\ndef f(x): return g(x)"),
        ("class G:\n  a = 1\ndef f(x): return G()", "class G:\n  a = 2\ndef f(x): return G()"),
        ("class B:\n  a = 1\nclass f(B): pass", "class B:\n  a = 2\nclass f(B): pass"),
        ("class f:\n  @property\n  def a(self): return 1", "class f:\n  @property\n  def a(self): return 2"),
        ("class f:\n  @staticmethod\n  def a(): return 1", "class f:\n  @staticmethod\n  def a(): return 2"),
        ("class f:\n  @classmethod\n  def a(cls): return 1", "class f:\n  @classmethod\n  def a(cls): return 2"),
    ],
)
def test_changed_code_is_another_identity(before: str, after: str) -> None:
    assert text(defined(before, "f")) == text(defined(before, "f"))
    assert text(defined(before, "f")) != text(defined(after, "f"))


def test_a_closure_counts_by_what_it_holds() -> None:
    def loss(scale: object) -> Callable[[object], object]:
        return lambda x: (scale, x)

    assert text(loss(2)) == text(loss(2))
    assert text(loss(2)) != text(loss(3))
    assert text(loss(loss(2))) != text(loss(loss(3)))


def test_partials_count_by_their_function_and_arguments() -> None:
    assert text(partial(text, "resnet")) == text(partial(text, "resnet"))
    assert text(partial(text, "resnet")) != text(partial(text, "gpt"))
    assert text(partial(dict, x=[images("1")()])) == text(partial(dict, x=[images("1")()]))
    assert text(partial(dict, x=[images("1")()])) != text(partial(dict, x=[images("2")()]))


def test_a_model_of_other_code_inside_is_another_one() -> None:
    def net(activation: str) -> torch.nn.Module:
        code = f"class Block(torch.nn.Linear):\n    def forward(self, x):\n        return torch.{activation}(x)"
        return torch.nn.Sequential(cast("type", defined(code, "Block", torch=torch))(2, 3))

    assert text(net("relu")) == text(net("relu"))
    assert text(net("relu")) != text(net("tanh"))


# Data


def test_a_models_random_weights_do_not_count_but_its_shapes_do() -> None:
    assert text(torch.nn.Linear(2, 3)) == text(torch.nn.Linear(2, 3))
    assert text(torch.nn.Linear(2, 3)) != text(torch.nn.Linear(2, 4))
    assert text(torch.nn.Linear(2, 3)) == text(torch.nn.Linear(2, 3).eval())
    assert text(torch.nn.BatchNorm1d(3)) != text(torch.nn.BatchNorm1d(3, eps=0.1))


def test_a_lazy_model_can_be_described() -> None:
    assert text(torch.nn.LazyLinear(3)).startswith("LazyLinear#")
    assert left_out(torch.nn.LazyLinear(3)) == ()


class Colour(Enum):
    RED = 1
    BLUE = 2


class Photos:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        raise AssertionError("no method of the user's is called")

    def __getattr__(self, name: str) -> object:
        raise AssertionError("no method of the user's is called")

    def __hash__(self) -> int:
        raise AssertionError("no method of the user's is called")

    __eq__ = __lt__ = __repr__ = __reduce__ = __bool__ = __getattr__  # type: ignore[assignment] # none is called


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, 2),
        (1, True),
        (0.5, 0.25),
        ("a", "b"),
        ("1", 1),
        (Path("a"), Path("b")),
        ([1, 2], [2, 1]),
        ([1, 2], (1, 2)),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (np.arange(3), np.arange(3) + 1),
        (np.arange(3), np.arange(3.0)),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        (torch.arange(3), torch.arange(3) + 1),
        (torch.tensor(1), torch.tensor(2)),
        (torch.zeros(2).bfloat16(), torch.ones(2).bfloat16()),
        (np.float32(1), np.float32(2)),
        (torch.float32, torch.float64),
        (range(3), range(4)),
        (SimpleNamespace(a=1), SimpleNamespace(a=2)),
        (Colour.RED, Colour.BLUE),
        (torch.utils.data.TensorDataset(torch.zeros(2)), torch.utils.data.TensorDataset(torch.ones(2))),
        (["x" * 30_000, 1], ["x" * 30_000, 2]),
    ],
)
def test_the_plain_attributes_of_an_object_count(value: object, other: object) -> None:
    assert text(Photos(value=value)) == text(Photos(value=value))
    assert text(Photos(value=value)) != text(Photos(value=other))
    assert left_out(Photos(value=value)) == ()


def test_attributes_in_slots_count() -> None:
    kind = defined("class Slim:\n    __slots__ = ('side', 'unset')\n    def __init__(self, n): self.side = n", "Slim")
    assert text(kind(1)) == text(kind(1))
    assert text(kind(1)) != text(kind(2))


def test_what_an_object_of_a_built_in_kind_holds_counts_with_its_class() -> None:
    kind = defined("class Paths(list):\n    def __iter__(self): raise ValueError", "Paths")
    assert text(kind("ab")) == text(kind("ab"))
    assert text(kind("ab")) != text(kind("ac"))
    assert text(kind("ab")) != text(list("ab"))
    assert text(OrderedDict(a=1)) != text(OrderedDict(a=2))


def test_a_lock_and_a_logger_need_no_mention_but_a_connection_does() -> None:
    assert left_out(Photos(lock=threading.Lock())) == ()
    found = identify_object(Photos(reader=sqlite3.connect(":memory:")), "dataset")
    assert found.not_compared == ("dataset.reader (Connection)",)
    assert found.text.endswith(" (not compared: dataset.reader (Connection))")


def test_large_data_counts_by_its_shape_and_is_named() -> None:
    large = [np.zeros((1000, 1000)), torch.zeros(1000, 1000), list(range(10**6)), "x" * 10**6, set(range(10**5))]
    assert left_out(Photos(a=large[0])) == ("part.a's values (ndarray)",)
    assert left_out(Photos(a=large[1])) == ("part.a's values (Tensor)",)
    assert left_out(Photos(a=large[2])) == ("part.a from item 20000 on (list)",)
    assert len(left_out(large)) == 4
    assert left_out(large)[-1] == "and more"


def test_cycles_and_depth_end() -> None:
    around = Photos()
    around.__dict__["self"] = [around]
    assert text(around) == text(around)
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    assert left_out(deep)


def test_a_class_that_refuses_everything_is_left_out() -> None:
    class Meta(type):
        __hash__ = None  # type: ignore[assignment] # on purpose

        def __getattribute__(cls, name: str) -> object:
            raise RuntimeError(name)

        def __eq__(cls, other: object) -> bool:
            raise RuntimeError("compared")

    class Hostile(metaclass=Meta):
        @cached_property
        def value(self) -> object:
            raise AssertionError("no method of the user's is called")

    assert text(Photos(a=Hostile())) == text(Photos(a=Hostile()))
    assert text(Hostile()).partition("#")[0].endswith("Hostile")


def test_the_users_lambdas_of_main_are_the_same_in_every_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
from functools import partial
import torch
from autotune.records.object_identity import identify_object
NAMES = {"a", "b", "c", "d"}
class Data(torch.utils.data.Dataset):
    kinds = frozenset({"x", "y", "z"})
    def __init__(self): self.tags, self.by = {"p", "q", "r"}, {kind: object for kind in self.kinds}
    def __getitem__(self, index): return NAMES, index in {"k", "l", "m"}
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
    def forward(self, x): return self.layer(x)
def build(width): return lambda: (Net(), width, Data)
parts = [Data(), Net(), build(3), partial(build, {1, "a", None}), lambda batch: NAMES, torch.nn.functional.mse_loss]
for part in parts:
    print(identify_object(part, "part"))
""")
    seen = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=True)
        seen.add(done.stdout)
    (output,) = seen
    assert len(output.splitlines()) == 6
    assert "0x" not in output


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.builds(Path, st.just("a"))
    | st.builds(np.zeros, st.integers(0, 3)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
        | st.builds(lambda held: Photos(held=held), inner)
        | st.builds(lambda held: partial(text, held), inner)
        | st.builds(lambda held: lambda: held, inner)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=200)
@given(value=_VALUES)
def test_any_object_has_an_identity_and_always_the_same(value: object) -> None:
    assert identify_object(value, "part") == identify_object(value, "part")
    assert text(value).isprintable() or not left_out(value)


@settings(deadline=None, max_examples=100)
@given(value=_VALUES, other=_VALUES)
def test_objects_of_another_content_have_another_identity(value: object, other: object) -> None:
    assert (text([value]) == text([other])) == (text(value) == text(other))
