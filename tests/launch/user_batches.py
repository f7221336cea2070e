"""Batches of types that are neither tensors nor plain containers, as torch_geometric's and transformers' are.

Neither library is installed here: these behave as their classes do where autotune meets them. Loaded by the ranks
themselves, as a user's file is; imported by tests of the worker as well.
Source: torch_geometric/data/data.py (Data, whose attributes lie in a store) and tokenization_utils_base.py of
transformers (BatchEncoding, a UserDict that moves its values in place).
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

NODES = 5


class Store:
    """Holds a graph's attributes, and the graph itself by a weak reference."""

    def __init__(self, parent: Graph, mapping: dict[str, Any]) -> None:
        self._parent, self._mapping = ref(parent), mapping


class Graph:
    """A graph, or several joined into one: its first dimensions are nodes and edges, never samples."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__["_store"] = Store(self, attributes)

    def __getattr__(self, name: str) -> Any:
        if "_store" not in self.__dict__ or name not in self._store._mapping:
            raise AttributeError(name)
        return self._store._mapping[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._store._mapping[name] = value

    def __copy__(self) -> Graph:
        return Graph(**self._store._mapping)

    def __deepcopy__(self, memo: Any) -> Graph:
        return Graph(**copy.deepcopy(self._store._mapping, memo))

    def __reduce__(self) -> Any:
        return _graph, (self._store._mapping,)

    def _apply(self, change: Callable[[Tensor], Tensor]) -> Graph:
        for name, value in self._store._mapping.items():
            self._store._mapping[name] = change(value)
        return self

    def to(self, device: Any, *, non_blocking: bool = False) -> Graph:
        return self._apply(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Graph:
        return self._apply(lambda tensor: tensor.pin_memory())


def _graph(attributes: dict[str, Any]) -> Graph:
    return Graph(**attributes)


class Encoding(UserDict[str, Any]):
    """What a tokenizer returns: items that are attributes too, moved in place."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]

    def to(self, device: Any) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


@dataclass(frozen=True)
class Sample:
    """A dataclass, which has no way to move itself."""

    x: Tensor
    y: Tensor
    name: str = "a sample"


class Opaque:
    """An object whose tensors can't be found: it has no attributes."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden

    def __reduce__(self) -> Any:
        return Opaque, (self.hidden,)


class Graphs(Dataset[Graph]):
    """Graphs of five nodes each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Graph:
        return Graph(x=torch.randn(NODES, 4), y=torch.tensor([index % 2]))


graphs = Graphs


def model() -> nn.Module:
    return nn.Linear(4, 2)


def joined(graphs: list[Graph]) -> Graph:
    """One graph of several, with the number of each node's own."""
    numbers = torch.arange(len(graphs)).repeat_interleave(NODES)
    return Graph(
        x=torch.cat([one.x for one in graphs]),
        y=torch.cat([one.y for one in graphs]),
        batch=numbers,
    )


def graph_step(model: nn.Module, batch: Graph) -> Tensor:
    nodes = model(batch.x)
    outputs = torch.zeros(len(batch.y), 2).index_add(0, batch.batch, nodes)
    return nn.functional.cross_entropy(outputs, batch.y)


def hidden(graphs: list[Graph]) -> Opaque:
    return Opaque(torch.cat([one.x for one in graphs]))


def hidden_step(model: nn.Module, batch: Opaque) -> Tensor:
    outputs: Tensor = model(batch.hidden)
    return outputs.square().mean()
