"""Take apart, move, resize and compare batches of any type."""

from __future__ import annotations

import os
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from autotune.config.training_config import TrainingConfig
from autotune.worker.batch import (
    Reused,
    batch_bytes,
    batch_fingerprint,
    leaves_of,
    resized,
    tensors_of,
)
from tests.launch.user_batches import Encoding, Graph, Opaque, Sample

Pair = namedtuple("Pair", "x y")
META = torch.device("meta")
ONES, TWOS = torch.ones(3, 4), torch.full((2,), 2.0)


class Anew(Encoding):
    """Moves itself to a new object."""

    def to(self, device: Any) -> Anew:
        return Anew({name: value.to(device) for name, value in self.data.items()})


class InPlace(Graph):
    """Moves itself and forgets to return itself."""

    def to(self, device: Any, *, non_blocking: bool = False) -> None:  # type: ignore[override]
        super().to(device, non_blocking=non_blocking)


class Output(OrderedDict[str, Any]):
    """An output of transformers, which is changed by its keys alone."""

    def update(self, *_: object, **__: object) -> None:
        raise Exception("You cannot use `update`")  # noqa: TRY002 - as transformers does


MAKERS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"x": ONES, "y": TWOS},
    "ordered": lambda: OrderedDict(x=ONES, y=TWOS),
    "transformers' output": lambda: Output(x=ONES, y=TWOS),
    "user's dict": lambda: UserDict(x=ONES, y=TWOS),
    "mapping": lambda: MappingProxyType({"x": ONES, "y": TWOS}),
    "list": lambda: [ONES, [TWOS]],
    "tuple": lambda: (ONES, {"y": TWOS}),
    "namedtuple": lambda: Pair(ONES, TWOS),
    "dataclass": lambda: Sample(ONES, TWOS),
    "encoding": lambda: Encoding(x=ONES, y=TWOS),
    "encoding, anew": lambda: Anew(x=ONES, y=TWOS),
    "graph": lambda: Graph(x=ONES, y=TWOS),
    "graph, returns nothing": lambda: InPlace(x=ONES, y=TWOS),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_batch_keeps_its_type(make: Callable[[], Any]) -> None:
    batch = make()
    assert [tuple(tensor.shape) for tensor in tensors_of(batch)] == [(3, 4), (2,)]
    assert batch_bytes([batch, batch]) == 2 * (12 + 2) * 4
    for config in (TrainingConfig(), TrainingConfig(pin_memory=True)):
        there = config.to_device(make(), META)
        assert type(there) is type(batch)
        assert [tensor.device.type for tensor in tensors_of(there)] == ["meta", "meta"]


def test_object_that_cannot_move() -> None:
    plain, opaque = SimpleNamespace(x=ONES), Opaque(ONES)
    assert TrainingConfig().to_device([plain, opaque], META) == [plain, opaque]
    assert (tensors_of(plain), tensors_of(opaque)) == ([ONES], [])


def test_attributes_of_a_mapping() -> None:
    batch = UserDict(x=ONES)
    batch.n_sequences = 3  # type: ignore[attr-defined]
    there = TrainingConfig().to_device(batch, META)
    assert (there.n_sequences, there["x"].device, batch["x"].device.type) == (3, META, "cpu")


def test_channels_last_at_any_depth() -> None:
    images = torch.zeros(2, 3, 4, 4)
    there = TrainingConfig(channels_last=True).to_device({"images": Sample(images, ONES)}, "cpu")
    assert there["images"].x.is_contiguous(memory_format=torch.channels_last)


def test_graph_that_moves_in_place() -> None:
    batch = Graph(x=ONES)
    supply = Reused([batch])
    for _ in range(3):
        TrainingConfig().to_device(next(supply), META)
    assert batch.x.device.type == "cpu"
    assert supply.handed_out == 3


def test_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin_one(tensor: Tensor, *_: Any) -> Tensor:
        pinned.append(tensor.numel())
        return tensor

    pinned: list[int] = []
    monkeypatch.setattr(Tensor, "pin_memory", pin_one)
    pin: Callable[[Any], Any] = pin_memory
    assert isinstance(pin(Graph(x=ONES, y=TWOS)), Graph)
    assert isinstance(pin(Encoding(x=ONES)), Encoding)
    assert pinned == [12, 2, 12]


def test_leaves_of_a_cycle() -> None:
    a, b = SimpleNamespace(x=1), SimpleNamespace(y="two")
    a.other, b.other = b, a
    assert [leaf for leaf in leaves_of(a) if leaf is not a] == [1, "two"]


def test_sparse_tensor() -> None:
    sparse = torch.eye(3).to_sparse()
    assert batch_bytes([sparse]) == 3 * 2 * 8 + 3 * 4
    assert isinstance(batch_fingerprint({"adjacency": sparse}), int)


def test_fingerprints() -> None:
    assert batch_fingerprint(Graph(x=ONES)) == batch_fingerprint(Graph(x=ONES.clone()))
    assert batch_fingerprint(Graph(x=ONES)) != batch_fingerprint(Graph(x=ONES * 2))
    assert batch_fingerprint(Opaque(ONES)) == os.getpid()


def test_resized() -> None:
    x, y = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    assert resized(x, 3, 5)[:, 0].tolist() == [0, 2, 4, 0, 2]
    assert resized(Pair(x, y), 3, 2).y.tolist() == [0, 1]
    assert isinstance(resized((x, y), 3, 2), tuple)
    assert isinstance(resized(UserDict(x=x), 3, 2), UserDict)
    grown = resized(
        {"x": x, "more": {"y": y}, "all": [x, y], "scale": torch.tensor(2.0), "names": ["a"]}, 3, 4
    )
    assert grown["more"]["y"].tolist() == [0, 1, 2, 0]
    assert grown["all"][1].tolist() == [0, 1, 2, 0]
    assert (grown["scale"].item(), grown["names"]) == (2.0, ["a"])


@pytest.mark.parametrize(
    "batch",
    [(torch.zeros(3), torch.zeros(5)), object(), torch.zeros(()), [Graph(x=ONES), ONES]],
)
def test_batch_that_cannot_be_resized(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"type|shape"):
        resized(batch, 3, 8)
